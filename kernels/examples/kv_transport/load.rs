//! What stands for a decode step: the products of its layers, one after the other in a CUDA graph, bound by memory.

use device::{Device, Event, Graph, Stream};
use half::bf16;
use kernels::{KernelError, Kernels, Output, PackedWeights, SkinnyGemm, Workspace, pack_bf16};

use crate::median;

/// Rows, k: query, key and value of a layer; eight matrices exceed the L2 cache four times over.
const SHAPE: [usize; 3] = [1, 5120, 2880];
const MATRICES: usize = 8;
const TOKENS: usize = 8;
const LAUNCHES: usize = 96;

pub(crate) struct Load {
    stream: Stream,
    graph: Graph,
}

impl Load {
    pub(crate) fn new(device: &Device) -> Self {
        let stream = device.stream().unwrap();
        let kernels = Kernels::load(device).unwrap();
        let [_, rows, k] = SHAPE;
        let values = stream.upload(&vec![bf16::from_f32(0.01); rows * k]).unwrap();
        let pack = || pack_bf16(&kernels, &stream, values.view(), SHAPE, false).unwrap();
        let weights: Vec<PackedWeights> = (0..MATRICES).map(|_| pack()).collect();
        let x = stream.upload(&vec![bf16::ONE; TOKENS * k]).unwrap();
        let mut out = stream.zeros::<bf16>(TOKENS * rows).unwrap();
        let mut workspace = Workspace::new(&stream).unwrap();
        let capture = |stream: &Stream| {
            (0..LAUNCHES).try_for_each(|launch| {
                SkinnyGemm {
                    weights: &weights[launch % MATRICES],
                    x: x.view(),
                    bias: None,
                    out: Output::Bf16(out.view_mut()),
                    routing: None,
                    workspace: &mut workspace,
                }
                .enqueue(&kernels, stream)
            })
        };
        let graph = stream.capture::<KernelError>(capture).unwrap();
        let mut load = Self { stream, graph };
        load.steps(5);
        load
    }

    /// Bytes of weights that a step reads.
    pub(crate) const fn bytes() -> usize {
        LAUNCHES * SHAPE[1] * SHAPE[2] * 2
    }

    /// Microseconds of each of `count` steps, run without a gap.
    pub(crate) fn steps(&mut self, count: usize) -> Vec<f64> {
        let mut marks: Vec<Event> = vec![self.stream.record().unwrap()];
        for _ in 0..count {
            self.graph.launch(&self.stream).unwrap();
            marks.push(self.stream.record().unwrap());
        }
        marks.last().unwrap().wait().unwrap();
        marks.windows(2).map(|pair| pair[1].elapsed_us(&pair[0]).unwrap()).collect()
    }

    /// Median and 95th percentile of `count` steps, in microseconds.
    pub(crate) fn typical(&mut self, count: usize) -> (f64, f64) {
        let mut steps = self.steps(count);
        steps.sort_by(f64::total_cmp);
        (median(steps.clone()), steps[steps.len() * 95 / 100])
    }
}
