// Sums and maxima over a warp and a block, and eight bf16 at a time.
#pragma once
#include "ptx.cuh"

namespace ptx {

__device__ __forceinline__ void unpack8(const uint4& packed, float (&x)[8]) {
    const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = low_bf16(pairs[i]), x[2 * i + 1] = high_bf16(pairs[i]);
}

__device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
    return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
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

}  // namespace ptx
