// How weight matrices lie in device memory: in the order in which tensor cores take them.
//
// A matrix [rows, k] is cut into strips of 16 rows. A strip is contiguous and is a sequence of tiles along k, so any run of
// tiles is one contiguous copy. Within a tile, lane (g = lane / 4, t = lane % 4) of a warp finds its A fragments of
// mma.m16n8k16 (and of wgmma m64k16, where each warp owns 16 rows) in one or two 16-byte words: rows g and g+8.
//
//   Bf16   16 x 32 values, 1024 bytes: [k16 step][lane] of 16 bytes {a0, a1, a2, a3}.
//   Mxfp4  16 x 64 values, 544 bytes: [lane] of 16 bytes {row g block 0, row g+8 block 0, row g block 1, row g+8 block 1}, each
//          word 8 values of one 32-block: k = 8j + 2t + h for j = 0..3, h = 0, 1; then [g] of 4 scale bytes in the same order.
//
// A word of Mxfp4 has value (j, h) in half h, its sign and magnitude where one shift brings each to a bf16's sign, low
// exponent and high mantissa bits: j: sign bit / magnitude bits = 0: 15 / 8..6, 1: 12 / 5..3, 2: 14 / 2..0, 3: 13 / 11..9.
// Read so, E2M1 is a bf16 2^126 times too small (its subnormal 0.5 is a bf16 subnormal), which the block's scale makes good.
// That takes 15 instructions for 8 values; sign-extending byte tables take about twice as many, and at 4.3 TB/s a
// multiprocessor sees 31 values a clock, so this count is what decides whether the kernel is bound by memory.
//
// The scale 2^(s - 127) is stored as the exponent byte s + 86 of the bf16 2^(s - 41): values are then 2^-40 of their true
// size, products in f32 too, and the epilogue multiplies by 2^40. Exact for s in 42..168; the loader refuses others.
#pragma once
#include "../ptx/ptx.cuh"

namespace packed {

constexpr int STRIP_ROWS = 16;
constexpr int BLOCK_K = 32;  // activations are laid out by blocks of 32 along k

// Activations for NT x 8 columns: [32-block][column tile][lane] of 16 bytes; word j of lane (g, t) is the pair
// k = 8j + 2t, 8j + 2t + 1 of column g.
template <int NT>
__device__ __forceinline__ uint4 activation(const uint4* x, int block, int column_tile, int lane) {
    return x[(block * NT + column_tile) * 32 + lane];
}

struct Bf16 {
    static constexpr int TILE_K = 32;
    static constexpr int TILE_BYTES = 1024;
    static constexpr float UNSCALE = 1.0f;

    // A fragments of one tile: a[s] for k16 step s.
    __device__ static __forceinline__ void fragments(const uint8_t* tile, int lane, uint32_t (&a)[2][4]) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const uint4 word = *reinterpret_cast<const uint4*>(tile + step * 512 + lane * 16);
            a[step][0] = word.x, a[step][1] = word.y, a[step][2] = word.z, a[step][3] = word.w;
        }
    }
};

// Eight E2M1 values, times the bf16 pair `scale`: out[j] is the pair k = 8j + 2t, 8j + 2t + 1.
__device__ __forceinline__ void expand_e2m1(uint32_t word, uint32_t scale, uint32_t (&out)[4]) {
    constexpr uint32_t SIGN = 0x80008000u, MAGNITUDE = 0x01C001C0u;
    out[0] = ptx::mul_bf16x2(word & (SIGN | MAGNITUDE), scale);
    out[1] = ptx::mul_bf16x2((word << 3) & (SIGN | MAGNITUDE), scale);
    out[2] = ptx::mul_bf16x2(((word << 1) & SIGN) | ((word << 6) & MAGNITUDE), scale);
    out[3] = ptx::mul_bf16x2(((word << 2) & SIGN) | ((word >> 3) & MAGNITUDE), scale);
}

struct Mxfp4 {
    static constexpr int TILE_K = 64;
    static constexpr int TILE_BYTES = 544;
    static constexpr float UNSCALE = 1099511627776.0f;  // 2^40

    __device__ static __forceinline__ void fragments(const uint8_t* tile, int lane, uint32_t (&a)[4][4]) {
        const uint4 words = *reinterpret_cast<const uint4*>(tile + lane * 16);
        const uint32_t scales = *reinterpret_cast<const uint32_t*>(tile + 512 + (lane / 4) * 4);
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // i = 2 * block + (row g or g+8)
            const uint32_t exponent = (scales >> (8 * i)) & 0xff;
            uint32_t pairs[4];
            expand_e2m1(word[i], exponent * 0x00800080u, pairs);
            const int step = i & ~1, half = i & 1;
            a[step][half] = pairs[0], a[step][half + 2] = pairs[1];
            a[step + 1][half] = pairs[2], a[step + 1][half + 2] = pairs[3];
        }
    }
};

// k16 steps of a tile.
template <class Format>
constexpr int STEPS = Format::TILE_K / 16;

}  // namespace packed
