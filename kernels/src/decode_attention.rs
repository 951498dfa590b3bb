//! Attention of one new token a sequence over its pages.

use device::{DevicePtr, DevicePtrMut, Kernel, LaunchConfig, Module, Stream, TensorMap, View, ViewMut};
use half::bf16;

use crate::error::{Checker, Result, int};
use crate::kv_cache::{HEAD_DIM, KvCache, KvFormat, PageTable, TILE_TOKENS};
use crate::{Kernels, Workspace};

/// 4 warps with 3 tiles of keys and values in flight each, and the alignment that the swizzle wants: constants of
/// decode_attention.cu.
const fn shared_bytes(format: KvFormat) -> u32 {
    4 * 3 * 2 * (TILE_TOKENS * HEAD_DIM * format.bytes()) as u32 + 1024
}

/// Blocks that share a multiprocessor: launch bounds of decode_attention.cu.
const fn resident(format: KvFormat) -> usize {
    match format {
        KvFormat::Bf16 => 2,
        KvFormat::E4M3 => 4,
    }
}

/// Query heads that share a KV head at most.
const GROUP: usize = 8;
/// f32 of a partial result: maximum, sum, 2 unused, and the weighted values.
const PART: usize = HEAD_DIM + 4;
/// Most splits of a context.
const MAX_SPLITS: usize = 64;

/// Softmax attention with sinks over the cached keys that each sequence's newest token sees:
/// `out[b, h] = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink_h))`, `s_j = q[b, h] . k_j / sqrt(head_dim)`.
///
/// Source: `sdpa` in openai/gpt-oss `gpt_oss/torch/model.py`; plain definition: `model::reference::attention`.
#[derive(Debug)]
pub struct DecodeAttention<'a> {
    /// `[batch, q_heads, head_dim]`, rotated.
    pub q: View<'a, bf16>,
    /// `[q_heads]`
    pub sinks: View<'a, bf16>,
    /// Pages of the layer's group.
    pub cache: &'a KvCache,
    /// Layer within the group.
    pub layer: usize,
    /// Keys of each sequence, the newest included, `[batch]`; 0 for padding rows.
    pub contexts: View<'a, i32>,
    /// Row of the page table of each query; `None`: query `b` is sequence `b`.
    pub sequences: Option<View<'a, i32>>,
    /// Pages of the sequences.
    pub table: PageTable<'a>,
    /// Keys that a query sees, its own included; `None`: all.
    pub window: Option<usize>,
    /// Longest context for which the work is spread; longer ones are still right. Fixed when a graph is captured.
    pub max_context: usize,
    /// `[batch, q_heads, head_dim]`
    pub out: ViewMut<'a, bf16>,
    /// Scratch of this stream.
    pub workspace: &'a mut Workspace,
}

/// Kernels by the format of the cache.
#[derive(Debug)]
pub(crate) struct Variants {
    bf16: Kernel,
    e4m3: Kernel,
}

impl Variants {
    pub(crate) fn load(module: &Module) -> Result<Self> {
        Ok(Self {
            bf16: module.kernel("decode_attention", shared_bytes(KvFormat::Bf16))?,
            e4m3: module.kernel("decode_attention_e4m3", shared_bytes(KvFormat::E4M3))?,
        })
    }
}

