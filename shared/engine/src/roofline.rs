//! Lower bounds of a step's time on one GPU, with MXFP4 experts and everything else in bf16: what must be read, at the
//! rate at which memory can be read, or what must be computed, at the rate of the tensor cores, whichever takes longer.
//! Floors, not forecasts: no gaps between kernels, routing uniform and independent.

use model::{LayerKind, ModelConfig};

/// Bytes of an MXFP4 weight: 4 bits, and one scale byte for 32 weights.
const MXFP4_BYTES: f64 = 4.25 / 8.0;
const BF16_BYTES: f64 = 2.0;

/// What a GPU can do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Memory, read or copied.
    pub bytes_per_s: f64,
    /// bf16 products on the tensor cores.
    pub flops_per_s: f64,
    /// Causal attention, head dimension 64.
    pub attention_flops_per_s: f64,
}

impl Machine {
    /// An H200 whose memory was measured at `bytes_per_s`, with what large products and attention achieve at best.
    #[must_use]
    pub const fn h200(bytes_per_s: f64) -> Self {
        Self { bytes_per_s, flops_per_s: 790e12, attention_flops_per_s: 500e12 }
    }
}

/// What a step must do at least.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    /// Read from memory.
    pub bytes: f64,
    /// Multiplications and additions of products and attention.
    pub flops: f64,
    /// Time.
    pub seconds: f64,
}

/// Weights of a layer that every token meets, beside the router's.
fn dense_weights(config: &ModelConfig) -> f64 {
    ((config.q_width() + 2 * config.kv_width()) * config.hidden_size + config.q_width() * config.hidden_size) as f64
}

fn expert_weights(config: &ModelConfig) -> f64 {
    (3 * config.intermediate_size * config.hidden_size) as f64
}

fn head_bytes(config: &ModelConfig) -> f64 {
    (config.vocab_size * config.hidden_size) as f64 * BF16_BYTES
}

fn count(config: &ModelConfig, kind: LayerKind) -> f64 {
    config.layers_of(kind).len() as f64
}

/// Expected number of experts that `tokens` tokens visit.
#[must_use]
pub fn experts_touched(config: &ModelConfig, tokens: usize) -> f64 {
    let (experts, top) = (config.num_experts as f64, config.experts_per_token as f64);
    experts * (1.0 - (1.0 - top / experts).powf(tokens as f64))
}

/// One decode step of `batch` sequences, each with `context` keys in its cache.
#[must_use]
pub fn decode(config: &ModelConfig, machine: &Machine, batch: usize, context: usize) -> Bound {
    let (layers, tokens) = (config.num_layers as f64, batch as f64);
    let (dense, expert) = (dense_weights(config), expert_weights(config));
    let router = (config.hidden_size * config.num_experts) as f64 * BF16_BYTES;
    let expert_bytes = experts_touched(config, batch) * expert * MXFP4_BYTES;
    let expert_flops = 2.0 * tokens * config.experts_per_token as f64 * expert;
    let dense_flops = 2.0 * tokens * dense;
    let key_bytes = 2.0 * config.kv_width() as f64 * BF16_BYTES;
    let keys = count(config, LayerKind::Full) * context as f64
        + count(config, LayerKind::Sliding) * context.min(config.window) as f64;
    let kv_bytes = tokens * key_bytes * keys;
    let time = |bytes: f64, flops: f64| (bytes / machine.bytes_per_s).max(flops / machine.flops_per_s);
    let layer = time(expert_bytes, expert_flops) + time(dense * BF16_BYTES, dense_flops) + router / machine.bytes_per_s;
    Bound {
        bytes: layers * (expert_bytes + dense * BF16_BYTES + router) + kv_bytes + head_bytes(config),
        flops: layers * (expert_flops + dense_flops) + 4.0 * tokens * config.q_width() as f64 * keys,
        seconds: layers * layer + (kv_bytes + head_bytes(config)) / machine.bytes_per_s,
    }
}

/// One prompt of `tokens` tokens, nothing cached; the head for its last token only.
#[must_use]
pub fn prefill(config: &ModelConfig, machine: &Machine, tokens: usize) -> Bound {
    let (layers, n) = (config.num_layers as f64, tokens as f64);
    let (dense, expert, top) = (dense_weights(config), expert_weights(config), config.experts_per_token as f64);
    let (hidden, units) = (config.hidden_size as f64, config.intermediate_size as f64);
    let time = |bytes: f64, flops: f64| (bytes / machine.bytes_per_s).max(flops / machine.flops_per_s);
    let expert_bytes = experts_touched(config, tokens) * expert * MXFP4_BYTES;
    let (dense_flops, expert_flops) = (2.0 * n * dense, 2.0 * n * top * expert);
    // The residual stream and the activations pass through memory between kernels.
    let widths = (config.q_width() + 2 * config.kv_width()) as f64;
    let activation_bytes =
        n * (6.0 * hidden * BF16_BYTES + 2.0 * widths * BF16_BYTES + top * (2.0 * hidden * BF16_BYTES + 3.0 * units));
    let attention = |keys: f64| 4.0 * config.q_width() as f64 * n * keys;
    let attention_flops = count(config, LayerKind::Full) * attention(n / 2.0)
        + count(config, LayerKind::Sliding) * attention(n.min(config.window as f64));
    let layer = time(dense * BF16_BYTES, dense_flops)
        + time(expert_bytes, expert_flops)
        + activation_bytes / machine.bytes_per_s;
    Bound {
        bytes: layers * (expert_bytes + dense * BF16_BYTES + activation_bytes) + head_bytes(config),
        flops: layers * (dense_flops + expert_flops) + attention_flops,
        seconds: layers * layer
            + attention_flops / machine.attention_flops_per_s
            + head_bytes(config) / machine.bytes_per_s,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of an independent calculation, in Python, for 4.3 TB/s; printed to two (decode) and one (prefill)
    /// decimals of a millisecond.
    #[test]
    fn bounds_agree_with_an_independent_calculation() {
        let machine = Machine::h200(4.3e12);
        let (small, large) = (ModelConfig::gpt_oss_20b(), ModelConfig::gpt_oss_120b());
        let cases = [
            (&small, 1, 1024, 0.868),
            (&small, 8, 1024, 2.169),
            (&small, 32, 1024, 3.105),
            (&small, 128, 1024, 3.770),
            (&large, 1, 8192, 1.234),
            (&large, 8, 8192, 4.468),
            (&large, 32, 8192, 12.040),
            (&large, 128, 8192, 23.773),
        ];
        for (config, batch, context, want) in cases {
            let ms = decode(config, &machine, batch, context).seconds * 1e3;
            assert!((ms - want).abs() <= 0.0006, "batch {batch}, context {context}: {ms} ms, want {want}");
        }
        let cases = [
            (&small, 1024, 9.1),
            (&small, 8192, 82.8),
            (&small, 32768, 488.9),
            (&large, 1024, 18.5),
            (&large, 8192, 124.1),
            (&large, 32768, 733.1),
        ];
        for (config, tokens, want) in cases {
            let ms = prefill(config, &machine, tokens).seconds * 1e3;
            assert!((ms - want).abs() <= 0.06, "{tokens} tokens: {ms} ms, want {want}");
        }
    }

    #[test]
    fn experts_touched_by_uniform_routing() {
        let large = ModelConfig::gpt_oss_120b();
        for (batch, want) in [(1, 4.0), (8, 28.7), (32, 81.7), (128, 125.8)] {
            assert!((experts_touched(&large, batch) - want).abs() < 0.06, "batch {batch}");
        }
    }
}
