// Both products of experts for few slots an expert, in one launch:
//
//   activated[s, u] = swiglu(sum_k x[gather[s], k] * W1[expert(s)][2u | 2u + 1, k] + bias1)
//   out[s, r]       = sum_u activated[s, u] * W2[expert(s)][r, u] + bias2
//
// Each is what skinny_gemm (../skinny_gemm/skinny_gemm.cu) computes, by the same blocks, with the same order of sums. Every warp works off
// its part of the first product, then its part of the second; the ring of stages goes on from one to the other. So the second one's weights
// are fetched while the first one's last sums are finished: at one token all of them are there when the activations are. As
// launches of their own, of which one's shared memory leaves no room for the next, each begins with an empty ring.
//
// Consumers wait for the activations of a tile of slots until all its groups of the first product have been counted as done. Blocks that
// are waited for run: all blocks of a launch fit the device at once, and each has done its part of the first product before it waits. That
// holds where no kernel beside this one waits for blocks of its own or for another GPU: two of these launches on two streams could keep
// each other out.
//
// Shared memory: as skinny_gemm; each part as large as the product needs that needs more of it.
#include "../skinny_gemm/block.cuh"

#define SKINNY_EXPERTS(name, format)                                                                                       \
    extern "C" __global__ void __launch_bounds__(skinny::THREADS, 1) name(const __grid_constant__ SkinnyExpertsArgs args) { \
        skinny::run_block<packed::format, 1, packed::Epilogue::SWIGLU, 2>(args.products);                                   \
    }
SKINNY_EXPERTS(skinny_experts_bf16, Bf16)
SKINNY_EXPERTS(skinny_experts_mxfp4, Mxfp4)
SKINNY_EXPERTS(skinny_experts_fp8, Fp8)
