//! Lower bounds of a step's time, with weights held as the config says and everything else in bf16: what each GPU must read, at the rate at
//! which memory can be read, or what it must compute, at the rate of the tensor cores, whichever takes longer; and with
//! several GPUs two sums over them a layer, or with several attention groups what lies between these. Floors, not forecasts: no
//! gaps between kernels, routing uniform and independent.

use model::{DenseFormat, ExpertFormat, LayerKind, ModelConfig};

/// Bytes of an MXFP4 weight: 4 bits, and one scale byte for 32 weights.
const MXFP4_BYTES: f64 = 4.25 / 8.0;
const BF16_BYTES: f64 = 2.0;
/// Bytes of an FP8 weight; the scales of 128 x 128 are less than a thousandth.
const FP8_BYTES: f64 = 1.0;

/// What a GPU can do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Memory, read or copied.
    pub bytes_per_s: f64,
    /// bf16 products on the tensor cores.
    pub flops_per_s: f64,
    /// FP8 products on them.
    pub fp8_flops_per_s: f64,
    /// Causal attention, head dimension 64: the best that its kernel reaches (`kernels/RESULTS.md`).
    pub attention_flops_per_s: f64,
}

impl Machine {
    /// An H200 whose memory was measured at `bytes_per_s`, with what large products and attention achieve at best.
    #[must_use]
    pub const fn h200(bytes_per_s: f64) -> Self {
        Self { bytes_per_s, flops_per_s: 790e12, fp8_flops_per_s: 1400e12, attention_flops_per_s: 590e12 }
    }
}

/// GPUs that run a model together: `dp` attention groups, over each of which attention and head are split; experts are split `ep` ways
/// over all GPUs, and each expert's matrices over what is left.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Group {
    /// GPUs.
    pub ranks: usize,
    /// Ways in which the experts are split.
    pub ep: usize,
    /// Attention groups, among which the sequences of a step are dealt out evenly.
    pub dp: usize,
    /// The shortest sum over all GPUs, of one token.
    pub all_reduce_s: f64,
    /// From one GPU to another.
    pub link_bytes_per_s: f64,
}

impl Group {
    /// One GPU.
    pub const ALONE: Self = Self { ranks: 1, ep: 1, dp: 1, all_reduce_s: 0.0, link_bytes_per_s: f64::INFINITY };

    /// GPUs of an attention group.
    #[must_use]
    pub const fn tp(&self) -> usize {
        self.ranks / self.dp
    }

    /// Sequences of the attention group that has most, of `batch`.
    #[must_use]
    pub const fn sequences(&self, batch: usize) -> usize {
        batch.div_ceil(self.dp)
    }

    /// A sum of `bytes` over an attention group: each GPU sends all to all others, or (at the price of a second meeting) its share of
    /// the sum, whichever is sooner done.
    #[must_use]
    pub fn all_reduce(&self, bytes: f64) -> f64 {
        if self.dp > 1 && self.tp() == 1 {
            return 0.0;
        }
        let (ranks, others) = (self.tp() as f64, self.tp() as f64 - 1.0);
        let at_once = self.all_reduce_s + others * bytes / self.link_bytes_per_s;
        let in_two = 1.6 * self.all_reduce_s + 2.0 * others / ranks * bytes / self.link_bytes_per_s;
        at_once.min(in_two)
    }

    /// What a layer of a step of `batch` sequences, `row_bytes` each, takes between GPUs. With one attention group: two sums. With several:
    /// the sum behind attention within a group, the way of all rows to all groups (a GPU gets those of the others, and the GPUs of a group
    /// share in sending its own), and the sum behind experts (a GPU sends a part of each row of the others, and gets one of its own).
    #[must_use]
    pub fn exchanges(&self, batch: usize, row_bytes: f64) -> f64 {
        let own = self.sequences(batch) as f64;
        let sum = self.all_reduce(own * row_bytes);
        if self.dp == 1 {
            return 2.0 * sum;
        }
        let foreign = (batch - batch / self.dp) as f64;
        let gathered = foreign.max(own * (self.dp as f64 - 1.0) / self.tp() as f64);
        let scattered = foreign.max(own);
        sum + 2.0 * self.all_reduce_s + (gathered + scattered) * row_bytes / self.link_bytes_per_s
    }

    /// Experts whose weights the busiest GPU reads for `tokens` tokens, as parts of whole experts.
    fn experts(&self, config: &ModelConfig, tokens: usize) -> f64 {
        let of_each = self.ranks as f64 / self.ep as f64;
        if self.ep == 1 {
            return experts_touched(config, tokens) / of_each;
        }
        // Beyond this many pairs of token and expert every expert is met.
        let most = 64 * config.num_experts / config.experts_per_token;
        experts_of_the_busiest(config, tokens.min(most), self.ep) / of_each
    }
}

