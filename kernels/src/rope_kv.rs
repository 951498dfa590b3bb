//! Rotary positions, fused with the write of keys and values into the cache.

use device::{DevicePtr, DevicePtrMut, LaunchConfig, Stream, View, ViewMut};
use half::bf16;

use crate::Kernels;
use crate::error::{Checker, Result, int};
use crate::kv_cache::{HEAD_DIM, KvCache, KvFormat, PageTable};

/// Rotates queries into `q` and keys and values into their pages: `first * cos - second * sin`, `second * cos + first * sin` for
/// the two halves of a head, in f32. In a cache of E4M3, keys and values are rounded once, to nearest even, and limited to +-448.
///
/// Source: `_apply_rotary_emb` in openai/gpt-oss `gpt_oss/torch/model.py`; plain definition: `model::reference::rotate`.
#[derive(Debug)]
pub struct RopeKv<'a> {
    /// `[tokens, (q_heads + 2 kv_heads) * head_dim]`: queries, keys, values.
    pub qkv: View<'a, bf16>,
    /// `[tokens, q_heads, head_dim]`
    pub q: ViewMut<'a, bf16>,
    /// Pages of the layer's group.
    pub cache: &'a mut KvCache,
    /// Layer within the group.
    pub layer: usize,
    /// `[cos, sin]` of each position and channel, `[positions, head_dim / 2]`, concentration included.
    pub angles: View<'a, [f32; 2]>,
    /// Position of each token; negative for padding rows, which are not written to the cache.
    pub positions: View<'a, i32>,
    /// Sequence of each token; `None`: token `t` is sequence `t`.
    pub sequences: Option<View<'a, i32>>,
    /// Pages of the sequences.
    pub table: PageTable<'a>,
}

kernel_args! {
    struct Args = RopeKvArgs in "rope_kv/rope_kv.cu" {
        qkv: DevicePtr<bf16>,
        q: DevicePtrMut<bf16>,
        cache: DevicePtrMut<u8>,
        angles: DevicePtr<[f32; 2]>,
        position: DevicePtr<i32>,
        sequence: DevicePtr<i32>,
        page_table: DevicePtr<i32>,
        first_page: DevicePtr<i32>,
        page_stride: i64,
        layer_offset: i64,
        table_width: i32,
        page_tokens: i32,
        q_heads: i32,
        kv_heads: i32,
        dim: i32,
        is_e4m3: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 104);

impl RopeKv<'_> {
    /// Returns once enqueued. Positions lie within `angles` and the pages of their sequence.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` for a layer that the group does not have or more than 256 heads, `Device` if
    /// the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("rope_kv");
        let (tokens, kv_heads) = (self.positions.len(), self.cache.kv_heads);
        if tokens == 0 {
            return Ok(());
        }
        let q_heads = self.q.len() / (tokens * HEAD_DIM);
        let heads = q_heads + 2 * kv_heads;
        check.dimension("heads", heads, "1 to 256", (1..=256).contains(&heads))?;
        check.dimension("layer", self.layer, "below the group's layers", self.layer < self.cache.layers)?;
        check.size("q", tokens * q_heads * HEAD_DIM, self.q.len())?;
        check.size("qkv", tokens * heads * HEAD_DIM, self.qkv.len())?;
        check.size("angles", self.angles.len() / (HEAD_DIM / 2) * (HEAD_DIM / 2), self.angles.len())?;
        match &self.sequences {
            Some(sequences) => {
                check.size("sequences", tokens, sequences.len())?;
                self.table.check(check, 1)?;
            }
            None => self.table.check(check, tokens)?,
        }
        let args = Args {
            qkv: stream.input(&self.qkv),
            q: stream.output(&mut self.q),
            page_stride: (self.cache.page_rows() * HEAD_DIM) as i64,
            layer_offset: (self.layer * self.cache.layer_rows() * HEAD_DIM) as i64,
            page_tokens: int(self.cache.page_tokens),
            cache: stream.output(&mut self.cache.pool.view_mut()),
            angles: stream.input(&self.angles),
            position: stream.input(&self.positions),
            sequence: self.sequences.map_or(DevicePtr::NULL, |sequences| stream.input(&sequences)),
            page_table: stream.input(&self.table.pages),
            first_page: self.table.first_page.map_or(DevicePtr::NULL, |first| stream.input(&first)),
            table_width: int(self.table.width),
            q_heads: int(q_heads),
            kv_heads: int(kv_heads),
            dim: int(HEAD_DIM),
            is_e4m3: i32::from(self.cache.format == KvFormat::E4M3),
        };
        let threads = (heads * HEAD_DIM / 16).next_multiple_of(32) as u32;
        // SAFETY: one block a token, one thread for 16 channels, all within qkv and q; that positions lead to pages of the cache
        // is the contract of `PageTable`.
        Ok(unsafe { kernels.rope_kv.launch(stream, LaunchConfig::linear(tokens as u32, threads), &args) }?)
    }
}
