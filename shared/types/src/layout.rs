//! How a model is spread over ranks, and how its KV cache lies in memory: what two workers compare before they exchange pages.

use std::fmt;

use crate::slots::DpGroup;

/// What a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes prompts and sends their KV cache away.
    Prefill,
    /// Receives KV caches and generates.
    Decode,
}

impl Role {
    /// As it stands in logs, metrics, config files and the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Degrees of parallelism. Ranks = `tp` x `dp`; `ep` divides that: within a group of ranks experts are split `ep` ways, and each
/// expert's matrices `tp * dp / ep` ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParallelLayout {
    /// Attention heads and dense matrices are split this many ways.
    pub tp: u32,
    /// Experts are split this many ways.
    pub ep: u32,
    /// Attention groups, each of which works on sequences of its own ([`DpGroup`]).
    #[serde(default = "one")]
    pub dp: u32,
}

fn one() -> u32 {
    1
}

impl ParallelLayout {
    /// Tensor parallelism alone: every expert split over all ranks.
    #[must_use]
    pub const fn tp(tp: u32) -> Self {
        Self { tp, ep: 1, dp: 1 }
    }

    /// Number of ranks, one GPU or thread each.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.tp * self.dp
    }

    /// Ways in which each expert's own matrices are split.
    #[must_use]
    pub const fn expert_tp(&self) -> u32 {
        self.ranks() / self.ep
    }
}

impl fmt::Display for ParallelLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EP{} DP{} TP{}", self.ep, self.dp, self.tp)
    }
}

/// The two kinds of KV pages of a model that alternates full and sliding-window attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PageGroup {
    /// Layers that see the whole context.
    Full,
    /// Layers that see the last `window` positions.
    Window,
}

impl PageGroup {
    /// Both groups.
    pub const ALL: [Self; 2] = [Self::Full, Self::Window];

    /// The name used in metrics, logs and protobuf.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window => "window",
        }
    }
}

impl fmt::Display for PageGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Element type of cached keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// 4 bytes, the CPU engine's exact mode.
    F32,
    /// 2 bytes.
    Bf16,
    /// 1 byte: E4M3, unscaled; what lies beyond +-448 becomes that.
    Fp8,
}

impl KvDtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Fp8 => 1,
        }
    }

    /// The name used in config, logs and protobuf.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }
}

/// How one instance's KV cache lies in memory. A page of a group holds `page_tokens` positions of every layer of that group;
/// on one rank it is `[layer][kv head of the rank][K, V][token][head_dim]`, so a range of heads of one layer is contiguous.
/// It is the same on every attention group of the instance ([`DpGroup`]), each of which has pages of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvLayout {
    /// Model layers that belong to [`PageGroup::Full`], ascending.
    pub full_layers: Vec<u32>,
    /// Model layers that belong to [`PageGroup::Window`], ascending.
    pub window_layers: Vec<u32>,
    /// KV heads of the whole model.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Positions a page holds.
    pub page_tokens: u32,
    /// Keys that a window layer sees, its own position included.
    pub window: u32,
    /// Element type.
    pub dtype: KvDtype,
    /// Ranks of an attention group, over which the KV heads are split; the only field that may differ between two peers.
    pub tp: u32,
}

impl KvLayout {
    /// Model layers of a group.
    #[must_use]
    pub fn layers(&self, group: PageGroup) -> &[u32] {
        match group {
            PageGroup::Full => &self.full_layers,
            PageGroup::Window => &self.window_layers,
        }
    }

    /// Bytes of one head of one layer in one page: `2 x page_tokens x head_dim` elements.
    #[must_use]
    pub const fn head_bytes(&self) -> usize {
        2 * self.page_tokens as usize * self.head_dim as usize * self.dtype.bytes()
    }

    /// KV heads that rank `tp_rank` of each attention group holds, as a range over the model's heads.
    #[must_use]
    pub const fn rank_heads(&self, tp_rank: u32) -> std::ops::Range<u32> {
        let per_rank = self.kv_heads / self.tp;
        tp_rank * per_rank..(tp_rank + 1) * per_rank
    }

    /// The rank, within its attention group, that holds a KV head.
    #[must_use]
    pub const fn tp_rank_of(&self, head: u32) -> u32 {
        head / (self.kv_heads / self.tp)
    }

    /// The rank, of all ranks of the instance, that holds a KV head of the sequences of `group`.
    #[must_use]
    pub const fn rank_of(&self, group: DpGroup, head: u32) -> u32 {
        group.0 * self.tp + self.tp_rank_of(head)
    }

    /// Compares two peers' layouts in everything but `tp`.
    ///
    /// # Errors
    /// The name of the first field that differs, with both values.
    pub fn check_peer(&self, peer: &Self) -> Result<(), KvLayoutMismatch> {
        let fields: [(&'static str, String, String); 7] = [
            ("full_layers", format!("{:?}", self.full_layers), format!("{:?}", peer.full_layers)),
            ("window_layers", format!("{:?}", self.window_layers), format!("{:?}", peer.window_layers)),
            ("kv_heads", self.kv_heads.to_string(), peer.kv_heads.to_string()),
            ("head_dim", self.head_dim.to_string(), peer.head_dim.to_string()),
            ("page_tokens", self.page_tokens.to_string(), peer.page_tokens.to_string()),
            ("window", self.window.to_string(), peer.window.to_string()),
            ("dtype", self.dtype.name().into(), peer.dtype.name().into()),
        ];
        match fields.into_iter().find(|(_, ours, theirs)| ours != theirs) {
            Some((field, ours, theirs)) => Err(KvLayoutMismatch { field, ours, theirs }),
            None => Ok(()),
        }
    }
}

/// Two workers whose KV caches do not fit each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("kv layout differs in {field}: {ours} here, {theirs} at the peer")]
pub struct KvLayoutMismatch {
    /// Name of the field.
    pub field: &'static str,
    /// Our value.
    pub ours: String,
    /// The peer's value.
    pub theirs: String,
}

/// Identifies a model and its vocabulary: services that exchange tokens or KV compare it and refuse a stranger.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelFingerprint {
    /// The model's public name, for example `gpt-oss-nano`.
    pub model: String,
    /// Rows of the embedding.
    pub vocab_size: u32,
    /// SHA-256 of tokenizer.json, or of the built-in vocabulary where the model has none; lower-case hexadecimal.
    pub tokenizer_sha256: String,
}

impl fmt::Display for ModelFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (vocabulary {}, tokenizer {:.12})", self.model, self.vocab_size, self.tokenizer_sha256)
    }
}
