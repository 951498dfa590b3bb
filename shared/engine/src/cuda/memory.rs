//! How much of a GPU's memory a rank takes, before it takes any.

use device::Device;
use model::{DenseFormat, ExpertFormat, ModelConfig, ShardPlan, rank_bytes};
use types::{KvDtype, PageGroup};

use super::collective::Sizes;
use super::{CudaOptions, kv_layout};
use crate::EngineError;

/// The CUDA context, kernels, graphs, partial sums, padding of weights, and buffers for collectives and transfers.
const OVERHEAD_BYTES: u64 = 3 << 30;
/// bf16.
const ACTIVATION_BYTES: u64 = 2;
/// For each slot and token of the vocabulary: a logit, a count, and a bias with its token, 4 bytes each.
const SAMPLER_BYTES: u64 = 16;

/// What the rank of a layout that needs most takes of its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryNeeds {
    /// Weights, activations, sampling state, and what the driver takes: everything but the pages.
    pub fixed_bytes: u64,
    /// A page for the layers of full attention.
    pub full_page_bytes: u64,
    /// A page for the layers of sliding-window attention.
    pub window_page_bytes: u64,
}

impl MemoryNeeds {
    /// Of a rank with weights as the options say; pages are counted by nobody yet.
    ///
    /// # Errors
    /// [`EngineError::Layout`].
    pub fn of(config: &ModelConfig, options: &CudaOptions) -> Result<Self, EngineError> {
        let ranks =
            ShardPlan::all(config, options.layout)?.into_iter().map(|plan| Self::of_rank(config, options, &plan));
        // A layout has one rank at least, and every rank the same pages.
        Ok(ranks.max_by_key(|needs| needs.fixed_bytes).expect("a layout has ranks"))
    }

    fn of_rank(config: &ModelConfig, options: &CudaOptions, plan: &ShardPlan) -> Self {
        let (dp, step_tokens) = (options.layout.dp, options.max_step_tokens.max(options.max_slots));
        let (slots, tokens) = (u64::from(options.max_slots.div_ceil(dp)), u64::from(step_tokens));
        let (hidden, top) = (config.hidden_size as u64, config.experts_per_token as u64);
        let q = (plan.heads.len() * config.head_dim) as u64;
        let kv = (plan.kv_heads.len() * config.head_dim) as u64;
        // The residual stream three times, q k v, queries and attention, and for each expert of a token its input, units and output.
        let widths = 3 * hidden + (q + 2 * kv) + 2 * q + top * (2 * hidden + plan.units.len() as u64);
        // One layer of the longest sequence in bf16, for prefill over a cache in E4M3.
        let widened = match options.kv_dtype {
            KvDtype::Fp8 => u64::from(options.max_context_tokens) * 2 * kv * ACTIVATION_BYTES,
            KvDtype::Bf16 | KvDtype::F32 => 0,
        };
        // Inputs of FP8 products, a byte a value.
        let fp8_experts =
            if options.scheme.experts == ExpertFormat::Fp8 { top * (hidden + plan.units.len() as u64) } else { 0 };
        let fp8_dense = if options.scheme.dense == DenseFormat::Fp8 { hidden + q } else { 0 };
        let bytes = widths * ACTIVATION_BYTES + fp8_experts + fp8_dense + 4 * config.num_experts as u64;
        // The tokens of all attention groups, and where they are exchanged.
        let sizes = Sizes { hidden: config.hidden_size, max_tokens: step_tokens as usize, vocab: config.vocab_size };
        let between = if dp > 1 {
            tokens * hidden * ACTIVATION_BYTES + sizes.between_groups(options.layout).bytes() as u64
        } else {
            0
        };
        let activations = tokens * bytes + between;
        let held = ModelConfig { stored: options.scheme, ..config.clone() };
        let sampling = slots * config.vocab_size as u64 * SAMPLER_BYTES;
        let layout = kv_layout(config, options);
        let page_bytes = |group: PageGroup| {
            layout.layers(group).len() as u64 * plan.kv_heads.len() as u64 * layout.head_bytes() as u64
        };
        Self {
            fixed_bytes: rank_bytes(&held, plan) + activations + widened + sampling + OVERHEAD_BYTES,
            full_page_bytes: page_bytes(PageGroup::Full),
            window_page_bytes: page_bytes(PageGroup::Window),
        }
    }

    /// Full pages that fit into `bytes` beside everything else, `window_pages` included.
    #[must_use]
    pub const fn full_pages_within(&self, bytes: u64, window_pages: u32) -> u64 {
        let taken = self.fixed_bytes + self.window_page_bytes * window_pages as u64;
        bytes.saturating_sub(taken) / self.full_page_bytes
    }
}

