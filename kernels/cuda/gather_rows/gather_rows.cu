// out[s, h] = x[row(s), h] for the slots s < *num_rows: brings the rows of each expert together for tile_gemm.
// x [tokens, hidden], out [slots, hidden] bf16. A warp copies a row, 16 bytes a lane, 12 times before the first is written: the 2880
// values of a row at once. Bound by memory.
#include "../ptx/ptx.cuh"

struct GatherRowsArgs {
    const uint4* x;
    const int32_t* row;
    const int32_t* num_rows;
    uint4* out;
    int32_t row_words;  // of 16 bytes
    int32_t padding;
};
static_assert(sizeof(GatherRowsArgs) == 40);

extern "C" __global__ void __launch_bounds__(256) gather_rows(const __grid_constant__ GatherRowsArgs args) {
    ptx::launch_dependents();
    ptx::grid_dependency_wait();
    constexpr int AT_ONCE = 12;
    const int lane = threadIdx.x % 32, warps = gridDim.x * 8, rows = *args.num_rows;
    for (int slot = blockIdx.x * 8 + threadIdx.x / 32; slot < rows; slot += warps) {
        const uint4* from = args.x + static_cast<int64_t>(args.row[slot]) * args.row_words;
        uint4* to = args.out + static_cast<int64_t>(slot) * args.row_words;
        for (int first = lane; first < args.row_words; first += AT_ONCE * 32) {
            uint4 words[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + i * 32 < args.row_words) words[i] = from[first + i * 32];
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + i * 32 < args.row_words) to[first + i * 32] = words[i];
            }
        }
    }
}
