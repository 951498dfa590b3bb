// out[s, r] = epilogue(sum_k x[row(s), k] * W[expert(s)][r, k] + bias[expert(s)][r]) for few columns s (tokens or slots) a matrix.
//
//   weights  packed (packed/packed.cuh, packed/fp8.cuh), bf16, MXFP4 or FP8, one matrix or one an expert
//   x        [rows, k] bf16 row-major; row(s) = gather[s], or s
//   out      [slots, rows of W] bf16 or f32; or [slots, rows / 2] bf16 after clamped SwiGLU
//
// Bound by memory: each weight is read once for each tile of up to NT x 8 slots of its expert. The work is a line of *units*: a unit
// is a run of k-tiles of a group of 4 strips (64 rows), one bulk copy. Persistent blocks take contiguous, equally long parts of it.
//
//   warps 0..15    consumers (warps.cuh): warp w takes strips 2 (w % 2) and 2 (w % 2) + 1 of the group and every 8th tile: an activation
//                  fragment serves two strips, whose sums are independent chains. They hand over 8 partial sums a group.
//   warp 16        producer (produce.cuh): keeps `stages` units in flight, independent of everything else in the block
//   warps 17, 18   finishers (finish.cuh): sum the partials in fixed order, add bias, apply the activation, write; two strips each.
//                  One warp for all four kept consumers waiting: 133 us in place of 120 for both products of 32 tokens of 20b.
//
// A group cut by the end of a block's part is finished by the block that begins it: the others, which as a rule come to their part of it
// first, leave sums in global memory, where no number is also the sign that nothing is there yet. They are added in the order of the
// blocks, the first one's own last. So the order of a sum depends on the matrix, the grid and the number of tiles, never on timing.
//
// The weights do not depend on the preceding kernel: the producer starts before the grid dependency is met.
//
// MXFP4 and more than 8 columns, where unpacking takes more instructions than memory leaves time for, is warpgroups.cuh's.
//
// Shared memory: stages; partial sums 8 x 4 x NT x 512 bytes; activations NT x 8 x 2 bytes for each k of `x_units` units.
//
// What did not help: bringing the next product's weights towards the L2 cache when this one's have been fetched. A step of 20b took as long
// at every batch (1.79 and 1.81 ms at batch 1, one H200): what products lose between them is latency, not idle memory. Loading a warp's
// next tile while one is multiplied, across units too, took 10 % longer: the moves for it cost more than the waiting. So did 24 consumers,
// and units of 16 tiles in place of 24 for MXFP4. Scales as factors of the weights' fragments, which take 4 integer instructions in place
// of 8, took as long. Sharing out work in thirds of such units made the busiest block's part shorter, but one token's `down` 10 % slower.
#include "block.cuh"
#include "warpgroups.cuh"

#define SKINNY_GEMM(name, format, nt, epilogue)                                                                  \
    extern "C" __global__ void __launch_bounds__(skinny::THREADS, 1) name(const __grid_constant__ SkinnyArgs args) {      \
        skinny::run_block<packed::format, nt, packed::Epilogue::epilogue, 1>(&args);                                \
    }
SKINNY_GEMM(skinny_bf16_n8, Bf16, 1, BF16)
SKINNY_GEMM(skinny_bf16_n16, Bf16, 2, BF16)
SKINNY_GEMM(skinny_bf16_n8_f32, Bf16, 1, F32)
SKINNY_GEMM(skinny_bf16_n16_f32, Bf16, 2, F32)
SKINNY_GEMM(skinny_bf16_n8_swiglu, Bf16, 1, SWIGLU)
SKINNY_GEMM(skinny_bf16_n16_swiglu, Bf16, 2, SWIGLU)
SKINNY_GEMM(skinny_mxfp4_n8, Mxfp4, 1, BF16)
SKINNY_GEMM(skinny_mxfp4_n8_swiglu, Mxfp4, 1, SWIGLU)
SKINNY_GEMM(skinny_fp8_n8, Fp8, 1, BF16)
SKINNY_GEMM(skinny_fp8_n16, Fp8, 2, BF16)
SKINNY_GEMM(skinny_fp8_n8_f32, Fp8, 1, F32)
SKINNY_GEMM(skinny_fp8_n16_f32, Fp8, 2, F32)
SKINNY_GEMM(skinny_fp8_n8_swiglu, Fp8, 1, SWIGLU)
SKINNY_GEMM(skinny_fp8_n16_swiglu, Fp8, 2, SWIGLU)

#define SKINNY_STREAMS(name, epilogue)                                                                                        \
    extern "C" __global__ void __launch_bounds__(skinny::streams::THREADS, 1) name(const __grid_constant__ SkinnyArgs args) { \
        skinny::streams::run<packed::Epilogue::epilogue>(args);                                                               \
    }
SKINNY_STREAMS(skinny_mxfp4_streams, BF16)
SKINNY_STREAMS(skinny_mxfp4_streams_swiglu, SWIGLU)