/// What a step must do at least; bytes and flops are those of one GPU, the busiest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    /// Read from memory.
    pub bytes: f64,
    /// Multiplications and additions of products and attention.
    pub flops: f64,
    /// Time.
    pub seconds: f64,
}

impl Bound {
    /// The same step with fewer bytes to read.
    #[must_use]
    pub fn without(self, machine: &Machine, bytes: f64) -> Self {
        Self { bytes: self.bytes - bytes, seconds: self.seconds - bytes / machine.bytes_per_s, ..self }
    }
}

/// What a decode step reads of a cache in bf16: `context` keys for each of `batch` sequences, fewer in window layers.
#[must_use]
pub fn cached_bytes(config: &ModelConfig, batch: usize, context: usize) -> f64 {
    let keys = count(config, LayerKind::Full) * context as f64
        + count(config, LayerKind::Sliding) * context.min(config.window) as f64;
    batch as f64 * 2.0 * config.kv_width() as f64 * BF16_BYTES * keys
}

/// Weights of a layer that every token meets, beside the router's.
fn dense_weights(config: &ModelConfig) -> f64 {
    ((config.q_width() + 2 * config.kv_width()) * config.hidden_size + config.q_width() * config.hidden_size) as f64
}

fn expert_weights(config: &ModelConfig) -> f64 {
    (3 * config.intermediate_size * config.hidden_size) as f64
}

fn head_bytes(config: &ModelConfig) -> f64 {
    (config.vocab_size * config.hidden_size) as f64 * dense_bytes(config)
}

/// Bytes of a weight of attention or the head.
fn dense_bytes(config: &ModelConfig) -> f64 {
    if config.stored.dense == DenseFormat::Fp8 { FP8_BYTES } else { BF16_BYTES }
}

/// Bytes of an expert's weight.
fn expert_bytes_each(config: &ModelConfig) -> f64 {
    match config.stored.experts {
        ExpertFormat::Mxfp4 => MXFP4_BYTES,
        ExpertFormat::Fp8 => FP8_BYTES,
        ExpertFormat::Bf16 => BF16_BYTES,
    }
}

impl Machine {
    fn dense_flops_per_s(&self, config: &ModelConfig) -> f64 {
        if config.stored.dense == DenseFormat::Fp8 { self.fp8_flops_per_s } else { self.flops_per_s }
    }

    fn expert_flops_per_s(&self, config: &ModelConfig) -> f64 {
        if config.stored.experts == ExpertFormat::Fp8 { self.fp8_flops_per_s } else { self.flops_per_s }
    }
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

/// Expected number of experts that `tokens` tokens visit on the busiest of `ep` GPUs: the mean of 400 draws.
fn experts_of_the_busiest(config: &ModelConfig, tokens: usize, ep: usize) -> f64 {
    const DRAWS: usize = 400;
    let (experts, top) = (config.num_experts, config.experts_per_token);
    let mut state = 7_u64;
    let mut below = |end: usize| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) as usize % end
    };
    let mut sum = 0;
    for _ in 0..DRAWS {
        let mut hit = vec![false; experts];
        for _ in 0..tokens {
            let mut picks: Vec<usize> = Vec::with_capacity(top);
            while picks.len() < top {
                let pick = below(experts);
                if !picks.contains(&pick) {
                    picks.push(pick);
                }
            }
            picks.into_iter().for_each(|pick| hit[pick] = true);
        }
        let load = |part: &[bool]| part.iter().filter(|hit| **hit).count();
        sum += hit.chunks(experts / ep).map(load).max().unwrap_or(0);
    }
    sum as f64 / DRAWS as f64
}

