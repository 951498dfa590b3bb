// Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): randomness as a pure
// function of (seed, choice, output index, draw), so that a sequence resumed anywhere draws what it would have drawn.
#pragma once
#include <cstdint>

namespace philox {

__device__ __forceinline__ uint4 philox4x32(uint4 counter, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        const uint32_t high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key.x += 0x9E3779B9u, key.y += 0xBB67AE85u;
    }
    return counter;
}

// 53 random bits at the top of 64: u = bits / 2^64 is in [0, 1).
__device__ __forceinline__ uint64_t uniform_bits(uint64_t seed, uint32_t choice, uint32_t output_idx, uint32_t draw) {
    const uint2 key = make_uint2(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    const uint4 random = philox4x32(make_uint4(choice, output_idx, draw, 0), key);
    const uint64_t bits = static_cast<uint64_t>(random.x) << 32 | random.y;
    return bits >> 11 << 11;
}

}  // namespace philox
