// Makes packed FP8 matrices (packed/fp8.cuh) on the device, while a checkpoint is loaded, from MXFP4, bf16 or FP8 of another grid.
//
// A block of threads takes 128 x 128 values: their largest magnitude decides the scale, the smallest power of two that brings it to
// E4M3's 448, and each value is rounded to nearest even. MXFP4 and FP8 values come through unchanged unless the block spans more
// binades than E4M3 has; those that change are counted. A thread keeps its 16 values in registers between the two. Run once.
#include "../packed/fp8.cuh"
#include "../ptx/wgmma_fp8.cuh"

struct PackFp8Args {
    const uint8_t* values;  // bf16 [matrices, rows, k]; E2M1 pairs [matrices, rows, k / 2]; or E4M3 [matrices, rows, k]
    const uint8_t* scales;  // E8M0 [matrices, rows, k / 32] of MXFP4, or [matrices, grid_rows, grid_cols] of FP8
    uint8_t* out;
    float* out_scales;
    uint32_t* report;       // [3]: values that changed (two words), largest relative change as the bits of an f32
    int32_t matrices;
    int32_t rows;
    int32_t k;
    int32_t interleave;     // as in pack_weights
    int32_t grid_rows;      // blocks of the scales of FP8, and where in the first of them the matrix begins
    int32_t grid_cols;
    int32_t row_offset;
    int32_t col_offset;
};
static_assert(sizeof(PackFp8Args) == 72);

namespace {

constexpr int THREADS = 1024, WORDS = 128 * 128 / 4 / THREADS;

__device__ float exponent(uint8_t e8m0) { return e8m0 == 0 ? __uint_as_float(1 << 22) : __uint_as_float(e8m0 << 23); }

struct FromBf16 {
    __device__ static float value(const PackFp8Args& args, int64_t matrix, int row, int k) {
        const int64_t at = (matrix * args.rows + row) * args.k + k;
        return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(args.values)[at]);
    }
};

struct FromMxfp4 {
    __device__ static float value(const PackFp8Args& args, int64_t matrix, int row, int k) {
        const int64_t at = (matrix * args.rows + row) * args.k + k;
        const uint32_t nibble = args.values[at / 2] >> (4 * (k % 2)) & 0xf;
        const uint32_t magnitude = nibble & 7;
        // 0, 0.5, then 1 and 1.5 times a power of two.
        const float unscaled = magnitude < 2 ? 0.5f * magnitude : (1.0f + 0.5f * (magnitude & 1)) * (1 << (magnitude / 2 - 1));
        const float value = unscaled * exponent(args.scales[at / 32]);
        return nibble & 8 ? -value : value;
    }
};

struct FromFp8 {
    __device__ static float value(const PackFp8Args& args, int64_t matrix, int row, int k) {
        const int64_t block = (row + args.row_offset) / packed::SCALE_BLOCK, col = (k + args.col_offset) / packed::SCALE_BLOCK;
        const float value = ptx::from_e4m3(args.values[(matrix * args.rows + row) * args.k + k]);
        return value * exponent(args.scales[(matrix * args.grid_rows + block) * args.grid_cols + col]);
    }
};

// What word `i` of this thread is: place of a word in a block of 2 groups of 64 rows x 2 tiles of 64 along k.
struct Word {
    int group, tile, row, k, place;

    __device__ Word(int i, bool interleave) {
        const int index = i * THREADS + threadIdx.x;
        const int position = index / 16 % 64, piece = index / 4 % 4, s = index % 4;
        group = index / 2048, tile = index / 1024 % 2, place = index % 1024 * 4;
        const int within = position % packed::STRIP_ROWS;
        row = group * 64 + position - within + (interleave ? 2 * (within % 8) + within / 8 : within);
        k = tile * 64 + packed::k_of_place(16 * (piece ^ (position / 2 % 4)) + 4 * s);
    }
};

template <class Source>
__device__ void pack(const PackFp8Args& args) {
    ptx::grid_dependency_wait();
    __shared__ uint32_t shared_largest;
    const int row_blocks = (args.rows + 127) / 128, k_blocks = (args.k + 127) / 128, k_tiles = (args.k + 63) / 64;
    const int per_matrix = row_blocks * k_blocks;
    const uint64_t matrix_bytes = static_cast<uint64_t>(args.rows) * k_tiles * 64;
    uint32_t changed = 0;
    float worst = 0.0f;
    for (int64_t block = blockIdx.x; block < static_cast<int64_t>(args.matrices) * per_matrix; block += gridDim.x) {
        const int64_t matrix = block / per_matrix;
        const int row_block = block % per_matrix / k_blocks, k_block = block % k_blocks;
        if (threadIdx.x == 0) shared_largest = 0;
        __syncthreads();
        float values[WORDS][4];
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const Word word(i, args.interleave);
#pragma unroll
            for (int b = 0; b < 4; ++b) {  // places e, h: k + e + 8 h
                const int row = row_block * 128 + word.row, k = k_block * 128 + word.k + b / 2 + b % 2 * 8;
                values[i][b] = row < args.rows && k < args.k ? Source::value(args, matrix, row, k) : 0.0f;
                largest = max(largest, __float_as_uint(fabsf(values[i][b])));
            }
        }
        largest = __reduce_max_sync(~0u, largest);
        if (threadIdx.x % 32 == 0) atomicMax(&shared_largest, largest);
        __syncthreads();
        const float scale = packed::scale_of(__uint_as_float(shared_largest)), inverse = packed::inverse_of(scale);
        if (threadIdx.x == 0) args.out_scales[block] = scale;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const Word word(i, args.interleave);
            const int group = row_block * 2 + word.group, tile = k_block * 2 + word.tile;
            const float* v = values[i];
            const uint32_t four = ptx::pack4_e4m3(v[0] * inverse, v[1] * inverse, v[2] * inverse, v[3] * inverse);
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const float stored = ptx::from_e4m3(four >> (8 * b) & 0xff) * scale;
                if (stored != v[b]) ++changed, worst = fmaxf(worst, fabsf(stored - v[b]) / fabsf(v[b]));
            }
            if (group * 64 < args.rows && tile < k_tiles) {
                const uint64_t at = (static_cast<uint64_t>(group) * k_tiles + tile) * 4096 + word.place;
                *reinterpret_cast<uint32_t*>(args.out + matrix * matrix_bytes + at) = four;
            }
        }
        __syncthreads();  // `shared_largest` may be written again
    }
    changed = __reduce_add_sync(~0u, changed);
    const uint32_t worst_bits = __reduce_max_sync(~0u, __float_as_uint(worst));
    if (threadIdx.x % 32 == 0 && changed > 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(args.report), static_cast<unsigned long long>(changed));
        atomicMax(args.report + 2, worst_bits);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) pack_fp8_from_bf16(const __grid_constant__ PackFp8Args args) {
    pack<FromBf16>(args);
}
extern "C" __global__ void __launch_bounds__(THREADS) pack_fp8_from_mxfp4(const __grid_constant__ PackFp8Args args) {
    pack<FromMxfp4>(args);
}
extern "C" __global__ void __launch_bounds__(THREADS) pack_fp8_from_fp8(const __grid_constant__ PackFp8Args args) {
    pack<FromFp8>(args);
}
