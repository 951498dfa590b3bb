//! Random MXFP4 matrices for tests.

use kernels::{Format, KernelError, PackMxfp4, PackedWeights};

use crate::gpu::{Gpu, Random};

/// MXFP4 matrices, and what they mean.
pub(crate) struct Mxfp4 {
    pub(crate) values: Vec<u8>,
    pub(crate) scales: Vec<u8>,
    pub(crate) shape: [usize; 3],
}

impl Mxfp4 {
    pub(crate) fn random(random: &mut Random, shape: [usize; 3]) -> Self {
        let len: usize = shape.iter().product();
        Self {
            values: (0..len / 2).map(|_| random.next() as u8).collect(),
            // Neighbouring blocks differ, so that a scale taken from next door shows.
            scales: (0..len / 32).map(|_| 117 + random.below(8) as u8).collect(),
            shape,
        }
    }

    /// All matrices, row-major.
    pub(crate) fn decode(&self) -> Vec<f32> {
        const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let value = |i: usize| {
            let nibble = self.values[i / 2] >> (4 * (i % 2)) & 0xf;
            let magnitude = MAGNITUDES[usize::from(nibble & 7)] * 2.0_f32.powi(i32::from(self.scales[i / 32]) - 127);
            if nibble & 8 == 0 { magnitude } else { -magnitude }
        };
        (0..self.values.len() * 2).map(value).collect()
    }

    pub(crate) fn pack(&self, gpu: &Gpu, interleaved: bool) -> Result<PackedWeights, KernelError> {
        self.pack_as(Format::Mxfp4, gpu, interleaved)
    }

    /// As MXFP4 or bf16.
    pub(crate) fn pack_as(&self, format: Format, gpu: &Gpu, interleaved: bool) -> Result<PackedWeights, KernelError> {
        let (values, scales) = (gpu.upload(&self.values), gpu.upload(&self.scales));
        let source = PackMxfp4 { values: values.view(), scales: scales.view(), shape: self.shape, interleaved };
        match format {
            Format::Bf16 => source.pack_as_bf16(&gpu.kernels, &gpu.stream),
            _ => source.pack(&gpu.kernels, &gpu.stream),
        }
    }
}
