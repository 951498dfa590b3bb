//! Pages from E4M3 to bf16, for prefill attention.

use device::{DevicePtr, DevicePtrMut, LaunchConfig, Stream, View};

use crate::Kernels;
use crate::error::{Checker, Result};
use crate::kv_cache::{HEAD_DIM, KvCache, KvFormat};

/// Threads of a block, and elements that one takes: constants of unpack_kv.cu.
const THREADS: usize = 256;
const THREAD_ELEMENTS: usize = 16;

/// Widens one layer of some pages, exactly: page `i` of `out` receives page `pages[i]` of `cache`. What attention reads then, in `out`,
/// costs a third more than its own traffic at most, and prefill attention is bound by computing.
///
/// Plain definition: `model::E4M3::to_f32`.
#[derive(Debug)]
pub struct UnpackKv<'a> {
    /// Pages of the layer's group, in E4M3.
    pub cache: &'a KvCache,
    /// Layer within the group.
    pub layer: usize,
    /// Physical pages.
    pub pages: View<'a, i32>,
    /// As many pages of one layer at least, in bf16.
    pub out: &'a mut KvCache,
}

kernel_args! {
    struct Args = UnpackKvArgs in "unpack_kv/unpack_kv.cu" {
        cache: DevicePtr<u8>,
        out: DevicePtrMut<u8>,
        pages: DevicePtr<i32>,
        page_stride: i64,
        layer_offset: i64,
        len: i64,
    }
}

const _: () = assert!(size_of::<Args>() == 48);

impl UnpackKv<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the two caches' pages differ, `Dimension` unless the cache is E4M3, `out` bf16 of one layer, and the layer one of the
    /// group's, `Device` if the launch fails.
    pub fn enqueue(self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("unpack_kv");
        let (cache, out) = (self.cache, self.out);
        check.dimension("cache", cache.format.bytes(), "e4m3: 1 byte", cache.format == KvFormat::E4M3)?;
        check.dimension("out", out.format.bytes(), "bf16: 2 bytes", out.format == KvFormat::Bf16)?;
        check.dimension("layer", self.layer, "below the group's layers", self.layer < cache.layers)?;
        check.dimension("layers of out", out.layers, "1", out.layers == 1)?;
        check.size("rows of a layer", cache.layer_rows(), out.layer_rows())?;
        let (pages, len) = (self.pages.len(), cache.layer_rows() * HEAD_DIM);
        check.room("out", pages * cache.layer_rows(), out.rows())?;
        check.dimension("pages", pages, "at most 65535", pages < 1 << 16)?;
        if pages == 0 {
            return Ok(());
        }
        let args = Args {
            cache: stream.input(&cache.pool.view()),
            out: stream.output(&mut out.pool.view_mut()),
            pages: stream.input(&self.pages),
            page_stride: (cache.page_rows() * HEAD_DIM) as i64,
            layer_offset: (self.layer * len) as i64,
            len: len as i64,
        };
        let blocks = len.div_ceil(THREADS * THREAD_ELEMENTS) as u32;
        let config = LaunchConfig { grid: [blocks, pages as u32, 1], ..LaunchConfig::linear(1, THREADS as u32) };
        // SAFETY: the grid covers `len` elements of `pages` pages, which `out` has room for; that the pages are those of the cache is
        // the caller's contract.
        Ok(unsafe { kernels.unpack_kv.launch(stream, config, &args) }?)
    }
}
