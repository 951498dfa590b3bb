// FP8 (E4M3) matrices with one power of two for each block of 128 x 128 values.
//
// Packed as packed.cuh says, in tiles of 16 rows x 64 values, 1024 bytes: rows of 64 bytes in which 16-byte piece c of row r lies at
// place c ^ (r / 2 % 4). So the tiles of a group are what the tensor cores take from shared memory in their 64-byte swizzle.
//
// Within 64 values along k, value k = 16 s + 8 h + 2 t + e lies at place p = 16 t + 4 s + 2 e + h: lane t of a quad finds its values of
// all four k16 steps of an m16n8k16 product in one 16-byte word. Quantised activations lie in the same order, rows padded to a
// multiple of 64, so a product over both needs no other.
//
// Scales are f32 [matrices][blocks of 128 rows][blocks of 128 along k], from the matrix's own first row and column.
#pragma once
#include "packed.cuh"

namespace packed {

constexpr int SCALE_BLOCK = 128;

// Four E4M3 values as bf16, 2^120 times too small: places 0 and 2 in `even`, 1 and 3 in `odd`. E4M3's subnormals become bf16's.
__device__ __forceinline__ void expand_e4m3(uint32_t word, uint32_t& even, uint32_t& odd) {
    constexpr uint32_t SIGN = 0x80008000u, MAGNITUDE = 0x07F007F0u;
    even = ((word << 8) & SIGN) | ((word << 4) & MAGNITUDE);
    odd = (word & SIGN) | ((word >> 4) & MAGNITUDE);
}

// For products with bf16 activations, as packed::Bf16 and packed::Mxfp4. The 2^-120 is made good in two exact ways:
//   few columns   activations are multiplied by 2^100, and the sums of each tile by 2^20 times its block's scale 2^e, in f32
//   many columns  values are multiplied by the bf16 2^(e + 80), and the whole sum by 2^40
struct Fp8 {
    static constexpr int TILE_K = 64, BLOCKS = TILE_K / BLOCK_K;
    static constexpr int TILE_BYTES = 1024;
    static constexpr bool BLOCK_SCALES = true;

    struct Tile {
        uint32_t a[4][4];  // fragments by k16 step
    };

    __device__ static __forceinline__ Tile load(const uint8_t* bytes, int lane) {
        const uint8_t* at = bytes + lane / 4 * 64 + (lane % 4 ^ lane / 8 % 4) * 16;
        const uint4 low = *reinterpret_cast<const uint4*>(at), high = *reinterpret_cast<const uint4*>(at + 512);
        const uint32_t rows[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
        Tile tile;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            expand_e4m3(rows[0][step], tile.a[step][0], tile.a[step][2]);
            expand_e4m3(rows[1][step], tile.a[step][1], tile.a[step][3]);
        }
        return tile;
    }

    // `scale`: of the tile's block.
    __device__ static __forceinline__ void accumulate(const Tile& tile, const uint4 (&columns)[BLOCKS], float scale,
                                                      float (&acc)[4]) {
        float sum[4];
        ptx::mma_bf16_zero(sum, tile.a[0], columns[0].x, columns[0].y);
        ptx::mma_bf16(sum, tile.a[1], columns[0].z, columns[0].w);
        ptx::mma_bf16(sum, tile.a[2], columns[1].x, columns[1].y);
        ptx::mma_bf16(sum, tile.a[3], columns[1].z, columns[1].w);
        constexpr float TWO_TO_20 = 1048576.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[i] = fmaf(sum[i], scale * TWO_TO_20, acc[i]);
    }

    __device__ static __forceinline__ uint32_t prepare(uint32_t pair) { return Mxfp4::prepare(pair); }

    static constexpr float UNSCALE = Mxfp4::UNSCALE;
    __device__ static __forceinline__ void scaled_fragments(const uint8_t* bytes, int lane, float scale, uint32_t (&a)[4][4]) {
        const uint32_t pair = ((__float_as_uint(scale) >> 23) + 80) * 0x00800080u;
        const Tile tile = load(bytes, lane);
#pragma unroll
        for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = ptx::mul_bf16x2(tile.a[i / 4][i % 4], pair);
    }
};

// The value along k of place `p`, within 64.
__device__ __forceinline__ int k_of_place(int p) { return 16 * (p / 4 % 4) + 8 * (p % 2) + 2 * (p / 16) + p / 2 % 2; }

// The smallest power of two that brings `largest` to at most 448, as the exponent's bits of an f32; 1 for zero.
__device__ __forceinline__ float scale_of(float largest) {
    // 448 = 1.75 * 2^8: the quotient's exponent, one more above 1.75.
    const uint32_t bits = __float_as_uint(largest);
    const int exponent = static_cast<int>(bits >> 23) - 8 + ((bits & 0x7fffff) > 0x600000);
    return bits == 0 ? 1.0f : __uint_as_float(static_cast<uint32_t>(max(exponent, 1)) << 23);
}

// 1 / scale, exact for the powers of two that `scale_of` yields for numbers below 2^120.
__device__ __forceinline__ float inverse_of(float scale) { return __uint_as_float(0x7f000000u - __float_as_uint(scale)); }

}  // namespace packed
