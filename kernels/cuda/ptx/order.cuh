// Numbered floats as one unsigned number to maximise: the greater float first, then the lower number.
#pragma once
#include "ptx.cuh"

namespace ptx {

// Never 0. A NaN comes before or behind all numbers, by its sign.
__device__ __forceinline__ uint64_t order_key(float value, int number) {
    const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 and 0 are equal
    const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~number);
}
__device__ __forceinline__ int key_number(uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); }
__device__ __forceinline__ float key_value(uint64_t key) {
    const uint32_t ordered = key >> 32;
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

}  // namespace ptx
