// Rows whose values are spread over a block, eight bf16 to a thread: sums, and the norm.
#pragma once
#include "../ptx/ptx.cuh"

namespace rows {

__device__ __forceinline__ void unpack8(const uint4& packed, float (&x)[8]) {
    const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = ptx::low_bf16(pairs[i]), x[2 * i + 1] = ptx::high_bf16(pairs[i]);
}

__device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
    return make_uint4(ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3]), ptx::pack_bf16(x[4], x[5]),
                      ptx::pack_bf16(x[6], x[7]));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

// Sum over the block, to every thread. All threads take part; the number of warps is that of the block, at most 32.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float partial[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    x = warp_sum(x);
    __syncthreads();  // an earlier call may still be reading
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / 32 ? partial[lane] : 0.0f);
}

// Sums of eight bf16, rounded.
__device__ __forceinline__ uint4 add8(const uint4& a, const uint4& b) {
    float x[8], y[8];
    unpack8(a, x), unpack8(b, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += y[i];
    return pack8(x);
}

// This thread's 8 values of bf16(row * rsqrt(mean(row²) + eps) * weight); zeros from threads beyond the row. The weight multiplies in
// f32, before the cast.
__device__ __forceinline__ uint4 block_norm(const uint4& row, const uint4& weight, int hidden, float eps) {
    float x[8], w[8], squares = 0.0f;
    unpack8(row, x), unpack8(weight, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
    const float scale = rsqrtf(block_sum(squares) / hidden + eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= scale * w[i];
    return pack8(x);
}

}  // namespace rows
