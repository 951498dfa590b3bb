// Attention of one query a sequence over its cached keys, with sinks:
//   out[b, h] = sum_j 2^(s_j - m) v_j / (sum_j 2^(s_j - m) + 2^(sink_h - m)),   s_j = log2(e) * q[b, h] . k_j / sqrt(64)
// over the keys j in [max(0, context - window), context); the sink is not scaled and enters once, when the parts are merged.
//
//   q, out  [batch, q_heads, 64] bf16, q rotated;  sinks [q_heads] bf16
//   cache   rows of 64 bf16 or E4M3 as the tensor map sees them: [page][layer][kv head][K, V][token]
//   context [batch] keys of each sequence, its own included; 0 for padding rows, whose output is zero
//
// Bound by memory: each key and value is read once for all query heads that share it. A block = (split, kv head, sequence), so
// that few sequences still fill the chip; its 4 warps take tiles of 32 keys in turn, each with a ring of 3 tiles in flight
// through the tensor copy engine (128-byte swizzle, so ldmatrix has no bank conflicts). S = Q K^T and O = P V by m16n8k16; the
// up to 8 query heads of a kv head are rows 0..7, rows 8..15 are idle, which costs nothing here.
// The last block of a (kv head, sequence) to finish merges the splits in order, so the result does not depend on timing.
//
// E4M3 becomes f16 in registers, exactly, and queries and weights are f16 as well (queries beyond its 65504 are limited to that). A
// lane takes 16 bytes of a key, so the dims of S are summed in another order, which is the queries' too. Of values, ldmatrix
// transposes pairs of bytes: a product over 8 columns has the even dims of 16, the next one the odd ones.
//
// Shared memory: 4 warps x 3 tiles x 8 KB (E4M3: 4 KB); two (four) blocks a multiprocessor.
#include "../ptx/e4m3.cuh"

struct DecodeAttentionArgs {
    ptx::TensorMap cache;
    const __nv_bfloat16* q;
    const __nv_bfloat16* sinks;
    __nv_bfloat16* out;
    const int32_t* context;
    const int32_t* sequence;    // row of the page table of each query; null: the query's own number
    const int32_t* page_table;  // [sequences, table_width]
    const int32_t* first_page;  // logical page of each row's first entry; null: 0
    float* partials;            // [batch, kv_heads, splits, 8, 68]: m, l, 2 unused, then 64 sums
    uint32_t* counters;         // [batch, kv_heads], zero between launches
    int32_t page_rows;          // rows of a page in the tensor map
    int32_t layer_row;          // first row of the layer within a page
    int32_t table_width;
    int32_t page_tokens;        // a multiple of 32
    int32_t q_heads;
    int32_t kv_heads;
    int32_t window;             // keys visible; 0: all
    int32_t padding;
};
static_assert(sizeof(DecodeAttentionArgs) == 256);

