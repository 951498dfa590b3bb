// out[s, r] = epilogue(sum_k x[s, k] * W[expert(s)][r, k] + bias[expert(s)][r]), both operands E4M3: prefill.
//
//   weights  packed (packed/fp8.cuh) with a scale for 128 x 128 values, one matrix or one an expert
//   x        [slots, k] E4M3 in the order of packed/fp8.cuh, by tensor map, with a scale for 128 values of a row: [blocks of k][slots]
//   out      [slots, rows of W] bf16 or f32; or, after clamped SwiGLU, E4M3 [slots, rows / 2] with scales, as x of the next product
//
// A tile is 128 slots x 256 rows: slots are the A operand (64 for each of 2 consumer warpgroups), weights the B operand, both in
// shared memory. A third warpgroup (one warp of it works) keeps `stages` steps of 128 along k in flight. A tile's operands come from
// the L2 cache at 6 TB/s where it computes 1040 TFLOP/s, the most that was measured. Two blocks that fetch half of the weights for
// each other, as a cluster, were slower in whole prompts of 4096 tokens and more.
//
// The tensor cores keep about 14 bits of a sum, so what they add up over 128 along k is multiplied by both scales and added to f32
// sums, which begin with the bias. 128 rows are multiplied at a time: their 64 registers, and 128 of sums for all 256 rows. While one
// warpgroup adds, the other one's products run.
//
// Shared memory: a step takes 16 KB of activations and 32 KB of weights.
#include "../packed/epilogue.cuh"
#include "../packed/fp8.cuh"
#include "../ptx/wgmma_fp8.cuh"

struct Fp8Args {
    ptx::TensorMap x;
    const uint8_t* weights;
    const float* weight_scales;
    const float* x_scales;
    const __nv_bfloat16* bias;  // [experts, rows of W], or null
    void* out;
    float* out_scales;          // [blocks of out's columns][slots]; only with SwiGLU
    const int4* tiles;          // {expert, first slot, slots, 0}; null: runs of 128 of all `slots`
    const int32_t* num_tiles;
    uint64_t expert_bytes;
    int32_t slots;
    int32_t x_stride;           // from one block of k to the next in scales of x
    int32_t out_stride;         // likewise of out
    int32_t groups;             // of 64 rows, of a matrix
    int32_t k_tiles;            // of 64 along k
    int32_t row_blocks;         // of 256 rows
    int32_t stages;
    int32_t out_pitch;          // elements from row to row of `out`
};
static_assert(sizeof(Fp8Args) == 256);

namespace {

using packed::Epilogue;

constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128, MAX_STAGES = 8;
constexpr int TILE_SLOTS = 128, TILE_GROUPS = 4, GROUP_ROWS = 64, GROUP_BYTES = 4096;
constexpr int X_BYTES = TILE_SLOTS * 128, HALF_BYTES = TILE_GROUPS * GROUP_BYTES, STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;

struct Barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
};

struct Work {
    int4 tile;  // {expert, first slot, slots, 0}
    int row_block, groups;
};

__device__ int num_work(const Fp8Args& args) {
    return (args.tiles ? *args.num_tiles : (args.slots + TILE_SLOTS - 1) / TILE_SLOTS) * args.row_blocks;
}

// Blocks of rows are neighbours: what runs at the same time shares activations, and an expert's weights are still in the L2 cache for
// its next tile.
__device__ Work work_at(const Fp8Args& args, int index) {
    Work work;
    work.row_block = index % args.row_blocks;
    const int tile = index / args.row_blocks, first = tile * TILE_SLOTS;
    work.tile = args.tiles ? args.tiles[tile] : make_int4(0, first, min(TILE_SLOTS, args.slots - first), 0);
    work.groups = min(TILE_GROUPS, args.groups - work.row_block * TILE_GROUPS);
    return work;
}

