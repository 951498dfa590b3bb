// How weight matrices lie in device memory: in the order in which tensor cores take them.
//
// A matrix [rows, k] is cut into strips of 16 rows, and those into groups of 4; the last group may have fewer. A group is contiguous:
// for each tile along k, its strips' tiles one after the other. So any run along k of a group is one contiguous copy. Within a
// tile, lane (g = lane / 4, t = lane % 4) of a warp finds its A fragments of mma.m16n8k16 (and of wgmma m64k16, where each warp
// owns 16 rows) in one or two 16-byte words: rows g and g+8. Along k a matrix is filled up with zeros to a multiple of 64, the step of
// tile_gemm.cu: a strip of Bf16 has an even number of tiles.
//
//   Bf16   16 x 32 values, 1024 bytes: [k16 step][lane] of 16 bytes {a0, a1, a2, a3}.
//   Mxfp4  16 x 64 values, 544 bytes: [lane] of 16 bytes {row g block 0, row g+8 block 0, row g block 1, row g+8 block 1}, each
//          word 8 values of one 32-block: k = 8j + 2t + h for j = 0..3, h = 0, 1; then [g] of 4 scale bytes in the same order.
//   Fp8    fp8.cuh
//
// A word of Mxfp4 has value (j, h) in half h, its sign and magnitude where shifts bring both to a bf16's sign, low exponent and high
// mantissa bits: j: sign bit / magnitude bits = 0: 15 / 8..6, 1: 12 / 5..3, 2: 14 / 2..0, 3: 13 / 11..9. Read so, E2M1 is a bf16 2^126
// times too small (its subnormal 0.5 is a bf16 subnormal). At 4.3 TB/s a multiprocessor sees 34 values a clock, and tables of
// bytes take more than twice these 10 instructions for 8 values: the count decides whether the kernel is bound by memory.
//
// A scale byte is s + 26 for the E8M0 scale 2^(s - 127). There are two ways to make good the 2^-126, both exact:
//   few columns   activations are multiplied by 2^100, and the sums of each 32-block by 2^(s - 101), in f32
//   many columns  values are multiplied by the bf16 2^(s - 41), and the whole sum by 2^40
// The second holds for s in 42..168; the loader refuses other scales.
#pragma once
#include "../ptx/ptx.cuh"

namespace packed {

constexpr int STRIP_ROWS = 16;
constexpr int GROUP = 4;  // strips
constexpr int BLOCK_K = 32;  // activations are laid out by blocks of 32 along k

// Activations for NT x 8 columns: [32-block][column tile][lane] of 16 bytes; word j of lane (g, t) is the pair
// k = 8j + 2t, 8j + 2t + 1 of column g.
template <int NT>
__device__ __forceinline__ uint4 activation(const uint4* x, int block, int column_tile, int lane) {
    return x[(block * NT + column_tile) * 32 + lane];
}

// acc += tile * columns, for one column tile; `columns` are the activations of the tile's 32-blocks.
struct Bf16 {
    static constexpr int TILE_K = 32, BLOCKS = TILE_K / BLOCK_K;
    static constexpr int TILE_BYTES = 1024;
    static constexpr bool BLOCK_SCALES = false;

    struct Tile {
        uint32_t a[2][4];  // fragments by k16 step
    };

    __device__ static __forceinline__ Tile load(const uint8_t* bytes, int lane) {
        Tile tile;
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const uint4 word = *reinterpret_cast<const uint4*>(bytes + step * 512 + lane * 16);
            tile.a[step][0] = word.x, tile.a[step][1] = word.y, tile.a[step][2] = word.z, tile.a[step][3] = word.w;
        }
        return tile;
    }

    __device__ static __forceinline__ void accumulate(const Tile& tile, const uint4 (&columns)[BLOCKS], float (&acc)[4]) {
        ptx::mma_bf16(acc, tile.a[0], columns[0].x, columns[0].y);
        ptx::mma_bf16(acc, tile.a[1], columns[0].z, columns[0].w);
    }

    // An activation as `accumulate` wants it.
    __device__ static __forceinline__ uint32_t prepare(uint32_t pair) { return pair; }

    // A fragments of 64 values along k, for sums over all of k; these are to be multiplied by `UNSCALE`. `tile_stride`: from one
    // tile of the strip to the next.
    static constexpr float UNSCALE = 1.0f;
    __device__ static __forceinline__ void scaled_fragments(const uint8_t* bytes, int tile_stride, int lane,
                                                            uint32_t (&a)[4][4]) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const uint8_t* at = bytes + step / 2 * tile_stride + step % 2 * 512;
            const uint4 word = *reinterpret_cast<const uint4*>(at + lane * 16);
            a[step][0] = word.x, a[step][1] = word.y, a[step][2] = word.z, a[step][3] = word.w;
        }
    }
};

