// out[slot[t, j], h] = x[t, h] for the pairs (t, j) with a slot: brings the rows of each expert together for tile_gemm.
// x [tokens, hidden], out [slots, hidden] bf16; slot [tokens, top] i32, negative where the expert is on another rank. A warp reads a part of
// a token's row, 16 bytes a lane, 4 times before the first is written, and writes it to each of the token's slots. Bound by memory.
#include "../ptx/ptx.cuh"

struct GatherRowsArgs {
    const uint4* x;
    const int32_t* slot;
    uint4* out;
    int32_t tokens;
    int32_t top;
    int32_t row_words;  // of 16 bytes
    int32_t parts;      // of a row: a warp's each
};
static_assert(sizeof(GatherRowsArgs) == 40);

extern "C" __global__ void __launch_bounds__(256) gather_rows(const __grid_constant__ GatherRowsArgs args) {
    ptx::launch_dependents();
    ptx::grid_dependency_wait();
    constexpr int AT_ONCE = 4;
    const int lane = threadIdx.x % 32, warps = gridDim.x * 8;
    for (int item = blockIdx.x * 8 + threadIdx.x / 32; item < args.tokens * args.parts; item += warps) {
        const int token = item / args.parts, first = item % args.parts * AT_ONCE * 32 + lane;
        const uint4* from = args.x + static_cast<int64_t>(token) * args.row_words;
        uint4 words[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i * 32 < args.row_words) words[i] = from[first + i * 32];
        }
        for (int j = 0; j < args.top; ++j) {
            const int slot = args.slot[token * args.top + j];
            if (slot < 0) continue;
            uint4* to = args.out + static_cast<int64_t>(slot) * args.row_words;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + i * 32 < args.row_words) to[first + i * 32] = words[i];
            }
        }
    }
}
