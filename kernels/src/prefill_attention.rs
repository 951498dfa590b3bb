//! Attention of a run of new tokens of one sequence over its pages.

use device::{DevicePtr, DevicePtrMut, LaunchConfig, Stream, TensorMap, View, ViewMut};
use half::bf16;

use crate::Kernels;
use crate::error::{Checker, Result, int};
use crate::kv_cache::{HEAD_DIM, KvCache, KvFormat};

/// Rows of (token, query head) of a block, keys of a tile, threads: constants of prefill_attention.cu.
const ROWS: usize = 192;
const KEYS: usize = 128;
const THREADS: u32 = 512;
/// 5 stages of keys and values, the queries, and the alignment that the swizzle wants.
pub(crate) const SHARED_BYTES: u32 = ((5 * 2 * KEYS + ROWS) * HEAD_DIM * 2) as u32 + 1024;

/// Causal softmax attention with sinks of `tokens` consecutive tokens, whose keys and values are already in the cache:
/// `out[i, h] = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink_h))`, `s_j = q[i, h] . k_j / sqrt(head_dim)`, over the visible
/// `j <= start + i`.
///
/// Source: `sdpa` in openai/gpt-oss `gpt_oss/torch/model.py`; plain definition: `model::reference::attention`.
#[derive(Debug)]
pub struct PrefillAttention<'a> {
    /// `[tokens, q_heads, head_dim]`, rotated.
    pub q: View<'a, bf16>,
    /// `[q_heads]`
    pub sinks: View<'a, bf16>,
    /// Pages of the layer's group, in bf16; those of E4M3 pass through [`UnpackKv`](crate::UnpackKv).
    pub cache: &'a KvCache,
    /// Layer within the group.
    pub layer: usize,
    /// Position of the first token.
    pub start: usize,
    /// Physical pages of the sequence, in order of positions.
    pub pages: View<'a, i32>,
    /// Logical page of `pages[0]`: 0, or more where a window group has dropped pages.
    pub first_page: usize,
    /// Keys that a query sees, its own included; `None`: all.
    pub window: Option<usize>,
    /// `[tokens, q_heads, head_dim]`
    pub out: ViewMut<'a, bf16>,
}

kernel_args! {
    struct Args = PrefillAttentionArgs in "prefill_attention/prefill_attention.cu" {
        cache: TensorMap,
        q: DevicePtr<bf16>,
        sinks: DevicePtr<bf16>,
        out: DevicePtrMut<bf16>,
        pages: DevicePtr<i32>,
        tokens: i32,
        start: i32,
        first_page: i32,
        page_rows: i32,
        layer_row: i32,
        page_tokens: i32,
        box_tokens: i32,
        kv_heads: i32,
        group_bits: i32,
        tiles: i32,
        window: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 256);

impl PrefillAttention<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the operands disagree or the pages do not reach from the first visible key to the last token, `Dimension` unless
    /// the cache is bf16 and 1, 2, 4 or 8 query heads share a KV head, `Device` if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("prefill_attention");
        let (q_heads, kv_heads) = (self.sinks.len(), self.cache.kv_heads);
        let group = q_heads / kv_heads.max(1);
        let grouped = [1, 2, 4, 8].contains(&group) && group * kv_heads == q_heads;
        check.dimension("query heads", q_heads, "1, 2, 4 or 8 for each kv head", grouped)?;
        let format = self.cache.format;
        check.dimension("cache", format.bytes(), "bf16: 2 bytes", format == KvFormat::Bf16)?;
        check.dimension("layer", self.layer, "below the group's layers", self.layer < self.cache.layers)?;
        let tokens = self.q.len() / (q_heads * HEAD_DIM);
        check.size("q", tokens * q_heads * HEAD_DIM, self.q.len())?;
        check.size("out", tokens * q_heads * HEAD_DIM, self.out.len())?;
        if tokens == 0 {
            return Ok(());
        }
        let page_tokens = self.cache.page_tokens;
        let first_key = self.window.map_or(0, |window| (self.start + 1).saturating_sub(window));
        let in_front = first_key / page_tokens;
        check.dimension(
            "first page",
            self.first_page,
            "at most that of the first visible key",
            self.first_page <= in_front,
        )?;
        check.room("pages", (self.start + tokens).div_ceil(page_tokens) - self.first_page, self.pages.len())?;
        let box_tokens = if page_tokens.is_multiple_of(KEYS) { KEYS } else { page_tokens & page_tokens.wrapping_neg() };
        let tiles = (tokens * group).div_ceil(ROWS);
        let args = Args {
            cache: self.cache.tensor_map(stream, box_tokens)?,
            q: stream.input(&self.q),
            sinks: stream.input(&self.sinks),
            out: stream.output(&mut self.out),
            pages: stream.input(&self.pages),
            tokens: int(tokens),
            start: int(self.start),
            first_page: int(self.first_page),
            page_rows: int(self.cache.page_rows()),
            layer_row: int(self.layer * self.cache.layer_rows()),
            page_tokens: int(page_tokens),
            box_tokens: int(box_tokens),
            kv_heads: int(kv_heads),
            group_bits: group.trailing_zeros() as i32,
            tiles: int(tiles),
            window: int(self.window.unwrap_or(0)),
        };
        let blocks = ((tiles * kv_heads) as u32).min(kernels.multiprocessors);
        let config = LaunchConfig { shared_bytes: SHARED_BYTES, ..LaunchConfig::linear(blocks, THREADS) };
        // SAFETY: operands cover every token and head, and the pages every visible key; that they are pages of the cache is the
        // caller's contract.
        Ok(unsafe { kernels.prefill_attention.launch(stream, config, &args) }?)
    }
}