/// One decode step of `batch` sequences, each with `context` keys in its cache.
#[must_use]
pub fn decode(config: &ModelConfig, machine: &Machine, group: &Group, batch: usize, context: usize) -> Bound {
    let (layers, tokens, ranks) = (config.num_layers as f64, batch as f64, group.ranks as f64);
    // Of the GPU whose attention group has most sequences.
    let (own, tp) = (group.sequences(batch) as f64, group.tp() as f64);
    let (dense, expert) = (dense_weights(config) / tp, expert_weights(config));
    let router = (config.hidden_size * config.num_experts) as f64 * BF16_BYTES;
    let expert_bytes = group.experts(config, batch) * expert * expert_bytes_each(config);
    let expert_flops = 2.0 * tokens * config.experts_per_token as f64 * expert / ranks;
    let dense_flops = 2.0 * own * dense;
    let key_bytes = 2.0 * config.kv_width() as f64 * BF16_BYTES / tp;
    let keys = count(config, LayerKind::Full) * context as f64
        + count(config, LayerKind::Sliding) * context.min(config.window) as f64;
    let kv_bytes = own * key_bytes * keys;
    let head_bytes = head_bytes(config) / tp;
    let time = |bytes: f64, flops: f64, rate: f64| (bytes / machine.bytes_per_s).max(flops / rate);
    let (dense_rate, expert_rate) = (machine.dense_flops_per_s(config), machine.expert_flops_per_s(config));
    let exchanges = group.exchanges(batch, config.hidden_size as f64 * BF16_BYTES);
    let layer = time(expert_bytes, expert_flops, expert_rate)
        + time(dense * dense_bytes(config), dense_flops, dense_rate)
        + router / machine.bytes_per_s
        + exchanges;
    Bound {
        bytes: layers * (expert_bytes + dense * dense_bytes(config) + router) + kv_bytes + head_bytes,
        flops: layers * (expert_flops + dense_flops) + 4.0 * own * config.q_width() as f64 / tp * keys,
        seconds: layers * layer + (kv_bytes + head_bytes) / machine.bytes_per_s,
    }
}

/// One prompt of `tokens` tokens, nothing cached; the head for its last token only. Of one attention group: prefill has no more.
#[must_use]
pub fn prefill(config: &ModelConfig, machine: &Machine, group: &Group, tokens: usize) -> Bound {
    let (layers, n, ranks) = (config.num_layers as f64, tokens as f64, group.ranks as f64);
    let (dense, expert, top) = (dense_weights(config) / ranks, expert_weights(config), config.experts_per_token as f64);
    let (hidden, units) = (config.hidden_size as f64, config.intermediate_size as f64);
    let time = |bytes: f64, flops: f64, rate: f64| (bytes / machine.bytes_per_s).max(flops / rate);
    let (dense_rate, expert_rate) = (machine.dense_flops_per_s(config), machine.expert_flops_per_s(config));
    let expert_bytes = group.experts(config, tokens) * expert * expert_bytes_each(config);
    let (dense_flops, expert_flops) = (2.0 * n * dense, 2.0 * n * top * expert / ranks);
    // The residual stream and the activations pass through memory between kernels.
    let widths = (config.q_width() + 2 * config.kv_width()) as f64 / ranks;
    let expert_widths = top * (2.0 * hidden * BF16_BYTES + 3.0 * units) / ranks;
    let activation_bytes = n * (6.0 * hidden * BF16_BYTES + 2.0 * widths * BF16_BYTES + expert_widths);
    let attention = |keys: f64| 4.0 * config.q_width() as f64 / ranks * n * keys;
    let attention_flops = count(config, LayerKind::Full) * attention(n / 2.0)
        + count(config, LayerKind::Sliding) * attention(n.min(config.window as f64));
    let sums = 2.0 * group.all_reduce(n * hidden * BF16_BYTES);
    let layer = time(dense * dense_bytes(config), dense_flops, dense_rate)
        + time(expert_bytes, expert_flops, expert_rate)
        + activation_bytes / machine.bytes_per_s
        + sums;
    let head_bytes = head_bytes(config) / ranks;
    Bound {
        bytes: layers * (expert_bytes + dense * dense_bytes(config) + activation_bytes) + head_bytes,
        flops: layers * (dense_flops + expert_flops) + attention_flops,
        seconds: layers * layer + attention_flops / machine.attention_flops_per_s + head_bytes / machine.bytes_per_s,
    }
}

