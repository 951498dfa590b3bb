// out[i] = bf16(part_0[i] + part_1[i] + ..): f32, in the order of ranks, each part where its rank left it.
//
// Parts and out are bf16, of equal length, a multiple of 8. For ranks that share GPUs: the caller orders it all by events. Thread =
// 8 values. Bound by memory, or by NVLink for parts on other devices.
#include "../ptx/peer.cuh"
#include "../rows/rows.cuh"

using ptx::MAX_RANKS;

struct SumRanksArgs {
    const __nv_bfloat16* parts[MAX_RANKS];
    __nv_bfloat16* out;
    int64_t values;
    int32_t ranks;
    int32_t padding;
};
static_assert(sizeof(SumRanksArgs) == 88);

extern "C" __global__ void __launch_bounds__(256) sum_ranks(const __grid_constant__ SumRanksArgs args) {
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    if (first >= args.values) return;
    float sum[8] = {};
    for (int r = 0; r < args.ranks; ++r) {
        float values[8];
        rows::unpack8(*reinterpret_cast<const uint4*>(args.parts[r] + first), values);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += values[i];
    }
    *reinterpret_cast<uint4*>(args.out + first) = rows::pack8(sum);
}
