//! The whole model, composed of the definitions in `model::reference`, against fixtures made with transformers
//! (`GptOssForCausalLM`, float32, eager attention). Proves loader and definitions together.

use std::path::Path;

use half::bf16;
use model::reference::{self, AttentionShape, Expert, Routed};
use model::rope::RopeAngles;
use model::{Checkpoint, LayerKind, LayerWeights, Linear, Matrix, ModelConfig, ShardPlan, load_rank};
use safetensors::SafeTensors;
use types::ParallelLayout;

/// Largest max |a - b| / max |b|. The fixtures were computed in f32 and ours sums in f64; the worst seen is 8e-7. Any
/// wrong formula (rope, sinks, a window off by one) is orders of magnitude above.
const TOLERANCE: f64 = 1e-5;
/// Below this distance between 4th and 5th router logit, f32 rounding may swap them.
const ROUTER_GAP: f32 = 1e-4;

#[test]
fn short5_logits() {
    Run::new("short5").check_logits();
}

#[test]
fn len40_logits_and_hidden() {
    let run = Run::new("len40");
    run.check_logits();
    run.check_hidden();
}

#[test]
fn len300_crosses_the_window() {
    let run = Run::new("len300");
    run.check_logits();
    run.check_hidden();
    run.check_routing();
}

struct Run {
    fixture: Vec<u8>,
    config: ModelConfig,
    trace: Trace,
}

/// What the forward pass leaves behind.
struct Trace {
    /// `[position][vocab]`
    logits: Vec<Vec<f32>>,
    /// Residual stream after each block, `[layer][position][hidden]`.
    hidden: Vec<Vec<Vec<f32>>>,
    /// `[layer][position]`, ascending experts.
    routed: Vec<Vec<Vec<Routed>>>,
}

impl Run {
    fn new(name: &str) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/nano");
        let fixture =
            std::fs::read(dir.join(name).with_extension("safetensors")).expect("the fixture is in the repository");
        let tensors = SafeTensors::deserialize(&fixture).expect("fixtures are safetensors files");
        let ids = tensors.tensor("input_ids").expect("every fixture has input_ids");
        let ids: Vec<usize> =
            bytemuck::pod_collect_to_vec::<u8, i32>(ids.data()).iter().map(|&id| id as usize).collect();
        let checkpoint = Checkpoint::embedded_nano();
        let trace = forward(&checkpoint, &ids);
        Self { config: checkpoint.config().clone(), trace, fixture }
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        let tensors = SafeTensors::deserialize(&self.fixture).expect("parsed before");
        let tensor = tensors.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "{name}");
        bytemuck::pod_collect_to_vec(tensor.data())
    }

    /// Fixtures of long sequences hold the last positions only.
    fn check_logits(&self) {
        let expected = self.f32s("logits");
        let positions = expected.len() / self.config.vocab_size;
        let ours = self.trace.logits[self.trace.logits.len() - positions..].concat();
        assert_close("logits", &ours, &expected);
    }

    fn check_hidden(&self) {
        for (layer, hidden) in self.trace.hidden.iter().enumerate() {
            assert_close(&format!("hidden.{layer}"), &hidden.concat(), &self.f32s(&format!("hidden.{layer}")));
        }
    }

    fn check_routing(&self) {
        let k = self.config.experts_per_token;
        for (layer, routed) in self.trace.routed.iter().enumerate() {
            let gaps = self.f32s(&format!("router_gap.{layer}"));
            let weights = self.f32s(&format!("router_weights.{layer}"));
            let tensors = SafeTensors::deserialize(&self.fixture).expect("parsed before");
            let topk = tensors.tensor(&format!("router_topk.{layer}")).expect("len300 has router picks");
            let topk: Vec<usize> = match topk.dtype() {
                safetensors::Dtype::I32 => {
                    bytemuck::pod_collect_to_vec::<u8, i32>(topk.data()).iter().map(|&id| id as usize).collect()
                }
                safetensors::Dtype::I64 => {
                    bytemuck::pod_collect_to_vec::<u8, i64>(topk.data()).iter().map(|&id| id as usize).collect()
                }
                other => panic!("router_topk is {other:?}"),
            };
            let (mut ours, mut expected) = (Vec::new(), Vec::new());
            for (position, routed) in routed.iter().enumerate().filter(|(position, _)| gaps[*position] >= ROUTER_GAP) {
                let experts: Vec<usize> = routed.iter().map(|routed| routed.expert).collect();
                assert_eq!(experts, topk[position * k..][..k], "layer {layer} position {position}");
                ours.extend(routed.iter().map(|routed| routed.weight));
                expected.extend_from_slice(&weights[position * k..][..k]);
            }
            assert!(ours.len() > 4 * 200, "layer {layer}: most positions have a clear fourth expert");
            assert_close(&format!("router weights.{layer}"), &ours, &expected);
        }
    }
}

