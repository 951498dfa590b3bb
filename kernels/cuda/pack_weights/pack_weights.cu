// Rearranges weight matrices into the order of packed/packed.cuh, on the device, while a checkpoint is loaded.
//
// MXFP4 becomes packed MXFP4, or bf16 without loss. One thread builds one 32-bit word of the output. Reads are gathered, writes are coalesced; bound by memory, and run once.
#include "../packed/packed.cuh"

struct PackArgs {
    const uint8_t* values;  // bf16 [matrices, rows, k]; or E2M1 pairs [matrices, rows, k / 2], low nibble first
    const uint8_t* scales;  // E8M0 [matrices, rows, k / 32] of E2M1 values
    uint32_t* out;          // in the order of packed.cuh, matrix after matrix
    uint32_t* refused;      // number of scales outside 42..168 on blocks that are not all zero
    uint64_t words;         // of `out`
    int32_t rows;
    int32_t k;
    int32_t tiles;       // of a strip
    int32_t interleave;  // 1: strip row r < 8 is row 2r, r >= 8 row 2(r - 8) + 1: gate and up of one unit meet in one lane
};
static_assert(sizeof(PackArgs) == 56);

namespace {

// Row of the matrix that is row `r` of strip `strip`.
__device__ int64_t source_row(const PackArgs& args, int64_t strip, int r) {
    return strip * packed::STRIP_ROWS + (args.interleave ? 2 * (r % 8) + r / 8 : r);
}

__device__ uint32_t bf16_word(const PackArgs& args, uint64_t strip, int tile, int within) {
    const int step = within / 128, lane = within / 4 % 32, reg = within % 4;
    const int g = lane / 4, t = lane % 4;
    const int64_t row = source_row(args, strip, g + 8 * (reg & 1));
    const int k = tile * packed::Bf16::TILE_K + step * 16 + 2 * t + 8 * (reg / 2);
    return k < args.k ? reinterpret_cast<const uint32_t*>(args.values)[(row * args.k + k) / 2] : 0;
}

// The same pair of values from MXFP4, by the definition: E2M1 times 2^(scale - 127), exact in bf16.
__device__ uint32_t bf16_word_of_mxfp4(const PackArgs& args, uint64_t strip, int tile, int within) {
    const int step = within / 128, lane = within / 4 % 32, reg = within % 4;
    const int64_t row = source_row(args, strip, lane / 4 + 8 * (reg & 1));
    const int k = tile * packed::Bf16::TILE_K + step * 16 + 2 * (lane % 4) + 8 * (reg / 2);
    if (k >= args.k) return 0;
    const uint32_t pair = args.values[(row * args.k + k) / 2];
    const uint32_t exponent = args.scales[row * (args.k / 32) + k / 32];
    const float scale = exponent == 0 ? __uint_as_float(1 << 22) : __uint_as_float(exponent << 23);
    const auto value = [&](uint32_t nibble) {
        const uint32_t m = nibble & 7;
        const float magnitude = m < 2 ? 0.5f * m : (1.0f + 0.5f * (m & 1)) * (1 << (m / 2 - 1));
        return (nibble & 8 ? -magnitude : magnitude) * scale;
    };
    return ptx::pack_bf16(value(pair & 0xf), value(pair >> 4));
}

__device__ uint32_t mxfp4_word(const PackArgs& args, uint64_t strip, int tile, int lane, int i) {
    const int block = tile * 2 + i / 2;
    if (block * 32 >= args.k) return 0;
    const int64_t row = source_row(args, strip, lane / 4 + 8 * (i & 1));
    const uint8_t* bytes = args.values + (row * (args.k / 32) + block) * 16;
    constexpr int SIGN_BIT[4] = {15, 12, 14, 13}, MAGNITUDE_BIT[4] = {6, 3, 0, 9};
    uint32_t word = 0;
    for (int j = 0; j < 4; ++j) {
        const uint32_t pair = bytes[4 * j + lane % 4];
        for (int h = 0; h < 2; ++h) {
            const uint32_t value = (pair >> (4 * h)) & 0xf;
            word |= (value >> 3) << (SIGN_BIT[j] + 16 * h) | (value & 7) << (MAGNITUDE_BIT[j] + 16 * h);
        }
    }
    return word;
}

__device__ uint32_t mxfp4_scales(const PackArgs& args, uint64_t strip, int tile, int g) {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) {
        const int block = tile * 2 + i / 2;
        if (block * 32 >= args.k) continue;
        const int64_t index = source_row(args, strip, g + 8 * (i & 1)) * (args.k / 32) + block;
        const int scale = args.scales[index];
        if (scale < 42 || scale > 168) {
            uint32_t magnitudes = 0;
            for (int b = 0; b < 16; ++b) magnitudes |= args.values[index * 16 + b] & 0x77;
            if (magnitudes != 0) atomicAdd(args.refused, 1u);
            continue;  // scale byte 0: the block is zero
        }
        word |= static_cast<uint32_t>(scale + 26) << (8 * i);
    }
    return word;
}

template <class Format, bool FROM_MXFP4>
__device__ void pack(const PackArgs& args) {
    ptx::grid_dependency_wait();
    constexpr int TILE_WORDS = Format::TILE_BYTES / 4;
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < args.words; i += stride) {
        const int within = i % TILE_WORDS;
        const int strips = args.rows / packed::STRIP_ROWS;
        const uint64_t tile_index = i / TILE_WORDS, matrix = tile_index / (static_cast<uint64_t>(strips) * args.tiles);
        const int in_matrix = tile_index % (static_cast<uint64_t>(strips) * args.tiles);
        const int group = in_matrix / (packed::GROUP * args.tiles);  // only the last may be smaller
        const int group_strips = min(packed::GROUP, strips - group * packed::GROUP);
        const int in_group = in_matrix - group * packed::GROUP * args.tiles;
        const int tile = in_group / group_strips;
        const uint64_t strip = matrix * strips + group * packed::GROUP + in_group % group_strips;
        if constexpr (Format::TILE_K == packed::Bf16::TILE_K) {
            args.out[i] = FROM_MXFP4 ? bf16_word_of_mxfp4(args, strip, tile, within) : bf16_word(args, strip, tile, within);
        } else {
            args.out[i] = within < 128 ? mxfp4_word(args, strip, tile, within / 4, within % 4)
                                       : mxfp4_scales(args, strip, tile, within - 128);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) pack_bf16(const __grid_constant__ PackArgs args) {
    pack<packed::Bf16, false>(args);
}
extern "C" __global__ void __launch_bounds__(256) pack_mxfp4(const __grid_constant__ PackArgs args) {
    pack<packed::Mxfp4, true>(args);
}
extern "C" __global__ void __launch_bounds__(256) pack_bf16_from_mxfp4(const __grid_constant__ PackArgs args) {
    pack<packed::Bf16, true>(args);
}