namespace {

constexpr int WARPS = 4, STAGES = 3, TILE = 32, DIM = 64, GROUP = 8;
constexpr float SCALE = ptx::LOG2E / 8.0f;

enum class Cache { BF16, E4M3 };

template <Cache CACHE>
constexpr int ROW_BYTES = CACHE == Cache::BF16 ? DIM * 2 : DIM;
template <Cache CACHE>
constexpr int PLANE_BYTES = TILE * ROW_BYTES<CACHE>;  // keys, or values, of a tile

// Byte address of 16-byte column `column` of row `row` in a plane written with the swizzle of as many bytes as a row has.
template <Cache CACHE>
__device__ __forceinline__ uint32_t swizzled(uint32_t plane, int row, int column) {
    const int turn = CACHE == Cache::BF16 ? row & 7 : row >> 1 & 3;
    return plane + row * ROW_BYTES<CACHE> + ((column ^ turn) << 4);
}

// Softmax state and sums of 8 query heads; lane (g, t) has head g and of dims, bf16: 8 n + 2t and 8 n + 2t + 1 in out[n]; E4M3:
// 16 j + 4t and 16 j + 4t + 2 in out[2 j], 16 j + 4t + 1 and 16 j + 4t + 3 in out[2 j + 1].
struct State {
    float max = -INFINITY, sum = 0.0f;
    float out[8][2] = {};
};

// Keys [begin, end) of this block; this warp's tiles are first, first + WARPS, ..
struct Work {
    int begin, end, first, last;
};

__device__ Work work_of(const DecodeAttentionArgs& args, int sequence) {
    Work work;
    work.end = args.context[sequence];
    work.begin = args.window > 0 ? max(0, work.end - args.window) : 0;
    const int first = work.begin / TILE, tiles = (work.end + TILE - 1) / TILE - first;
    work.first = first + static_cast<int>(static_cast<int64_t>(tiles) * blockIdx.x / gridDim.x) + threadIdx.x / 32;
    work.last = first + static_cast<int>(static_cast<int64_t>(tiles) * (blockIdx.x + 1) / gridDim.x);
    return work;
}

// The queries as left operands of four steps along the dims: step s has, bf16: dims 16 s + 2t, + 1 and 16 s + 2t + 8, + 9; E4M3:
// dims 16 t + 4 s, + 1 and 16 t + 4 s + 2, + 3.
template <Cache CACHE>
__device__ void load_queries(const DecodeAttentionArgs& args, int sequence, int kv_head, uint32_t (&q)[4][2]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = args.q_heads / args.kv_heads;
    const int64_t head = static_cast<int64_t>(sequence) * args.q_heads + kv_head * group + min(g, group - 1);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(args.q + head * DIM);
    const auto to_f16 = [](uint32_t pair) {
        const auto limited = [](float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); };
        return ptx::pack_f16(limited(ptx::low_bf16(pair)), limited(ptx::high_bf16(pair)));
    };
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        if constexpr (CACHE == Cache::BF16) {
            q[step][0] = words[step * 8 + t];
            q[step][1] = words[step * 8 + 4 + t];
        } else {
            q[step][0] = to_f16(words[8 * t + 2 * step]);
            q[step][1] = to_f16(words[8 * t + 2 * step + 1]);
        }
    }
}

// Scores of 8 keys, `first` the first.
__device__ __forceinline__ void score_bf16(float (&s)[4], const uint32_t (&q)[4][2], uint32_t keys, int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t k[4];
        ptx::ldmatrix_x4(k, swizzled<Cache::BF16>(keys, first + lane % 8, half * 4 + lane / 8));
        const uint32_t a0[4] = {q[2 * half][0], 0, q[2 * half][1], 0};
        const uint32_t a1[4] = {q[2 * half + 1][0], 0, q[2 * half + 1][1], 0};
        ptx::mma_bf16(s, a0, k[0], k[1]);
        ptx::mma_bf16(s, a1, k[2], k[3]);
    }
}

__device__ __forceinline__ void score_e4m3(float (&s)[4], const uint32_t (&q)[4][2], uint32_t keys, int first) {
    const int lane = threadIdx.x % 32;
    uint32_t k[4];
    ptx::load_shared16(k, swizzled<Cache::E4M3>(keys, first + lane / 4, lane % 4));
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        uint32_t b0, b1;
        ptx::unpack4_e4m3(k[step], b0, b1);
        const uint32_t a[4] = {q[step][0], 0, q[step][1], 0};
        ptx::mma_f16(s, a, b0, b1);
    }
}

// Adds the values of 16 keys, `first` the first, weighted by `p`.
__device__ __forceinline__ void mix_bf16(const uint32_t (&p)[4], uint32_t values, int first, State& state) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // 16 dims each
        uint32_t v[4];
        ptx::ldmatrix_x4_transposed(v, swizzled<Cache::BF16>(values, first + lane % 16, pair * 2 + lane / 16));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float* sums = state.out[2 * pair + i];
            float d[4] = {sums[0], sums[1], 0.0f, 0.0f};
            ptx::mma_bf16(d, p, v[2 * i], v[2 * i + 1]);
            sums[0] = d[0], sums[1] = d[1];
        }
    }
}