// By one warp: lane 0 copies activations, lanes 0 to 7 a group's tile each. A stage is {x, first tiles of 4 groups, second tiles}.
__device__ void produce(const Fp8Args& args, uint8_t* ring, Barriers& barriers) {
    const int lane = threadIdx.x % 32, group = lane % TILE_GROUPS, half = lane / TILE_GROUPS;
    ptx::grid_dependency_wait();
    const int items = num_work(args), steps = (args.k_tiles + 1) / 2;
    int stage = 0;
    uint32_t phase = 0;
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
        const Work work = work_at(args, index);
        const uint8_t* source = args.weights + work.tile.x * args.expert_bytes +
                                static_cast<uint64_t>(work.row_block * TILE_GROUPS + group) * args.k_tiles * GROUP_BYTES;
        for (int step = 0; step < steps; ++step) {
            const int halves = min(2, args.k_tiles - 2 * step);
            uint8_t* to = ring + stage * STAGE_BYTES;
            if (lane == 0) {
                ptx::mbarrier_wait(&barriers.empty[stage], phase ^ 1);
                ptx::mbarrier_arrive_expect(&barriers.full[stage], X_BYTES + halves * work.groups * GROUP_BYTES);
                ptx::tensor_copy(to, &args.x, step * 128, work.tile.y, &barriers.full[stage]);
            }
            __syncwarp();
            if (half < halves && group < work.groups) {
                ptx::bulk_copy(to + X_BYTES + half * HALF_BYTES + group * GROUP_BYTES,
                               source + (2 * step + half) * GROUP_BYTES, GROUP_BYTES, &barriers.full[stage]);
            }
            if (++stage == args.stages) stage = 0, phase ^= 1;
        }
    }
}

// Rows of W of a lane's sums 4 j and 4 j + 1 within 16 (j even: the first 8 positions of a strip).
template <Epilogue E>
__device__ __forceinline__ void begin_with_bias(const Fp8Args& args, const Work& work, float (&sum)[2][64]) {
    const int t = threadIdx.x % 4, strips = work.groups * 4;
    const __nv_bfloat16* bias = args.bias ? args.bias + static_cast<int64_t>(work.tile.x) * args.groups * GROUP_ROWS +
                                                work.row_block * TILE_GROUPS * GROUP_ROWS
                                          : nullptr;
#pragma unroll
    for (int strip = 0; strip < 16; ++strip) {
        uint32_t low = 0, high = 0;  // columns 2 t, 2 t + 1 of the strip's two halves
        if (bias && strip < strips) {
            const __nv_bfloat16* at = bias + strip * packed::STRIP_ROWS;
            if constexpr (E == Epilogue::SWIGLU) {  // gate, up, gate, up
                const uint2 four = *reinterpret_cast<const uint2*>(at + 4 * t);
                low = __byte_perm(four.x, four.y, 0x5410), high = __byte_perm(four.x, four.y, 0x7632);
            } else {
                low = *reinterpret_cast<const uint32_t*>(at + 2 * t), high = *reinterpret_cast<const uint32_t*>(at + 8 + 2 * t);
            }
        }
        float* to = &sum[strip / 8][strip % 8 * 8];
        to[0] = to[2] = ptx::low_bf16(low), to[1] = to[3] = ptx::high_bf16(low);
        to[4] = to[6] = ptx::low_bf16(high), to[5] = to[7] = ptx::high_bf16(high);
    }
}

// sum += scale * a * b over K32 steps of 32 along k. `a`, `b`: descriptors of the stage's activations and of 128 rows of weights.
template <int K32>
__device__ __forceinline__ void multiply(uint64_t a, uint64_t b, float (&product)[64]) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < K32; ++i) {
        ptx::wgmma_e4m3(product, a + 2 * i, b + (i / 2 * HALF_BYTES >> 4) + i % 2 * 2, i > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait_all();
#pragma unroll
    for (int i = 0; i < 64; ++i) ptx::pin(product[i]);
}

__device__ __forceinline__ void promote(const float (&product)[64], float scale0, float scale1, float (&sum)[64]) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        sum[4 * j] = fmaf(product[4 * j], scale0, sum[4 * j]);
        sum[4 * j + 1] = fmaf(product[4 * j + 1], scale0, sum[4 * j + 1]);
        sum[4 * j + 2] = fmaf(product[4 * j + 2], scale1, sum[4 * j + 2]);
        sum[4 * j + 3] = fmaf(product[4 * j + 3], scale1, sum[4 * j + 3]);
    }
}

