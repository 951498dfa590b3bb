//! The compiled kernels, loaded into a device.

use device::{Device, Kernel, Module};

use crate::error::{KernelError, Result};
use crate::{
    all_reduce, combine, decode_attention, fp8_gemm, pack_fp8, prefill_attention, reduce_scatter, router, sample,
    skinny_experts, skinny_gemm, tile_gemm,
};

/// Whether this build contains kernels: nvcc was found when it was made.
pub const AVAILABLE: bool = cfg!(have_kernels);

#[cfg(have_kernels)]
static IMAGES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/images.rs"));
#[cfg(not(have_kernels))]
static IMAGES: &[(&str, &[u8])] = &[];

/// Every kernel, ready to launch on one device.
#[derive(Debug)]
pub struct Kernels {
    /// Persistent kernels launch one block for each.
    pub(crate) multiprocessors: u32,
    pub(crate) all_gather: Kernel,
    pub(crate) all_reduce: all_reduce::Variants,
    pub(crate) combine: combine::Variants,
    pub(crate) decode_attention: decode_attention::Variants,
    pub(crate) dispatch: Kernel,
    pub(crate) embed: Kernel,
    pub(crate) fp8_gemm: fp8_gemm::Variants,
    pub(crate) gather_rows: Kernel,
    pub(crate) gather_tokens: Kernel,
    pub(crate) pack_bf16: Kernel,
    pub(crate) pack_bf16_from_mxfp4: Kernel,
    pub(crate) pack_fp8: pack_fp8::Variants,
    pub(crate) pack_mxfp4: Kernel,
    pub(crate) prefill_attention: Kernel,
    pub(crate) quantize_rows: Kernel,
    pub(crate) reduce_scatter: reduce_scatter::Variants,
    pub(crate) rmsnorm: Kernel,
    pub(crate) rope_kv: Kernel,
    pub(crate) router: router::Variants,
    pub(crate) sample: Kernel,
    pub(crate) skinny_experts: skinny_experts::Variants,
    pub(crate) skinny_gemm: skinny_gemm::Variants,
    pub(crate) sum_ranks: Kernel,
    pub(crate) tile_gemm: tile_gemm::Variants,
    pub(crate) unpack_kv: Kernel,
}

impl Kernels {
    /// Loads the embedded images into `device`.
    ///
    /// # Errors
    /// `NotBuilt` without embedded kernels; `Device` if the device cannot run them (they are for compute capability 9.0).
    pub fn load(device: &Device) -> Result<Self> {
        let pack_weights = module(device, "pack_weights")?;
        Ok(Self {
            multiprocessors: device.multiprocessors()?,
            all_gather: module(device, "all_gather")?.kernel("all_gather", 0)?,
            all_reduce: all_reduce::Variants::load(&module(device, "all_reduce")?)?,
            combine: combine::Variants::load(&module(device, "combine")?)?,
            decode_attention: decode_attention::Variants::load(&module(device, "decode_attention")?)?,
            dispatch: module(device, "dispatch")?.kernel("dispatch", 0)?,
            embed: module(device, "embed")?.kernel("embed", 0)?,
            fp8_gemm: fp8_gemm::Variants::load(&module(device, "fp8_gemm")?)?,
            gather_rows: module(device, "gather_rows")?.kernel("gather_rows", 0)?,
            gather_tokens: module(device, "gather_tokens")?.kernel("gather_tokens", 0)?,
            pack_bf16: pack_weights.kernel("pack_bf16", 0)?,
            pack_bf16_from_mxfp4: pack_weights.kernel("pack_bf16_from_mxfp4", 0)?,
            pack_fp8: pack_fp8::Variants::load(&module(device, "pack_fp8")?)?,
            pack_mxfp4: pack_weights.kernel("pack_mxfp4", 0)?,
            prefill_attention: module(device, "prefill_attention")?
                .kernel("prefill_attention", prefill_attention::SHARED_BYTES)?,
            quantize_rows: module(device, "quantize_rows")?.kernel("quantize_rows", 0)?,
            reduce_scatter: reduce_scatter::Variants::load(&module(device, "reduce_scatter")?)?,
            rmsnorm: module(device, "rmsnorm")?.kernel("rmsnorm", 0)?,
            rope_kv: module(device, "rope_kv")?.kernel("rope_kv", 0)?,
            router: router::Variants::load(&module(device, "router")?)?,
            sample: module(device, "sample")?.kernel("sample", sample::SHARED_BYTES)?,
            skinny_experts: skinny_experts::Variants::load(&module(device, "skinny_experts")?)?,
            skinny_gemm: skinny_gemm::Variants::load(&module(device, "skinny_gemm")?)?,
            sum_ranks: module(device, "sum_ranks")?.kernel("sum_ranks", 0)?,
            tile_gemm: tile_gemm::Variants::load(&module(device, "tile_gemm")?)?,
            unpack_kv: module(device, "unpack_kv")?.kernel("unpack_kv", 0)?,
        })
    }
}

pub(crate) fn module(device: &Device, operation: &str) -> Result<Module> {
    let image = IMAGES.iter().find(|(name, _)| *name == operation).ok_or(KernelError::NotBuilt)?;
    Ok(Module::load(device, image.1)?)
}