// Eight E2M1 values as bf16, 2^126 times too small: out[j] is the pair k = 8j + 2t, 8j + 2t + 1.
__device__ __forceinline__ void expand_e2m1(uint32_t word, uint32_t (&out)[4]) {
    constexpr uint32_t SIGN = 0x80008000u, MAGNITUDE = 0x01C001C0u;
    out[0] = word & (SIGN | MAGNITUDE);
    out[1] = (word << 3) & (SIGN | MAGNITUDE);
    // One product moves the sign by 1 and the magnitude by 6; what it leaves elsewhere is masked.
    out[2] = ((word & 0x40074007u) * 66u) & (SIGN | MAGNITUDE);
    out[3] = ((word << 2) & SIGN) | ((word >> 3) & MAGNITUDE);
}

struct Mxfp4 {
    static constexpr int TILE_K = 64, BLOCKS = TILE_K / BLOCK_K;
    static constexpr int TILE_BYTES = 544;
    static constexpr bool BLOCK_SCALES = false;

    struct Tile {
        uint32_t a[4][4];       // fragments by k16 step
        float scale[BLOCKS][2];  // rows g, g+8
    };

    __device__ static __forceinline__ Tile load(const uint8_t* bytes, int lane) {
        const uint4 words = *reinterpret_cast<const uint4*>(bytes + lane * 16);
        const uint32_t scales = *reinterpret_cast<const uint32_t*>(bytes + 512 + (lane & ~3));
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
        constexpr uint32_t EXPONENT = 0x7F800000u;
        Tile tile;
        tile.scale[0][0] = __uint_as_float((scales << 23) & EXPONENT);
        tile.scale[0][1] = __uint_as_float((scales << 15) & EXPONENT);
        tile.scale[1][0] = __uint_as_float((scales << 7) & EXPONENT);
        tile.scale[1][1] = __uint_as_float((scales >> 1) & EXPONENT);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // i = 2 * block + (row g or g+8)
            uint32_t pairs[4];
            expand_e2m1(word[i], pairs);
            const int step = i & ~1, half = i & 1;
            tile.a[step][half] = pairs[0], tile.a[step][half + 2] = pairs[1];
            tile.a[step + 1][half] = pairs[2], tile.a[step + 1][half + 2] = pairs[3];
        }
        return tile;
    }

    __device__ static __forceinline__ void accumulate(const Tile& tile, const uint4 (&columns)[BLOCKS], float (&acc)[4]) {
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            float sum[4];
            ptx::mma_bf16_zero(sum, tile.a[2 * b], columns[b].x, columns[b].y);
            ptx::mma_bf16(sum, tile.a[2 * b + 1], columns[b].z, columns[b].w);
            acc[0] = fmaf(sum[0], tile.scale[b][0], acc[0]), acc[1] = fmaf(sum[1], tile.scale[b][0], acc[1]);
            acc[2] = fmaf(sum[2], tile.scale[b][1], acc[2]), acc[3] = fmaf(sum[3], tile.scale[b][1], acc[3]);
        }
    }

    __device__ static __forceinline__ uint32_t prepare(uint32_t pair) {
        constexpr uint32_t TWO_TO_100 = 0x71807180u;
        return ptx::mul_bf16x2(pair, TWO_TO_100);
    }

    // A lane's part of a tile, as it lies in memory.
    struct Words {
        uint4 values;
        uint32_t scales;
    };

    __device__ static __forceinline__ Words load_words(const uint8_t* bytes, int lane) {
        return {*reinterpret_cast<const uint4*>(bytes + lane * 16), *reinterpret_cast<const uint32_t*>(bytes + 512 + (lane & ~3))};
    }

    static constexpr float UNSCALE = 1099511627776.0f;  // 2^40
    __device__ static __forceinline__ void scaled_fragments(const uint8_t* bytes, int, int lane, uint32_t (&a)[4][4]) {
        scaled_fragments(load_words(bytes, lane), a);
    }

    __device__ static __forceinline__ void scaled_fragments(const Words& words, uint32_t (&a)[4][4]) {
        const uint32_t word[4] = {words.values.x, words.values.y, words.values.z, words.values.w};
        // s + 26 becomes the exponent s + 86 of the bf16 2^(s - 41): those of a block's rows g and g+8, in the halves of a word.
        const uint32_t scales[BLOCKS] = {__byte_perm(words.scales, 0, 0x4140) * 128 + 60 * 0x00800080u,
                                         __byte_perm(words.scales, 0, 0x4342) * 128 + 60 * 0x00800080u};
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // i = 2 * block + (row g or g+8)
            uint32_t pairs[4];
            expand_e2m1(word[i], pairs);
            const int step = i & ~1, half = i & 1;
            const auto scaled = [&](uint32_t pair) {
                return half == 0 ? ptx::mul_bf16x2_by_low(pair, scales[i / 2]) : ptx::mul_bf16x2_by_high(pair, scales[i / 2]);
            };
            a[step][half] = scaled(pairs[0]), a[step][half + 2] = scaled(pairs[1]);
            a[step + 1][half] = scaled(pairs[2]), a[step + 1][half + 2] = scaled(pairs[3]);
        }
    }
};

}  // namespace packed
