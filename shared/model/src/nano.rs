//! gpt-oss-nano, the tiny model inside the binary.

/// Gives embedded bytes the alignment that a mapped file has, so that bf16 values can be borrowed from it.
#[repr(C, align(64))]
struct Aligned<Bytes: ?Sized>(Bytes);

static WEIGHTS: &Aligned<[u8]> = &Aligned(*include_bytes!("../gpt-oss-nano/model.safetensors"));

/// How a config or an option names it.
pub const EMBEDDED_NANO: &str = "embedded-nano";

pub(crate) const NAME: &str = "gpt-oss-nano";
pub(crate) const CONFIG: &str = include_str!("../gpt-oss-nano/config.json");
pub(crate) const GENERATION_CONFIG: &str = include_str!("../gpt-oss-nano/generation_config.json");
pub(crate) const TOKENIZER: &[u8] = include_bytes!("../gpt-oss-nano/tokenizer.json");

pub(crate) fn weights() -> &'static [u8] {
    &WEIGHTS.0
}
