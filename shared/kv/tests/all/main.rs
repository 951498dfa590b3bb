//! Table and property tests of page maps, landings and page tables.

mod landing;
mod page_map;
mod prefix_cache;
mod sequence;

use types::{KvDtype, KvLayout};

/// gpt-oss-nano's layout, split over `tp` ranks.
fn layout(tp: u32) -> KvLayout {
    KvLayout {
        full_layers: vec![1, 3],
        window_layers: vec![0, 2],
        kv_heads: 4,
        head_dim: 64,
        page_tokens: 16,
        window: 128,
        dtype: KvDtype::F32,
        tp,
    }
}

/// Contexts at the edges of page and window.
const CONTEXTS: [u32; 14] = [1, 15, 16, 17, 127, 128, 129, 142, 143, 144, 145, 1127, 1128, 1129];
