//! Identity and shape of a model and its KV cache.

use types::{KvDtype, KvLayout, ModelFingerprint, PageGroup, ParallelLayout, Role};

use super::{InvalidMessage, Result};
use crate::pb;

impl From<ModelFingerprint> for pb::ModelFingerprint {
    fn from(fingerprint: ModelFingerprint) -> Self {
        let ModelFingerprint { model, vocab_size, tokenizer_sha256 } = fingerprint;
        Self { model, vocab_size, tokenizer_sha256 }
    }
}

impl TryFrom<pb::ModelFingerprint> for ModelFingerprint {
    type Error = InvalidMessage;

    fn try_from(message: pb::ModelFingerprint) -> Result<Self> {
        let pb::ModelFingerprint { model, vocab_size, tokenizer_sha256 } = message;
        if model.is_empty() {
            return Err(InvalidMessage::new("model", "is empty"));
        }
        if vocab_size == 0 {
            return Err(InvalidMessage::new("vocab_size", "is 0"));
        }
        Ok(Self { model, vocab_size, tokenizer_sha256 })
    }
}

impl From<ParallelLayout> for pb::ParallelLayout {
    fn from(layout: ParallelLayout) -> Self {
        let ParallelLayout { tp, ep, dp } = layout;
        Self { tp, ep, dp }
    }
}

impl TryFrom<pb::ParallelLayout> for ParallelLayout {
    type Error = InvalidMessage;

    fn try_from(message: pb::ParallelLayout) -> Result<Self> {
        let pb::ParallelLayout { tp, ep, dp } = message;
        for (field, value) in [("tp", tp), ("ep", ep), ("dp", dp)] {
            if value == 0 {
                return Err(InvalidMessage::new(field, "is 0"));
            }
        }
        Ok(Self { tp, ep, dp })
    }
}

impl From<KvLayout> for pb::KvLayout {
    fn from(layout: KvLayout) -> Self {
        let KvLayout { full_layers, window_layers, kv_heads, head_dim, page_tokens, window, dtype, tp } = layout;
        let dtype = dtype.name().to_owned();
        Self { full_layers, window_layers, kv_heads, head_dim, page_tokens, window, dtype, tp }
    }
}

impl TryFrom<pb::KvLayout> for KvLayout {
    type Error = InvalidMessage;

    fn try_from(message: pb::KvLayout) -> Result<Self> {
        let pb::KvLayout { full_layers, window_layers, kv_heads, head_dim, page_tokens, window, dtype, tp } = message;
        let counts = [("kv_heads", kv_heads), ("head_dim", head_dim), ("page_tokens", page_tokens), ("tp", tp)];
        if let Some((field, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return Err(InvalidMessage::new(field, "is 0"));
        }
        if !kv_heads.is_multiple_of(tp) {
            return Err(InvalidMessage::new("tp", format!("is {tp}, which does not divide {kv_heads} kv heads")));
        }
        let dtype = [KvDtype::F32, KvDtype::Bf16, KvDtype::Fp8]
            .into_iter()
            .find(|known| known.name() == dtype)
            .ok_or_else(|| InvalidMessage::new("dtype", format!("is `{dtype}`, known are f32, bf16 and fp8")))?;
        Ok(Self { full_layers, window_layers, kv_heads, head_dim, page_tokens, window, dtype, tp })
    }
}

pub(super) fn role_to_proto(role: Role) -> i32 {
    match role {
        Role::Prefill => pb::WorkerRole::Prefill,
        Role::Decode => pb::WorkerRole::Decode,
    }
    .into()
}

pub(super) fn role(value: i32) -> Result<Role> {
    match pb::WorkerRole::try_from(value) {
        Ok(pb::WorkerRole::Prefill) => Ok(Role::Prefill),
        Ok(pb::WorkerRole::Decode) => Ok(Role::Decode),
        Ok(pb::WorkerRole::Unspecified) | Err(_) => Err(InvalidMessage::new("role", format!("is {value}, unknown"))),
    }
}

pub(super) fn page_group(name: &str) -> Result<PageGroup> {
    PageGroup::ALL
        .into_iter()
        .find(|group| group.name() == name)
        .ok_or_else(|| InvalidMessage::new("group", format!("is `{name}`, known are full and window")))
}
