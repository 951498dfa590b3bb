//! What the tests share: the device, random inputs, and comparisons that print coordinates.

#[path = "../../shared/device/tests/skip/mod.rs"]
pub(crate) mod skip;

use device::{Device, DeviceBuffer, DeviceError, Stream};
use half::bf16;
use kernels::{Kernels, Workspace};

/// A device with everything that an operation needs.
pub(crate) struct Gpu {
    pub(crate) stream: Stream,
    pub(crate) kernels: Kernels,
    pub(crate) workspace: Workspace,
}

impl Gpu {
    /// `None`, with a printed reason, where there is no GPU or no kernel.
    pub(crate) fn open() -> Option<Self> {
        if !kernels::AVAILABLE {
            skip::skip(1, "built without nvcc");
            return None;
        }
        let device = match Device::open(0) {
            Ok(device) => device,
            Err(DeviceError::Unavailable { reason }) => {
                skip::skip(1, reason);
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let stream = device.stream().unwrap();
        let kernels = Kernels::load(&device).unwrap();
        let workspace = Workspace::new(&stream).unwrap();
        Some(Self { stream, kernels, workspace })
    }

    /// Device memory whose every byte is 0xff: a NaN in bf16 and f32, -1 in i32.
    pub(crate) fn poisoned<T: bytemuck::Pod>(&self, len: usize) -> DeviceBuffer<T> {
        let mut buffer = self.stream.allocate(len).unwrap();
        self.stream.fill_bytes(buffer.view_mut(), 0xff).unwrap();
        buffer
    }

    pub(crate) fn upload<T: bytemuck::Pod>(&self, values: &[T]) -> DeviceBuffer<T> {
        self.stream.upload(values).unwrap()
    }

    pub(crate) fn download(&self, buffer: &DeviceBuffer<bf16>) -> Vec<f32> {
        widen(&self.stream.download(buffer.view()).unwrap())
    }
}

/// A stream of random numbers (SplitMix64), seeded by the clock: fresh for every run, and printed so that a failure can be rerun with
/// `DAMASK_TEST_SEED`.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new() -> Self {
        let seed = match std::env::var("DAMASK_TEST_SEED") {
            Ok(seed) => seed.parse().unwrap(),
            Err(_) => std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos().into(),
        };
        println!("DAMASK_TEST_SEED={seed}");
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// About normal with standard deviation `scale`: the sum of 4 uniform numbers.
    pub(crate) fn normal(&mut self, scale: f32) -> f32 {
        let bits = self.next();
        let sum: f32 = (0..4).map(|i| ((bits >> (16 * i)) & 0xffff) as f32 / 65536.0 - 0.5).sum();
        sum * scale * 3.0_f32.sqrt()
    }

    pub(crate) fn bf16(&mut self, len: usize, scale: f32) -> Vec<bf16> {
        (0..len).map(|_| bf16::from_f32(self.normal(scale))).collect()
    }
}

pub(crate) fn widen(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

/// Half a unit in the last place of bf16, relative: what one rounding may do.
pub(crate) const BF16_ROUNDING: f32 = 1.0 / 256.0;

/// Compares matrices with `cols` columns. `tolerance(want, i)` is the largest allowed difference.
pub(crate) fn compare(case: &str, got: &[f32], want: &[f32], cols: usize, tolerance: impl Fn(f32, usize) -> f32) {
    assert_eq!(got.len(), want.len(), "{case}: lengths");
    let mut wrong = 0;
    let mut message = String::new();
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let allowed = tolerance(*want, i);
        if (got - want).abs() <= allowed {
            continue;
        }
        if wrong < 8 {
            message += &format!("\n  [{}, {}]: got {got}, want {want} +- {allowed:e}", i / cols, i % cols);
        }
        wrong += 1;
    }
    assert!(wrong == 0, "{case}: {wrong} of {} differ:{message}", want.len());
}

/// `sum_i |x[i] w[o, i]|` of each output: rounding errors of a sum are a multiple of it.
pub(crate) fn magnitudes(x: &[f32], weight: &[f32]) -> Vec<f32> {
    weight.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| (w * x).abs()).sum()).collect()
}

/// Bound on the error of a sum of `terms` products in f32, as a share of the sum of their magnitudes: tensor cores truncate products
/// to the alignment of the largest, so each of the additions may lose one unit of 2^-23.
pub(crate) fn sum_error(terms: usize) -> f32 {
    terms as f32 * 2.0_f32.powi(-23)
}