// Clamped SwiGLU of this lane's two rows, which the other lanes of its quad share; then E4M3 by the row's scale for these 128 units.
__device__ __forceinline__ void write_units(const Fp8Args& args, const Work& work, int row, int part, float (&sum)[2][64]) {
    const int t = threadIdx.x % 4;
    float largest = 0.0f;
#pragma unroll
    for (int strip = 0; strip < 16; ++strip) {
        float* at = &sum[strip / 8][strip % 8 * 8 + 2 * part];
#pragma unroll
        for (int e = 0; e < 2; ++e) {  // a strip that does not exist has sums of whatever lies there
            at[e] = strip < work.groups * 4 ? packed::swiglu(at[e], at[4 + e]) : 0.0f;
            largest = fmaxf(largest, fabsf(at[e]));
        }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float scale = packed::scale_of(largest), inverse = packed::inverse_of(scale);
    if (row >= work.tile.z) return;
    const int64_t slot = work.tile.y + row;
    if (t == 0) args.out_scales[static_cast<int64_t>(work.row_block) * args.out_stride + slot] = scale;
    uint8_t* out = static_cast<uint8_t*>(args.out) + slot * args.out_pitch + work.row_block * 128 + 16 * t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half * 2 >= work.groups) break;
        uint32_t words[4];
#pragma unroll
        for (int s = 0; s < 4; ++s) {  // strips 2 s (h = 0) and 2 s + 1: places 4 s + {0: e = 0, h = 0; 1: h = 1; 2: e = 1; 3: both}
            const float* low = &sum[half][s * 16 + 2 * part];
            const float* high = low + 8;
            words[s] = ptx::pack4_e4m3(low[0] * inverse, high[0] * inverse, low[1] * inverse, high[1] * inverse);
        }
        *reinterpret_cast<uint4*>(out + 64 * half) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Gives lane t of a quad what lanes 0 to 3 have in word t, in that order.
__device__ __forceinline__ uint4 transpose_quad(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const int t = threadIdx.x % 4;
    const bool odd = t & 1, upper = t & 2;
    const uint32_t ab = __shfl_xor_sync(~0u, odd ? a : b, 1), cd = __shfl_xor_sync(~0u, odd ? c : d, 1);
    if (odd) a = ab, c = cd; else b = ab, d = cd;
    const uint32_t ac = __shfl_xor_sync(~0u, upper ? a : c, 2), bd = __shfl_xor_sync(~0u, upper ? b : d, 2);
    if (upper) a = ac, b = bd; else c = ac, d = bd;
    return make_uint4(a, b, c, d);
}

template <Epilogue E>
__device__ __forceinline__ void write_row(const Fp8Args& args, const Work& work, int row, int part, float (&sum)[2][64]) {
    const int t = threadIdx.x % 4;
    const int64_t slot = work.tile.y + row;
    const int first = work.row_block * TILE_GROUPS * GROUP_ROWS;
    if constexpr (E == Epilogue::F32) {
        if (row >= work.tile.z) return;
        float* out = static_cast<float*>(args.out) + slot * args.out_pitch + first + 2 * t;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            const float* at = &sum[j / 16][j % 16 * 4 + 2 * part];
            if (j < work.groups * 8) *reinterpret_cast<float2*>(out + 8 * j) = make_float2(at[0], at[1]);
        }
    } else {
        auto* out = static_cast<__nv_bfloat16*>(args.out) + slot * args.out_pitch + first + 8 * t;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* at = &sum[i / 4][(i % 4 * 4 + j) * 4 + 2 * part];
                words[j] = ptx::pack_bf16(at[0], at[1]);
            }
            const uint4 eight = transpose_quad(words[0], words[1], words[2], words[3]);
            if (row < work.tile.z && i < work.groups * 2) *reinterpret_cast<uint4*>(out + 32 * i) = eight;
        }
    }
}

