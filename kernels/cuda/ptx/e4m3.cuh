// E4M3 numbers: pairs to and from 16-bit floats, which hold each of them exactly, and products of such.
#pragma once
#include "ptx.cuh"

namespace ptx {

// Four E4M3 numbers, rounded to nearest even and limited to +-448; `a` in the lowest byte.
__device__ __forceinline__ uint32_t pack4_e4m3(float a, float b, float c, float d) {
    uint32_t packed;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return packed;
}

// Four E4M3 numbers as two pairs of f16: bytes 0 and 1, bytes 2 and 3.
__device__ __forceinline__ void unpack4_e4m3(uint32_t packed, uint32_t& low, uint32_t& high) {
    asm("{\n.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(low), "=r"(high)
        : "r"(packed));
}

// Two f16 in a register, `low` in the low half.
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// A pair of f16 as a pair of bf16: exact for what came from E4M3.
__device__ __forceinline__ uint32_t bf16_of_f16(uint32_t pair) {
    float low, high;
    asm("{\n.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(low), "=f"(high) : "r"(pair));
    return pack_bf16(low, high);
}

// 16 bytes of shared memory.
__device__ __forceinline__ void load_shared16(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// As mma_bf16, of f16.
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ptx