#[cfg(test)]
mod tests {
    use model::WeightScheme;

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
            let ms = decode(config, &machine, &Group::ALONE, batch, context).seconds * 1e3;
            assert!((ms - want).abs() <= 0.0006, "batch {batch}, context {context}: {ms} ms, want {want}");
        }
        let cases = [
            (&small, 1024, 9.1),
            (&small, 8192, 80.8),
            (&small, 32768, 456.4),
            (&large, 1024, 18.4),
            (&large, 8192, 121.0),
            (&large, 32768, 684.5),
        ];
        for (config, tokens, want) in cases {
            let ms = prefill(config, &machine, &Group::ALONE, tokens).seconds * 1e3;
            assert!((ms - want).abs() <= 0.06, "{tokens} tokens: {ms} ms, want {want}");
        }
    }

    /// The same calculation for FP8 throughout.
    #[test]
    fn fp8_bounds_agree_with_an_independent_calculation() {
        let machine = Machine::h200(4.3e12);
        let fp8 = WeightScheme { experts: ExpertFormat::Fp8, dense: DenseFormat::Fp8 };
        let as_fp8 = |config: ModelConfig| ModelConfig { stored: fp8, ..config };
        let (small, large) = (as_fp8(ModelConfig::gpt_oss_20b()), as_fp8(ModelConfig::gpt_oss_120b()));
        for (config, batch, want) in [(&small, 1, 0.85), (&small, 32, 4.88), (&large, 1, 1.21), (&large, 128, 27.9)] {
            let ms = decode(config, &machine, &Group::ALONE, batch, 1024).seconds * 1e3;
            assert!((ms - want).abs() <= 0.02 * want, "batch {batch}: {ms} ms, want {want}");
        }
        for (config, tokens, want) in [(&small, 8192, 53.3), (&small, 32768, 346.9), (&large, 8192, 79.9)] {
            let ms = prefill(config, &machine, &Group::ALONE, tokens).seconds * 1e3;
            assert!((ms - want).abs() <= 0.02 * want, "{tokens} tokens: {ms} ms, want {want}");
        }
    }

    #[test]
    fn experts_touched_by_uniform_routing() {
        let large = ModelConfig::gpt_oss_120b();
        for (batch, want) in [(1, 4.0), (8, 28.7), (32, 81.7), (128, 125.8)] {
            assert!((experts_touched(&large, batch) - want).abs() < 0.06, "batch {batch}");
        }
    }

    /// `(GPUs, ways of experts, batch, ms)`
    const SEVERAL: [(usize, usize, usize, f64); 9] = [
        (2, 1, 1, 0.981),
        (2, 1, 8, 2.604),
        (2, 1, 128, 12.367),
        (2, 2, 1, 1.062),
        (2, 2, 8, 2.83),
        (2, 2, 128, 12.417),
        (4, 4, 1, 0.798),
        (4, 4, 8, 1.782),
        (4, 4, 128, 6.717),
    ];

    /// Values of the same independent calculation for 120b, 8192 keys, 5 us a sum and 450 GB/s a link.
    #[test]
    fn bounds_of_several_gpus_agree_with_it_too() {
        let (machine, config) = (Machine::h200(4.3e12), ModelConfig::gpt_oss_120b());
        for (ranks, ep, batch, want) in SEVERAL {
            let group = Group { ranks, ep, dp: 1, all_reduce_s: 5e-6, link_bytes_per_s: 450e9 };
            let ms = decode(&config, &machine, &group, batch, 8192).seconds * 1e3;
            // The busiest GPU's experts are a mean over random draws there and here.
            let tolerance = if ep > 1 { 0.02 * want } else { 0.0006 };
            assert!((ms - want).abs() <= tolerance, "{ranks} ranks, ep {ep}, batch {batch}: {ms} ms, want {want}");
        }
    }

    /// With attention groups the busiest GPU has all of attention's weights and the cache of its own sequences, and experts as under TP.
    #[test]
    fn attention_groups_are_counted_by_the_busiest() {
        let (machine, config) = (Machine::h200(4.3e12), ModelConfig::gpt_oss_20b());
        let tensor = Group { ranks: 2, ep: 2, dp: 1, all_reduce_s: 5e-6, link_bytes_per_s: 450e9 };
        let data = Group { dp: 2, ..tensor };
        let step = |group: &Group, batch| decode(&config, &machine, group, batch, 8192);
        let half_dense = 24.0 * dense_weights(&config) + head_bytes(&config) / BF16_BYTES;
        for (batch, own) in [(1, 1.0), (2, 1.0), (3, 2.0), (128, 64.0)] {
            let (by_heads, by_sequences) = (step(&tensor, batch), step(&data, batch));
            let cache = cached_bytes(&config, 1, 8192);
            let more = half_dense + (own - batch as f64 / 2.0) * cache;
            let found = by_sequences.bytes - by_heads.bytes;
            assert!((found - more).abs() < 1.0, "batch {batch}: {found} bytes more, want {more}");
        }
        // Two ways of 5 us a layer in both; of 128 rows 64 each way twice, or 128 twice.
        let rows = |group: &Group| group.exchanges(128, 5760.0) - 10e-6;
        assert!((rows(&data) - 128.0 * 5760.0 / 450e9).abs() < 1e-12);
        assert!((rows(&tensor) - 2.0 * 128.0 * 5760.0 / 450e9).abs() < 1e-12);
        let four = Group { ranks: 4, ep: 4, ..data };
        assert_eq!((four.tp(), four.sequences(5)), (2, 3));
        assert!(four.exchanges(1, 5760.0) > 15e-6, "three exchanges where a group has two GPUs");
    }
}