fn assert_close(what: &str, ours: &[f32], expected: &[f32]) {
    assert_eq!(ours.len(), expected.len(), "{what}: number of values");
    let scale = expected.iter().fold(0.0f64, |max, &value| max.max(f64::from(value.abs())));
    let (at, error) = ours
        .iter()
        .zip(expected)
        .map(|(&a, &b)| (f64::from(a) - f64::from(b)).abs())
        .enumerate()
        .fold((0, 0.0), |worst, (i, error)| if error > worst.1 || error.is_nan() { (i, error) } else { worst });
    println!("{what}: {:.2e} of the largest value", error / scale);
    assert!(
        error / scale < TOLERANCE,
        "{what}[{at}] is {}, expected {} (largest value {scale})",
        ours[at],
        expected[at]
    );
}

fn forward(checkpoint: &Checkpoint, ids: &[usize]) -> Trace {
    let config = checkpoint.config();
    let plan = ShardPlan::new(config, ParallelLayout::tp(1), 0).expect("one rank holds any model");
    let weights = load_rank(checkpoint, &plan, &|_, _| ()).expect("the embedded model loads");
    let mut residual: Vec<Vec<f32>> = ids.iter().map(|&id| wide(weights.embedding.row(id))).collect();
    let mut trace = Trace { logits: Vec::new(), hidden: Vec::new(), routed: Vec::new() };
    for (layer, layer_weights) in weights.layers.iter().enumerate() {
        attention_block(config, config.layer_kinds[layer], layer_weights, &mut residual);
        trace.routed.push(moe_block(config, layer_weights, &mut residual));
        trace.hidden.push(residual.clone());
    }
    let (norm, head) = (wide(&weights.final_norm), wide(&weights.head.values));
    for x in &residual {
        trace.logits.push(reference::linear(&reference::rmsnorm(x, &norm, config.rms_norm_eps), &head, None));
    }
    trace
}

fn attention_block(config: &ModelConfig, kind: LayerKind, weights: &LayerWeights, residual: &mut [Vec<f32>]) {
    let norm = wide(&weights.attn_norm);
    let [q, k, v, o] = [&weights.q, &weights.k, &weights.v, &weights.o].map(WideLinear::new);
    let angles = RopeAngles::new(&config.rope, config.head_dim);
    let (mut cos, mut sin) = (vec![0.0; config.head_dim / 2], vec![0.0; config.head_dim / 2]);
    let shape = AttentionShape {
        num_heads: config.num_heads,
        num_kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        window: (kind == LayerKind::Sliding).then_some(config.window),
    };
    let sinks = wide(&weights.sinks);
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for (position, x) in residual.iter_mut().enumerate() {
        let normed = reference::rmsnorm(x, &norm, config.rms_norm_eps);
        let (mut query, mut key) = (q.apply(&normed), k.apply(&normed));
        angles.fill(position, &mut cos, &mut sin);
        for head in query.chunks_exact_mut(config.head_dim).chain(key.chunks_exact_mut(config.head_dim)) {
            reference::rotate(head, &cos, &sin);
        }
        keys.extend(key);
        values.extend(v.apply(&normed));
        add(x, &o.apply(&reference::attention(&query, &keys, &values, &sinks, shape)));
    }
}

fn moe_block(config: &ModelConfig, weights: &LayerWeights, residual: &mut [Vec<f32>]) -> Vec<Vec<Routed>> {
    let norm = wide(&weights.mlp_norm);
    let router = WideLinear::new(&weights.router);
    let experts: Vec<Expert> = weights
        .experts
        .iter()
        .map(|expert| Expert {
            gate_up: wide(&expert.gate_up.dequantize()),
            gate_up_bias: wide(&expert.gate_up_bias),
            down: wide(&expert.down.dequantize()),
            down_bias: wide(&expert.down_bias),
        })
        .collect();
    let mut trace = Vec::new();
    for x in residual {
        let normed = reference::rmsnorm(x, &norm, config.rms_norm_eps);
        let mut routed = reference::route(&router.apply(&normed), config.experts_per_token);
        add(x, &reference::moe(&normed, &routed, &experts, config.swiglu_limit));
        routed.sort_by_key(|routed| routed.expert);
        trace.push(routed);
    }
    trace
}

struct WideLinear {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl WideLinear {
    fn new(linear: &Linear) -> Self {
        let Matrix { values, .. } = &linear.weight;
        Self { weight: wide(values), bias: wide(&linear.bias) }
    }

    fn apply(&self, x: &[f32]) -> Vec<f32> {
        reference::linear(x, &self.weight, Some(&self.bias))
    }
}

fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

fn wide(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}