__device__ __forceinline__ void mix_e4m3(const uint32_t (&p)[4], uint32_t values, int first, State& state) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 32 dims each
        uint32_t v[4];
        ptx::ldmatrix_x4_transposed(v, swizzled<Cache::E4M3>(values, first + lane % 16, half * 2 + lane / 16));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // Of keys k and k + 1: bytes k even, k odd, k + 1 even, k + 1 odd; wanted are the two even ones, then the two odd ones.
            uint32_t even[2], odd[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) ptx::unpack4_e4m3(__byte_perm(v[2 * i + j], 0, 0x3120), even[j], odd[j]);
            float* sums = state.out[4 * half + 2 * i];
            float d[4] = {sums[0], sums[1], 0.0f, 0.0f};
            ptx::mma_f16(d, p, even[0], even[1]);
            sums[0] = d[0], sums[1] = d[1];
            sums = state.out[4 * half + 2 * i + 1];
            float e[4] = {sums[0], sums[1], 0.0f, 0.0f};
            ptx::mma_f16(e, p, odd[0], odd[1]);
            sums[0] = e[0], sums[1] = e[1];
        }
    }
}

// Adds one tile of keys and values, of which [from, to) are visible.
template <Cache CACHE>
__device__ __forceinline__ void add_tile(const uint32_t (&q)[4][2], uint32_t keys, uint32_t values, int from, int to,
                                         State& state) {
    const int t = threadIdx.x % 4;
    float s[4][4];
    float top = state.max;
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // 8 keys each
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
        if constexpr (CACHE == Cache::BF16) {
            score_bf16(s[n], q, keys, n * 8);
        } else {
            score_e4m3(s[n], q, keys, n * 8);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int key = n * 8 + 2 * t + i;
            s[n][i] = key >= from && key < to ? s[n][i] * SCALE : -INFINITY;
            top = fmaxf(top, s[n][i]);
        }
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    // A tile is visited only if it has a visible key, so `top` is finite.
    const float rescale = ptx::exp2_approx(state.max - top);
    state.max = top;
    state.sum *= rescale;
#pragma unroll
    for (int n = 0; n < 8; ++n) state.out[n][0] *= rescale, state.out[n][1] *= rescale;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        s[n][0] = ptx::exp2_approx(s[n][0] - top), s[n][1] = ptx::exp2_approx(s[n][1] - top);
        state.sum += s[n][0] + s[n][1];
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {  // 16 keys each
        const auto pack = [](float low, float high) {
            return CACHE == Cache::BF16 ? ptx::pack_bf16(low, high) : ptx::pack_f16(low, high);
        };
        const uint32_t p[4] = {pack(s[2 * step][0], s[2 * step][1]), 0, pack(s[2 * step + 1][0], s[2 * step + 1][1]), 0};
        if constexpr (CACHE == Cache::BF16) {
            mix_bf16(p, values, step * 16, state);
        } else {
            mix_e4m3(p, values, step * 16, state);
        }
    }
}

