// delta[t, h] = bf16(sum_j weight[t, j] * y[slot(t, j), h]): the outputs of a token's experts, weighted. With a norm weight:
// residual[t, h] = bf16(residual + delta);   out[t, h] = bf16(rmsnorm(residual[t])[h] * w[h]), as in rmsnorm.cu.
//
// y [slots, hidden] bf16; weight [tokens, TOP] f32; slot [tokens, TOP] i32, negative where the expert is on another rank.
// Experts are added in the order of their rank j, so the sum does not depend on dispatch. Block = one token, thread = 8 values.
#include "../rows/rows.cuh"

struct CombineArgs {
    const __nv_bfloat16* y;
    const float* weight;
    const int32_t* slot;
    __nv_bfloat16* residual;           // null: only `out` = delta
    const __nv_bfloat16* norm_weight;
    __nv_bfloat16* out;
    int32_t hidden;
    int32_t top;                       // experts a token, at most 8
    float eps;
    int32_t padding;
};
static_assert(sizeof(CombineArgs) == 64);

namespace {

template <int MAX_TOP>
__device__ void combine(const CombineArgs& args) {
    const int first = threadIdx.x * 8;
    const bool used = first < args.hidden;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * args.hidden + first;
    uint4 norm_weight = make_uint4(0, 0, 0, 0);
    if (used && args.residual) norm_weight = *reinterpret_cast<const uint4*>(args.norm_weight + first);

    ptx::launch_dependents();
    ptx::grid_dependency_wait();
    float sum[8] = {};
    uint4 y[MAX_TOP];
#pragma unroll
    for (int j = 0; j < MAX_TOP; ++j) {  // all loads first
        const int slot = j < args.top ? args.slot[blockIdx.x * args.top + j] : -1;
        y[j] = make_uint4(0, 0, 0, 0);
        if (used && slot >= 0) {
            y[j] = *reinterpret_cast<const uint4*>(args.y + static_cast<int64_t>(slot) * args.hidden + first);
        }
    }
#pragma unroll
    for (int j = 0; j < MAX_TOP; ++j) {
        if (j >= args.top) break;
        const float weight = args.weight[blockIdx.x * args.top + j];
        float values[8];
        rows::unpack8(y[j], values);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = fmaf(weight, values[i], sum[i]);
    }
    const uint4 delta = rows::pack8(sum);
    if (!args.residual) {
        if (used) *reinterpret_cast<uint4*>(args.out + at) = delta;
        return;
    }
    uint4 x = make_uint4(0, 0, 0, 0);
    if (used) {
        x = rows::add8(*reinterpret_cast<const uint4*>(args.residual + at), delta);
        *reinterpret_cast<uint4*>(args.residual + at) = x;
    }
    const uint4 normed = rows::block_norm(x, norm_weight, args.hidden, args.eps);
    if (used) *reinterpret_cast<uint4*>(args.out + at) = normed;
}

}  // namespace

// Few registers, so that blocks of the next kernel find room beside it.
extern "C" __global__ void __maxnreg__(40) combine_top4(const __grid_constant__ CombineArgs args) { combine<4>(args); }
extern "C" __global__ void __launch_bounds__(1024) combine_top8(const __grid_constant__ CombineArgs args) { combine<8>(args); }