/// Bytes of a GPU's memory, in total. Opens a context on it for the moment.
///
/// # Errors
/// [`EngineError::Gpu`] without driver or such a GPU.
pub fn gpu_memory_bytes(ordinal: u32) -> Result<u64, EngineError> {
    let (_, total) = Device::open(ordinal)?.memory_bytes()?;
    Ok(total as u64)
}

#[cfg(test)]
mod tests {
    use types::{KvDtype, ParallelLayout};

    use super::*;
    use crate::cuda::Precision;

    fn options(layout: ParallelLayout, max_slots: u32, max_step_tokens: u32) -> CudaOptions {
        CudaOptions {
            layout,
            scheme: model::WeightScheme::default(),
            routing: Precision::Bf16,
            kv_dtype: KvDtype::Bf16,
            page_tokens: 64,
            full_pages: 1,
            window_pages: 1,
            max_slots,
            max_step_tokens,
            max_context_tokens: 131_072,
            publish_layers: None,
            masked_tokens: Vec::new(),
            devices: vec![0],
            probe: None,
        }
    }

    #[test]
    fn a_page_of_120b_and_what_fits_on_an_h200() {
        let config = ModelConfig::gpt_oss_120b();
        let needs = MemoryNeeds::of(&config, &options(ParallelLayout::tp(1), 128, 128)).unwrap();
        // 18 layers, 8 heads, keys and values of 64 positions and 64 channels in bf16.
        assert_eq!(
            (needs.full_page_bytes, needs.window_page_bytes),
            (18 * 8 * 2 * 64 * 64 * 2, 18 * 8 * 2 * 64 * 64 * 2)
        );
        let gib = needs.fixed_bytes as f64 / f64::from(1 << 30);
        assert!((63.0..66.0).contains(&gib), "{gib} GiB");
        let h200 = 139 << 30;
        let tokens = 64 * needs.full_pages_within(h200 * 9 / 10, 500);
        assert!((1_600_000..2_000_000).contains(&tokens), "{tokens} tokens");
        assert_eq!(needs.full_pages_within(60 << 30, 500), 0);
    }

    #[test]
    fn pages_in_fp8_take_half() {
        let config = ModelConfig::gpt_oss_120b();
        let options = options(ParallelLayout::tp(1), 128, 128);
        let bf16 = MemoryNeeds::of(&config, &options).unwrap();
        let fp8 = MemoryNeeds::of(&config, &CudaOptions { kv_dtype: KvDtype::Fp8, ..options }).unwrap();
        assert_eq!(
            (2 * fp8.full_page_bytes, 2 * fp8.window_page_bytes),
            (bf16.full_page_bytes, bf16.window_page_bytes)
        );
        // Keys and values of 8 heads at 131,072 positions, in bf16.
        assert_eq!(fp8.fixed_bytes - bf16.fixed_bytes, 131_072 * 2 * 8 * 64 * 2);
    }

    #[test]
    fn ranks_share_weights_and_heads() {
        let config = ModelConfig::gpt_oss_120b();
        let one = MemoryNeeds::of(&config, &options(ParallelLayout::tp(1), 4, 8192)).unwrap();
        let four = MemoryNeeds::of(&config, &options(ParallelLayout { tp: 4, ep: 4, dp: 1 }, 4, 8192)).unwrap();
        assert_eq!(four.full_page_bytes * 4, one.full_page_bytes);
        assert!(four.fixed_bytes < one.fixed_bytes / 3);
    }

    #[test]
    fn attention_groups_have_all_heads_and_a_share_of_slots_and_experts() {
        let config = ModelConfig::gpt_oss_20b();
        let of = |layout| MemoryNeeds::of(&config, &options(layout, 128, 128)).unwrap();
        let one = of(ParallelLayout::tp(1));
        let groups = of(ParallelLayout { tp: 1, ep: 2, dp: 2 });
        assert_eq!(groups.full_page_bytes, one.full_page_bytes);
        // Half of 24 layers of 32 experts in MXFP4, half of the slots, and room for exchanges.
        let saved = 12 * 32 * 3 * 2880 * 2880 / 32 * 17 + 64 * 201_088 * 16;
        let exchanged = 128 * 2880 * 2 + 6 * 128 * 2880 / 2 * 8;
        let difference = one.fixed_bytes as i64 - groups.fixed_bytes as i64;
        assert!((difference - (saved - exchanged)).abs() < 20 << 20, "{difference}, want {}", saved - exchanged);
    }
}