// This warp's tiles, one after the other.
template <Cache CACHE>
__device__ void attend(const DecodeAttentionArgs& args, int sequence, int kv_head, const Work& work, uint8_t* ring,
                       uint64_t* full, State& state) {
    constexpr int PLANE_BYTES = ::PLANE_BYTES<CACHE>;
    const int lane = threadIdx.x % 32;
    const int table_row = args.sequence ? args.sequence[sequence] : sequence;
    const int first_page = args.first_page ? args.first_page[table_row] : 0;
    const int32_t* table = args.page_table + static_cast<int64_t>(table_row) * args.table_width;
    const auto fetch = [&](int tile, int stage) {  // by lane 0
        const int position = tile * TILE;
        const int page = table[position / args.page_tokens - first_page];
        const int row = page * args.page_rows + args.layer_row + 2 * kv_head * args.page_tokens + position % args.page_tokens;
        uint8_t* plane = ring + stage * 2 * PLANE_BYTES;
        ptx::mbarrier_arrive_expect(&full[stage], 2 * PLANE_BYTES);
        ptx::tensor_copy(plane, &args.cache, 0, row, &full[stage]);
        ptx::tensor_copy(plane + PLANE_BYTES, &args.cache, 0, row + args.page_tokens, &full[stage]);
    };
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            if (work.first + i * WARPS < work.last) fetch(work.first + i * WARPS, i);
        }
    }
    uint32_t q[4][2];
    load_queries<CACHE>(args, sequence, kv_head, q);
    int stage = 0;
    uint32_t phase = 0;
    for (int tile = work.first; tile < work.last; tile += WARPS) {
        const int from = max(work.begin - tile * TILE, 0), to = min(work.end - tile * TILE, TILE);
        uint8_t* plane = ring + stage * 2 * PLANE_BYTES;
        ptx::mbarrier_wait(&full[stage], phase);
        if (from > 0 || to < TILE) {
            // Values outside may be anything, a NaN too, which a weight of zero would not silence.
            if (lane < from || lane >= to) {
                uint4* row = reinterpret_cast<uint4*>(plane + PLANE_BYTES + lane * ROW_BYTES<CACHE>);
#pragma unroll
                for (int i = 0; i < ROW_BYTES<CACHE> / 16; ++i) row[i] = make_uint4(0, 0, 0, 0);
            }
            ptx::fence_async_shared();  // the copy engine writes this stage next
            __syncwarp();
        }
        add_tile<CACHE>(q, ptx::shared_address(plane), ptx::shared_address(plane + PLANE_BYTES), from, to, state);
        __syncwarp();
        const int next = tile + STAGES * WARPS;
        if (lane == 0 && next < work.last) fetch(next, stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    state.sum += __shfl_xor_sync(~0u, state.sum, 1);
    state.sum += __shfl_xor_sync(~0u, state.sum, 2);
}

constexpr int PART = DIM + 4;  // m, l, 2 unused, sums

// Adds up `count` parts of 8 heads that lie `stride` floats apart; the sink counts as one more key, without a value, if it is
// to enter here. 128 threads: 16 for each head, 4 dims each. Returns m and l in `top` and `sum`.
template <bool IN_SHARED>
__device__ __forceinline__ float4 merge(const float* parts, int stride, int count, float sink, float& top, float& sum) {
    const int head = threadIdx.x / 16, piece = threadIdx.x % 16;
    const float* mine = parts + head * PART;
    const auto load2 = [](const float* p) {
        return IN_SHARED ? *reinterpret_cast<const float2*>(p) : __ldcg(reinterpret_cast<const float2*>(p));
    };
    const auto load4 = [](const float* p) {
        return IN_SHARED ? *reinterpret_cast<const float4*>(p) : __ldcg(reinterpret_cast<const float4*>(p));
    };
    // A head's 16 threads find its maximum together.
    top = sink;
    for (int i = piece; i < count; i += 16) top = fmaxf(top, load2(mine + i * stride).x);
#pragma unroll
    for (int lanes = 8; lanes > 0; lanes /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    sum = sink == -INFINITY ? 0.0f : ptx::exp2_approx(sink - top);
    float4 out = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
        const float2 state = load2(mine + i * stride);
        const float4 values = load4(mine + i * stride + 4 + piece * 4);
        const float weight = state.x == -INFINITY ? 0.0f : ptx::exp2_approx(state.x - top);
        sum = fmaf(state.y, weight, sum);
        out.x = fmaf(values.x, weight, out.x), out.y = fmaf(values.y, weight, out.y);
        out.z = fmaf(values.z, weight, out.z), out.w = fmaf(values.w, weight, out.w);
    }
    return out;
}

// Divides, and writes this thread's 4 dims of its head.
__device__ __forceinline__ void write(const DecodeAttentionArgs& args, int64_t pair, int group, const float4& out, float sum) {
    const int head = threadIdx.x / 16, piece = threadIdx.x % 16;
    if (head >= group) return;
    const float scale = 1.0f / sum;
    const uint2 packed = make_uint2(ptx::pack_bf16(out.x * scale, out.y * scale), ptx::pack_bf16(out.z * scale, out.w * scale));
    *reinterpret_cast<uint2*>(args.out + (pair * group + head) * DIM + piece * 4) = packed;
}

// This warp's part of the result, for `merge`.
template <Cache CACHE>
__device__ void put(const State& state, float* parts) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* mine = parts + (warp * GROUP + g) * PART;
    if (t == 0) mine[0] = state.max, mine[1] = state.sum;
    if constexpr (CACHE == Cache::BF16) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            *reinterpret_cast<float2*>(mine + 4 + n * 8 + 2 * t) = make_float2(state.out[n][0], state.out[n][1]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float *even = state.out[2 * j], *odd = state.out[2 * j + 1];
            *reinterpret_cast<float4*>(mine + 4 + j * 16 + 4 * t) = make_float4(even[0], odd[0], even[1], odd[1]);
        }
    }
}

