// residual[t, h] = bf16(residual[t, h] + delta[t, h]);   out[t, h] = bf16(residual[t, h] * rsqrt(mean_h(residual²) + eps) * w[h])
//
// residual, delta, out [tokens, hidden] bf16 row-major; w [hidden] bf16. delta may be null. The weight multiplies in f32, before
// the cast. Block = one token, thread = 8 values held in registers: one read and one write of each. Bound by memory for many
// tokens, by latency for one; the weight is fetched before the preceding kernel is waited for.
#include "../ptx/block_reduce.cuh"

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
    float x[8] = {};
    if (used) {
        ptx::unpack8(*reinterpret_cast<const uint4*>(args.residual + at), x);
        if (args.delta) {
            float delta[8];
            ptx::unpack8(*reinterpret_cast<const uint4*>(args.delta + at), delta);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] += delta[i];
            const uint4 rounded = ptx::pack8(x);
            *reinterpret_cast<uint4*>(args.residual + at) = rounded;
            ptx::unpack8(rounded, x);
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
    const float scale = rsqrtf(ptx::block_sum(squares) / args.hidden + args.eps);
    if (used) {
        float w[8];
        ptx::unpack8(weight, w);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= scale * w[i];
        *reinterpret_cast<uint4*>(args.out + at) = ptx::pack8(x);
    }
}
