// What a block of skinny_gemm or skinny_experts does.
#pragma once
#include "finish.cuh"
#include "produce.cuh"
#include "warps.cuh"

namespace skinny {

// One product with epilogue `E`; or two, of which the last is rounded only. Each warp goes from one to the next by itself.
template <class Format, int NT, Epilogue E, int N>
__device__ __forceinline__ void run_block(const SkinnyArgs* products) {
    static_assert(N == 1 || N == 2);
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Barriers barriers;
    const SkinnyArgs& first = products[0];
    uint8_t* ring = shared;
    float4* sums = reinterpret_cast<float4*>(ring + first.stages * first.stage_bytes);
    uint4* x = reinterpret_cast<uint4*>(sums + PARTS * GROUP * NT * 32);

    if (threadIdx.x == 0) {
        for (int i = 0; i < first.stages; ++i) {
            ptx::mbarrier_init(&barriers.full[i], 1);
            ptx::mbarrier_init(&barriers.empty[i], CONSUMERS);
        }
        ptx::mbarrier_init(&barriers.sums_full, CONSUMERS);
        ptx::mbarrier_init(&barriers.sums_empty, FINISHERS);
        ptx::fence_barrier_init();
    }
    __syncthreads();

    // The next kernel may start at once, unless it relies on what this one waits for.
    const bool late_tiles = first.tiles && !first.early_tiles;
    const int warp = threadIdx.x / 32;
    if (!late_tiles) ptx::launch_dependents();
    if (warp == CONSUMERS) {
        if (late_tiles) ptx::grid_dependency_wait();
        produce<Format, N>(products, ring, barriers);
        return;
    }
    ptx::grid_dependency_wait();
    if (late_tiles) ptx::launch_dependents();
    const auto range_of = [](const SkinnyArgs& args) { return Range(args, args.tiles ? *args.num_tiles : 1); };
    if (warp < CONSUMERS) {
        Consumer consumer;
#pragma unroll 1
        for (int i = 0; i < N; ++i) {
            const Range range = range_of(products[i]);
            consume<Format, NT>(products[i], range, ring, x, sums, barriers, consumer);
        }
    } else {
        uint32_t phase = 0;
        finish<NT, E>(first, range_of(first), sums, barriers, phase);
        if constexpr (N == 2) {
            finish<NT, Epilogue::BF16>(products[1], range_of(products[1]), sums, barriers, phase);
        }
    }
}

}  // namespace skinny
