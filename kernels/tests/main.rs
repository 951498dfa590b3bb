//! Every kernel against its plain f32 definition in `model::reference`, on fresh random inputs at real shapes and at the edges.
//!
//! Without a GPU, or in a build without nvcc, each test says that it was skipped and passes. Outputs are poisoned before each
//! run, so an element that a kernel does not write is a NaN and fails.

#![allow(unsafe_code)] // one launch is unsafe: it addresses memory that others share
#![allow(clippy::unwrap_used)] // helpers of tests fail as tests do

mod combine;
mod decode_attention;
mod dispatch;
mod embed;
mod fp8_gemm;
mod gpu;
mod groups;
mod kv_move;
mod mxfp4;
mod peers;
mod prefill_attention;
mod rmsnorm;
mod rope_kv;
mod router;
mod sample;
mod skinny_experts;
mod skinny_gemm;
mod tile_gemm;
mod unpack_kv;