template <Cache CACHE>
__device__ __forceinline__ void run(const DecodeAttentionArgs& args) {
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ uint64_t full[WARPS][STAGES];
    __shared__ bool is_last;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int kv_head = blockIdx.y, sequence = blockIdx.z, splits = gridDim.x;
    uint8_t* aligned = shared + (-ptx::shared_address(shared) & 1023);
    if (lane == 0) {
        for (int i = 0; i < STAGES; ++i) ptx::mbarrier_init(&full[warp][i], 1);
        ptx::fence_barrier_init();
    }
    __syncwarp();
    ptx::launch_dependents();
    ptx::grid_dependency_wait();

    State state;
    const Work work = work_of(args, sequence);
    attend<CACHE>(args, sequence, kv_head, work, aligned + warp * STAGES * 2 * PLANE_BYTES<CACHE>, full[warp], state);

    // The warps' parts meet in shared memory; every copy into it has been waited for.
    float* parts = reinterpret_cast<float*>(aligned);
    __syncthreads();
    put<CACHE>(state, parts);
    __syncthreads();

    const int group = args.q_heads / args.kv_heads, head = threadIdx.x / 16, piece = threadIdx.x % 16;
    const int64_t pair = static_cast<int64_t>(sequence) * args.kv_heads + kv_head;
    const float sink = head < group ? __bfloat162float(args.sinks[kv_head * group + head]) * ptx::LOG2E : 0.0f;
    float top, sum;
    const float4 block_out = merge<true>(parts, GROUP * PART, WARPS, splits == 1 ? sink : -INFINITY, top, sum);
    if (splits == 1) {
        write(args, pair, group, block_out, sum);
        return;
    }
    float* block_parts = args.partials + pair * splits * GROUP * PART;
    float* part = block_parts + (blockIdx.x * GROUP + head) * PART;
    if (piece == 0) __stcg(reinterpret_cast<float2*>(part), make_float2(top, sum));
    __stcg(reinterpret_cast<float4*>(part + 4 + piece * 4), block_out);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&args.counters[pair], 1u) == static_cast<uint32_t>(splits - 1);
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) args.counters[pair] = 0;
    const float4 out = merge<false>(block_parts, GROUP * PART, splits, sink, top, sum);
    write(args, pair, group, out, sum);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
    decode_attention(const __grid_constant__ DecodeAttentionArgs args) {
    run<Cache::BF16>(args);
}
extern "C" __global__ void __launch_bounds__(WARPS * 32, 4)
    decode_attention_e4m3(const __grid_constant__ DecodeAttentionArgs args) {
    run<Cache::E4M3>(args);
}