kernel_args! {
    struct Args = DecodeAttentionArgs in "decode_attention/decode_attention.cu" {
        cache: TensorMap,
        q: DevicePtr<bf16>,
        sinks: DevicePtr<bf16>,
        out: DevicePtrMut<bf16>,
        context: DevicePtr<i32>,
        sequence: DevicePtr<i32>,
        page_table: DevicePtr<i32>,
        first_page: DevicePtr<i32>,
        partials: DevicePtrMut<f32>,
        counters: DevicePtrMut<u32>,
        page_rows: i32,
        layer_row: i32,
        table_width: i32,
        page_tokens: i32,
        q_heads: i32,
        kv_heads: i32,
        window: i32,
        padding: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 256);

impl DecodeAttention<'_> {
    /// Returns once enqueued. Contexts lie within the pages of their sequence.
    ///
    /// # Errors
    /// `Size` if the operands disagree or the workspace is too small, `Dimension` unless 1 to 8 query heads share a KV head,
    /// `Device` if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("decode_attention");
        let (batch, q_heads, kv_heads) = (self.contexts.len(), self.sinks.len(), self.cache.kv_heads);
        if batch == 0 {
            return Ok(());
        }
        let group = q_heads / kv_heads.max(1);
        let grouped = (1..=GROUP).contains(&group) && group * kv_heads == q_heads;
        check.dimension("query heads", q_heads, "1 to 8 for each kv head", grouped)?;
        check.dimension("layer", self.layer, "below the group's layers", self.layer < self.cache.layers)?;
        check.size("q", batch * q_heads * HEAD_DIM, self.q.len())?;
        check.size("out", batch * q_heads * HEAD_DIM, self.out.len())?;
        match &self.sequences {
            Some(sequences) => {
                check.size("sequences", batch, sequences.len())?;
                self.table.check(check, 1)?;
            }
            None => self.table.check(check, batch)?,
        }
        let keys = self.window.map_or(self.max_context, |window| self.max_context.min(window));
        let splits = splits(
            keys,
            batch * kv_heads,
            resident(self.cache.format) * kernels.multiprocessors as usize,
            self.cache.format,
        );
        let [partials, counters] = scratch(batch * kv_heads, splits);
        check.room("partials", partials, self.workspace.partials.len())?;
        check.room("counters", counters, self.workspace.counters.len())?;
        let args = Args {
            cache: self.cache.tensor_map(stream, TILE_TOKENS)?,
            q: stream.input(&self.q),
            sinks: stream.input(&self.sinks),
            out: stream.output(&mut self.out),
            context: stream.input(&self.contexts),
            sequence: self.sequences.map_or(DevicePtr::NULL, |sequences| stream.input(&sequences)),
            page_table: stream.input(&self.table.pages),
            first_page: self.table.first_page.map_or(DevicePtr::NULL, |first| stream.input(&first)),
            partials: stream.output(&mut self.workspace.partials.view_mut()),
            counters: stream.output(&mut self.workspace.counters.view_mut()),
            page_rows: int(self.cache.page_rows()),
            layer_row: int(self.layer * self.cache.layer_rows()),
            table_width: int(self.table.width),
            page_tokens: int(self.cache.page_tokens),
            q_heads: int(q_heads),
            kv_heads: int(kv_heads),
            window: int(self.window.unwrap_or(0)),
            padding: 0,
        };
        let config = LaunchConfig {
            grid: [splits as u32, kv_heads as u32, batch as u32],
            shared_bytes: shared_bytes(self.cache.format),
            ..LaunchConfig::linear(1, 128)
        };
        let kernel = match self.cache.format {
            KvFormat::Bf16 => &kernels.decode_attention.bf16,
            KvFormat::E4M3 => &kernels.decode_attention.e4m3,
        };
        // SAFETY: operands and workspace cover what the grid touches; that contexts lead to pages of the cache is the contract
        // of `PageTable`.
        Ok(unsafe { kernel.launch(stream, config, &args) }?)
    }
}

/// Parts into which a context of `keys` keys is split: as many as keep all blocks resident at once, of which `blocks` can be, but no
/// part shorter than the tiles of 16 KB that its 4 warps take at a time: in E4M3 two for each.
fn splits(keys: usize, pairs: usize, blocks: usize, format: KvFormat) -> usize {
    let resident = (blocks / pairs).max(1);
    let longest = keys.div_ceil(8 / format.bytes() * TILE_TOKENS).max(1);
    resident.min(longest).min(MAX_SPLITS)
}

/// Partial sums and counters that `pairs` pairs of sequence and KV head take in the workspace: the only part of a context is written as it is.
const fn scratch(pairs: usize, splits: usize) -> [usize; 2] {
    if splits > 1 { [pairs * splits * GROUP * PART, pairs] } else { [0, 0] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::{COUNTERS, PARTIALS};

    /// As many sequences as a worker may have, one KV head a rank or all: a graph is recorded for each number at start.
    #[test]
    fn any_number_of_sequences_fits_the_workspace() {
        for format in [KvFormat::Bf16, KvFormat::E4M3] {
            for kv_heads in [1, 2, 4, 8] {
                for batch in (1..=64).chain([128, 256, 512, 1024, 4096]) {
                    for keys in [128, 1024, 8192, 131_072] {
                        let pairs = batch * kv_heads;
                        let splits = splits(keys, pairs, resident(format) * 132, format);
                        let [partials, counters] = scratch(pairs, splits);
                        let case = format!("{format:?}, {batch} x {kv_heads}, {keys} keys, {splits} splits");
                        assert!(partials <= PARTIALS && counters <= COUNTERS, "{case}: {partials}");
                    }
                }
            }
        }
        assert_eq!(scratch(16, 64), [16 * 64 * 8 * 68, 16]);
    }

    #[test]
    fn few_sequences_are_split_and_many_are_not() {
        let bf16 = |keys, pairs| splits(keys, pairs, 264, KvFormat::Bf16);
        assert_eq!(bf16(8192, 8), 33);
        assert_eq!(bf16(8192, 128 * 8), 1);
        assert_eq!(bf16(128, 8), 1);
        assert_eq!(bf16(131_072, 1), 64);
        assert_eq!(splits(8192, 8, 528, KvFormat::E4M3), 32);
    }
}
