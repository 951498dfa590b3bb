//! Where slices of KV lie on a rank: the same on every backend.

use std::ops::Range;

use kv::KvSlice;
use model::{LayerKind, ModelConfig, ShardPlan};
use types::{KvLayout, PageGroup};

/// The page group of a model layer, and its place among that group's layers.
pub(crate) fn page_group(config: &ModelConfig, layer: usize) -> (PageGroup, usize) {
    let kind = config.layer_kinds[layer];
    let place = config.layer_kinds[..layer].iter().filter(|other| **other == kind).count();
    match kind {
        LayerKind::Full => (PageGroup::Full, place),
        LayerKind::Sliding => (PageGroup::Window, place),
    }
}

/// The place of a slice of `bytes` bytes on the rank of `plan`: the layer among those of its group, and the rank's own
/// heads.
///
/// # Errors
/// What does not fit.
pub(crate) fn locate(
    config: &ModelConfig,
    plan: &ShardPlan,
    layout: &KvLayout,
    slice: &KvSlice,
    bytes: usize,
) -> Result<(usize, Range<usize>), String> {
    let layer = slice.layer as usize;
    if layer >= config.num_layers || page_group(config, layer).0 != slice.group {
        return Err(format!("layer {layer} is not in group {}", slice.group));
    }
    let (own, heads) = (&plan.kv_heads, slice.heads());
    let (start, end) = (heads.start as usize, heads.end as usize);
    if start < own.start || end > own.end {
        return Err(format!("the rank holds kv heads {own:?}"));
    }
    let expected = slice.head_count as usize * layout.head_bytes();
    if bytes != expected {
        return Err(format!("{bytes} bytes where {expected} are needed"));
    }
    Ok((page_group(config, layer).1, start - own.start..end - own.start))
}
