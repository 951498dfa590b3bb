//! Times every kernel at the real shapes of gpt-oss-20b and 120b on one GPU and prints tables in Markdown.
//!
//! Each figure is the median of 9 replays of a CUDA graph that holds a kernel many times over, on operands that rotate through more
//! memory than the L2 cache holds: weights come from HBM, as they do in a decode step. Launches overlap (programmatic dependent
//! launch), so the time is that of a kernel among others. *share* is bytes a microsecond over the copy rate (bytes read plus bytes
//! written) measured in the same run. Bytes are those that must be moved: each operand once.

#![allow(unsafe_code)] // one launch is unsafe: it addresses memory that others share
#![allow(clippy::unwrap_used)] // an error here ends the measurement, and its text is all that anyone wants

mod all_reduce;
mod decode_attention;
mod experts;
mod fp8_gemm;
mod harness;
mod kv_move;
mod launch_table;
mod prefill_attention;
mod skinny_gemm;
mod tile_gemm;
mod token_wise;

use harness::Bench;

type Section = (&'static str, fn(&mut Bench));

fn main() {
    let Some(mut bench) = Bench::open() else { return };
    println!("# Kernels on one {}\n", bench.device_name());
    println!("Copy rate in this run: {:.0} GB/s.\n", bench.copy_gb_per_s());
    // `cargo bench -p kernels -- skinny` runs the sections whose name contains `skinny`.
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let sections: [Section; 12] = [
        ("token_wise", token_wise::run),
        ("skinny_dense", skinny_gemm::dense),
        ("skinny_experts", skinny_gemm::experts),
        ("tile_dense", tile_gemm::dense),
        ("tile_experts", tile_gemm::experts),
        ("launch_table", launch_table::run),
        ("fp8_dense", fp8_gemm::dense),
        ("fp8_experts", fp8_gemm::experts),
        ("decode_attention", decode_attention::run),
        ("prefill_attention", prefill_attention::run),
        ("all_reduce", all_reduce::run),
        ("kv_move", kv_move::run),
    ];
    sections.iter().filter(|(name, _)| name.contains(&wanted)).for_each(|(_, run)| run(&mut bench));
}
