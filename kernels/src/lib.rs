//! The CUDA kernels for sm_90a, each behind a function that checks every shape before it launches.
//!
//! Knows: one operation at a time, on device memory that the caller owns. Must not know: a model, a step, a schedule (`engine`).
//! Built without nvcc the crate is all there, but [`AVAILABLE`] is false and [`Kernels::load`] answers [`KernelError::NotBuilt`].
//!
//! One operation, one name: `cuda/rmsnorm/rmsnorm.cu`, `src/rmsnorm.rs`, `tests/rmsnorm.rs`; `benches/` times them, by kind. Measured
//! figures are in `RESULTS.md`. An operation is a struct of its operands; `enqueue` checks them and puts the kernel on a
//! stream. Every kernel waits for its predecessor before it touches what that one wrote, so consecutive launches overlap
//! (programmatic dependent launch). **Weights are the exception**: matrices, norm weights and the router's are fetched before the
//! predecessor has ended, so they must be complete when a kernel that reads them is enqueued, or a copy must lie between.
//!
//! Start with [`RmsNorm`], the simplest, then [`SkinnyGemm`], which streams the weights in decode, as does
//! [`SkinnyExperts`], and [`TileGemm`], which keeps
//! the tensor cores busy in prefill, and [`Fp8Gemm`], which does so with both operands in FP8.
#![allow(unsafe_code)] // this crate launches kernels: each launch says why its arguments are right

#[macro_use]
mod abi;

mod all_gather;
mod all_reduce;
pub mod choice;
mod combine;
mod decode_attention;
mod dispatch;
mod embed;
mod error;
mod fp8_gemm;
mod gather_rows;
mod gather_tokens;
mod groups;
mod inbox;
mod kv_cache;
mod kv_move;
mod kv_port;
mod library;
mod pack_fp8;
mod pack_weights;
mod peers;
mod prefill_attention;
mod quantize_rows;
mod reduce_scatter;
mod rmsnorm;
mod rope_kv;
mod router;
mod sample;
mod skinny_experts;
mod skinny_gemm;
mod sum_ranks;
mod tile_gemm;
mod unpack_kv;
mod workspace;

pub use all_gather::AllGather;
pub use all_reduce::{AllReduce, Exchange, Summand, ThenNorm};
pub use combine::{Combine, CombineNorm};
pub use decode_attention::DecodeAttention;
pub use dispatch::{Dispatch, Routing};
pub use embed::Embed;
pub use error::{KernelError, Result};
pub use fp8_gemm::{Fp8Gemm, Fp8Output};
pub use gather_rows::GatherRows;
pub use gather_tokens::GatherTokens;
pub use groups::{AttentionGroups, GroupSizes, TokenMailbox, TokenMailboxAddress};
pub use inbox::{Alarm, MAX_RANKS};
pub use kv_cache::{KvCache, KvFormat, PageTable};
pub use kv_move::{KvDirection, KvKernels, KvMove, KvMoving, KvTable, kv_checksum};
pub use kv_port::{KvPool, KvPort};
pub use library::{AVAILABLE, Kernels};
pub use pack_fp8::{Fp8Source, PackFp8, Rounding};
pub use pack_weights::{Format, PackMxfp4, PackedWeights, pack_bf16};
pub use peers::{Mailbox, MailboxAddress, PeerGroup, PeerSizes};
pub use prefill_attention::PrefillAttention;
pub use quantize_rows::{Fp8Rows, QuantizeRows};
pub use reduce_scatter::ReduceScatter;
pub use rmsnorm::RmsNorm;
pub use rope_kv::RopeKv;
pub use router::{ChooseExperts, DISPATCH_TOKENS, ExpertWeights, Router, RouterDispatch};
pub use sample::{MAX_TOP_LOGPROBS, Sample, SampleRow, SampleStatus};
pub use skinny_experts::SkinnyExperts;
pub use skinny_gemm::{Grouped, Output, SkinnyGemm};
pub use sum_ranks::SumRanks;
pub use tile_gemm::TileGemm;
pub use unpack_kv::UnpackKv;
pub use workspace::Workspace;