template <Epilogue E>
__device__ void consume(const Fp8Args& args, const uint8_t* ring, Barriers& barriers) {
    const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    const int items = num_work(args), steps = (args.k_tiles + 1) / 2;
    const int row = warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const auto release = [&](int stage) {
        if (lane == 0) ptx::mbarrier_arrive(&barriers.empty[stage]);
    };
    int stage = 0;
    uint32_t phase = 0;
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
        const Work work = work_at(args, index);
        const bool has_slots = warpgroup * 64 < work.tile.z, has_more_rows = work.groups > 2;
        const float* x_scales = args.x_scales + work.tile.y;
        const int row0 = min(row, work.tile.z - 1), row1 = min(row + 8, work.tile.z - 1);
        const int first_block = work.tile.x * ((args.groups + 1) / 2) + work.row_block * 2;
        const float* weight_scales = args.weight_scales + static_cast<int64_t>(first_block) * steps;
        float sum[2][64];
        begin_with_bias<E>(args, work, sum);
        for (int step = 0; step < steps; ++step) {
            const float scale0 = __ldg(x_scales + static_cast<int64_t>(step) * args.x_stride + row0);
            const float scale1 = __ldg(x_scales + static_cast<int64_t>(step) * args.x_stride + row1);
            const float first = __ldg(weight_scales + step), second = has_more_rows ? __ldg(weight_scales + steps + step) : 0.0f;
            ptx::mbarrier_wait(&barriers.full[stage], phase);
            if (has_slots) {
                const uint32_t at = ptx::shared_address(ring) + stage * STAGE_BYTES;
                const uint64_t a = ptx::matrix_descriptor(at + warpgroup * 64 * 128);
                const uint64_t b = ptx::matrix_descriptor_64(at + X_BYTES);
                const bool whole = 2 * step + 1 < args.k_tiles;
                float product[64];
                whole ? multiply<4>(a, b, product) : multiply<2>(a, b, product);
                promote(product, scale0 * first, scale1 * first, sum[0]);
                if (has_more_rows) {
                    constexpr int NEXT = 128 * 64 >> 4;  // rows of weights
                    whole ? multiply<4>(a, b + NEXT, product) : multiply<2>(a, b + NEXT, product);
                    release(stage);
                    promote(product, scale0 * second, scale1 * second, sum[1]);
                } else {
                    release(stage);
                }
            } else {
                release(stage);
            }
            if (++stage == args.stages) stage = 0, phase ^= 1;
        }
        if (!has_slots) continue;
#pragma unroll
        for (int part = 0; part < 2; ++part) {  // rows `row` and `row + 8`
            if constexpr (E == Epilogue::SWIGLU) {
                write_units(args, work, row + 8 * part, part, sum);
            } else {
                write_row<E>(args, work, row + 8 * part, part, sum);
            }
        }
    }
}

template <Epilogue E>
__device__ void fp8_gemm(const Fp8Args& args) {
    extern __shared__ uint8_t shared[];
    __shared__ Barriers barriers;
    uint8_t* ring = shared + (-ptx::shared_address(shared) & 1023);
    if (threadIdx.x == 0) {
        for (int i = 0; i < args.stages; ++i) {
            ptx::mbarrier_init(&barriers.full[i], 1);
            ptx::mbarrier_init(&barriers.empty[i], CONSUMERS / 32);
        }
        ptx::fence_barrier_init();
        ptx::prefetch_tensor_map(&args.x);
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        ptx::give_registers<40>();
        if (threadIdx.x < CONSUMERS + 32) produce(args, ring, barriers);
    } else {
        ptx::take_registers<232>();
        ptx::grid_dependency_wait();
        ptx::launch_dependents();
        consume<E>(args, ring, barriers);
    }
}

}  // namespace

#define FP8_GEMM(name, epilogue)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ Fp8Args args) { \
        fp8_gemm<Epilogue::epilogue>(args);                                                               \
    }
FP8_GEMM(fp8_gemm_bf16, BF16)
FP8_GEMM(fp8_gemm_f32, F32)
FP8_GEMM(fp8_gemm_swiglu, SWIGLU)
