// residual[t, h] = bf16(residual[t, h] + delta[t, h]);   out[t, h] = bf16(residual[t, h] * rsqrt(mean_h(residual²) + eps) * w[h])
//
// residual, delta, out [tokens, hidden] bf16 row-major; w [hidden] bf16. delta may be null. The weight multiplies in f32, before
// the cast. Block = one token, thread = 8 values held in registers: one read and one write of each. Bound by memory for many
// tokens, by latency for one; the weight is fetched before the preceding kernel is waited for.
#include "../rows/rows.cuh"

struct RmsNormArgs {
    __nv_bfloat16* residual;
    const __nv_bfloat16* delta;
    const __nv_bfloat16* weight;
    __nv_bfloat16* out;
    int32_t hidden;
    float eps;
};
static_assert(sizeof(RmsNormArgs) == 40);

extern "C" __global__ void __launch_bounds__(1024) rmsnorm(const __grid_constant__ RmsNormArgs args) {
    const int first = threadIdx.x * 8;
    const bool used = first < args.hidden;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * args.hidden + first;
    uint4 weight = make_uint4(0, 0, 0, 0);
    if (used) weight = *reinterpret_cast<const uint4*>(args.weight + first);

    ptx::launch_dependents();
    ptx::grid_dependency_wait();
    uint4 x = make_uint4(0, 0, 0, 0);
    if (used) {
        x = *reinterpret_cast<const uint4*>(args.residual + at);
        if (args.delta) {
            x = rows::add8(x, *reinterpret_cast<const uint4*>(args.delta + at));
            *reinterpret_cast<uint4*>(args.residual + at) = x;
        }
    }
    const uint4 normed = rows::block_norm(x, weight, args.hidden, args.eps);
    if (used) *reinterpret_cast<uint4*>(args.out + at) = normed;
}
