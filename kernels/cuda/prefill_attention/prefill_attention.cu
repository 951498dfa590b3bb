// Causal attention of a run of new tokens of one sequence over its cached keys, their own included, with sinks:
//   out[i, h] = sum_j 2^(s_j - m) v_j / (sum_j 2^(s_j - m) + 2^(sink_h - m)),   s_j = log2(e) * q[i, h] . k_j / sqrt(64)
// over the keys max(0, p - window + 1) <= j <= p of a query at position p = start + i; the sink is not scaled.
//
//   q, out  [tokens, q_heads, 64] bf16, q rotated;  sinks [q_heads] bf16
//   cache   rows of 64 bf16 as the tensor map sees them: [page][layer][kv head][K, V][token]
//
// Bound by the tensor cores and, head dimension 64 being small, as much by exponentials. A block = 128 rows of (token, query head)
// that share a kv head, 16 tokens for groups of 8: each key is loaded once for all of them. Two consumer warpgroups of 64 rows, so
// that one computes exponentials while the other multiplies; a producer warp keeps 5 tiles of 128 keys and values in flight. In a
// warpgroup, the scores of the next tile are under way while the current one's exponentials are computed: S = Q K^T with Q in
// registers, O += P V with P in registers.
//
// Persistent, longest rows first; the producer runs ahead into the next rows. Shared memory: 5 stages of 32 KB.
#include "../ptx/block_reduce.cuh"
#include "../ptx/wgmma.cuh"

struct alignas(128) TensorMap {
    uint8_t bytes[128];
};

struct PrefillAttentionArgs {
    TensorMap cache;
    const __nv_bfloat16* q;
    const __nv_bfloat16* sinks;
    __nv_bfloat16* out;
    const int32_t* pages;  // of the sequence, in order of positions
    int32_t tokens;
    int32_t start;         // position of the first token
    int32_t first_page;    // logical page of pages[0]
    int32_t page_rows;     // rows of a page in the tensor map
    int32_t layer_row;     // first row of the layer within a page
    int32_t page_tokens;
    int32_t box_tokens;    // rows of the tensor map's box; divides page_tokens and 128
    int32_t q_heads;
    int32_t kv_heads;
    int32_t window;        // keys visible; 0: all
};
static_assert(sizeof(PrefillAttentionArgs) == 256);

namespace {

constexpr int DIM = 64, KEYS = 128, ROWS = 128, STAGES = 5;
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int PLANE_BYTES = KEYS * DIM * 2, STAGE_BYTES = 2 * PLANE_BYTES;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float SCALE = LOG2E / 8.0f;

struct Barriers {
    uint64_t full[STAGES], empty[STAGES];
};

// One item of work: 128 rows, the keys that they may see, and the tiles that hold those.
struct Span {
    int kv_head, first_token, first_key, end_key, first_tile, end_tile;

    __device__ static int count(const PrefillAttentionArgs& args) {
        const int tile_tokens = ROWS * args.kv_heads / args.q_heads;
        return (args.tokens + tile_tokens - 1) / tile_tokens * args.kv_heads;
    }
    __device__ Span(const PrefillAttentionArgs& args, int item) {
        const int tile_tokens = ROWS * args.kv_heads / args.q_heads;
        kv_head = item % args.kv_heads;
        const int tile = (count(args) - 1 - item) / args.kv_heads;
        first_token = tile * tile_tokens;
        first_key = args.window > 0 ? max(0, args.start + first_token - args.window + 1) : 0;
        end_key = args.start + min(first_token + tile_tokens, args.tokens);
        first_tile = first_key / KEYS, end_tile = (end_key + KEYS - 1) / KEYS;
    }
};

// By one warp: lane b copies box b of a tile's keys and values. Boxes without a visible key are left out.
__device__ void produce(const PrefillAttentionArgs& args, const Span& span, int& stage, uint32_t& phase, uint8_t* stages,
                        Barriers& barriers) {
    const int lane = threadIdx.x % 32, boxes = KEYS / args.box_tokens;
    const uint32_t box_bytes = args.box_tokens * DIM * 2;
    for (int tile = span.first_tile; tile < span.end_tile; ++tile) {
        const int position = tile * KEYS + lane * args.box_tokens;
        const bool used = lane < boxes && position < span.end_key && position + args.box_tokens > span.first_key;
        int row = 0;
        if (used) {
            const int page = args.pages[position / args.page_tokens - args.first_page];
            row = page * args.page_rows + args.layer_row + 2 * span.kv_head * args.page_tokens + position % args.page_tokens;
        }
        const int count = __popc(__ballot_sync(~0u, used));
        if (lane == 0) {
            ptx::mbarrier_wait(&barriers.empty[stage], phase ^ 1);
            ptx::mbarrier_arrive_expect(&barriers.full[stage], count * 2 * box_bytes);
        }
        __syncwarp();
        if (used) {
            uint8_t* keys = stages + stage * STAGE_BYTES + lane * box_bytes;
            ptx::tensor_copy(keys, &args.cache, 0, row, &barriers.full[stage]);
            ptx::tensor_copy(keys + PLANE_BYTES, &args.cache, 0, row + args.page_tokens, &barriers.full[stage]);
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
}

// What a lane holds of two rows (g and g + 8 of its warp's 16).
struct Rows {
    int64_t at[2];  // of the row's head in q and out
    bool used[2];
    int head[2];
    int position[2];  // of the query; the last key that it sees
    int first_key[2];
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

    __device__ Rows(const PrefillAttentionArgs& args, const Span& span) {
        const int group = args.q_heads / args.kv_heads;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
            const int token = span.first_token + row / group;
            used[half] = token < args.tokens;
            head[half] = span.kv_head * group + row % group;
            position[half] = args.start + token;
            first_key[half] = args.window > 0 ? position[half] - args.window + 1 : 0;
            at[half] = (static_cast<int64_t>(min(token, args.tokens - 1)) * args.q_heads + head[half]) * DIM;
        }
    }
};

__device__ void load_queries(const PrefillAttentionArgs& args, const Rows& rows, uint32_t (&q)[4][4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(args.q + rows.at[half]);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            q[step][half] = words[step * 8 + t], q[step][half + 2] = words[step * 8 + 4 + t];
        }
    }
}

// Lets the sink into the sums, divides, writes.
__device__ void write_rows(const PrefillAttentionArgs& args, const Rows& rows, const float (&out)[DIM / 2]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = rows.sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (!rows.used[half]) continue;
        const float sink = __bfloat162float(args.sinks[rows.head[half]]) * LOG2E, own = rows.max[half] * SCALE;
        const float top = fmaxf(own, sink), weight = ptx::exp2_approx(own - top);
        const float scale = weight / (sum * weight + ptx::exp2_approx(sink - top));
        uint32_t* words = reinterpret_cast<uint32_t*>(args.out + rows.at[half]);
#pragma unroll
        for (int n = 0; n < DIM / 8; ++n) {
            words[n * 4 + t] = ptx::pack_bf16(out[4 * n + 2 * half] * scale, out[4 * n + 2 * half + 1] * scale);
        }
    }
}

// Starts S = Q K^T, once the tile's keys and values have landed.
__device__ __forceinline__ void start_scores(float (&s)[KEYS / 2], const uint32_t (&q)[4][4], uint32_t stage, uint64_t* full,
                                             uint32_t phase) {
    ptx::mbarrier_wait(full, phase);
    const uint64_t keys = ptx::matrix_descriptor(stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) ptx::wgmma<KEYS>(s, q[step], keys + 2 * step, step > 0);
    ptx::wgmma_commit();
}

// Starts O += P V.
__device__ __forceinline__ void start_values(float (&out)[DIM / 2], const uint32_t (&p)[KEYS / 16][4], uint32_t stage) {
    const uint64_t values = ptx::matrix_descriptor(stage + PLANE_BYTES);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) ptx::wgmma_rows_of_64(out, p[step], values + 128 * step);
    ptx::wgmma_commit();
}

// Scores to weights of the next product, in place; returns in `rescale` what earlier sums must be multiplied by. Few tiles have
// masked keys, and their comparisons would cost as much as all the rest: hence a version without.
template <bool MASKED>
__device__ __forceinline__ void soften(float (&s)[KEYS / 2], int tile, Rows& rows, float (&rescale)[2]) {
    const int t = threadIdx.x % 4;
    float top[2] = {rows.max[0], rows.max[1]};
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        const int half = i / 2 % 2;
        if constexpr (MASKED) {
            const int key = tile * KEYS + i / 4 * 8 + 2 * t + i % 2;
            if (key > rows.position[half] || key < rows.first_key[half]) s[i] = -INFINITY;
        }
        top[half] = fmaxf(top[half], s[i]);
    }
    float offset[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
        top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
        offset[half] = top[half] == -INFINITY ? 0.0f : top[half] * SCALE;  // no key seen yet: weights must be 0, not NaN
        rescale[half] = ptx::exp2_approx(rows.max[half] * SCALE - offset[half]);
        rows.max[half] = top[half];
        rows.sum[half] *= rescale[half];
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        const int half = i / 2 % 2;
        s[i] = ptx::exp2_approx(fmaf(s[i], SCALE, -offset[half]));
        rows.sum[half] += s[i];
    }
    // Here and not after the wait for the other product, which is what they are to run beside.
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) ptx::pin(s[i]);
}

__device__ __forceinline__ void pack_weights(const float (&s)[KEYS / 2], uint32_t (&p)[KEYS / 16][4]) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[step][i] = ptx::pack_bf16(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
    }
}

// Values of keys outside the sequence may be anything, a NaN too, which a weight of zero would not silence.
__device__ void clear_outside(uint8_t* values, int tile, const Span& span) {
    const int key = tile * KEYS + threadIdx.x / 2;
    if (key < span.first_key || key >= span.end_key) {
        uint4* half_row = reinterpret_cast<uint4*>(values + threadIdx.x * (DIM * 2 / 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) half_row[i] = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_async_shared();
    ptx::named_barrier(1, CONSUMERS);
}

__device__ void consume(const PrefillAttentionArgs& args, const Span& span, int& stage, uint32_t& phase, uint8_t* stages,
                        Barriers& barriers) {
    const uint32_t shared = ptx::shared_address(stages);
    Rows rows(args, span);
    uint32_t q[4][4], p[KEYS / 16][4];
    load_queries(args, rows, q);
    float s[KEYS / 2], out[DIM / 2], rescale[2];
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) out[i] = 0.0f;
    const auto weigh = [&](int tile) {
        // Whether some row of the block may not see some key of the tile.
        const bool late = (tile + 1) * KEYS - 1 > args.start + span.first_token;
        const bool early = args.window > 0 && tile * KEYS < span.end_key - args.window;
        if (late || early) {
            soften<true>(s, tile, rows, rescale);
        } else {
            soften<false>(s, tile, rows, rescale);
        }
    };
    const auto clear = [&](int tile) {
        if (tile * KEYS >= span.first_key && (tile + 1) * KEYS <= span.end_key) return;
        clear_outside(stages + stage * STAGE_BYTES + PLANE_BYTES, tile, span);
    };
    start_scores(s, q, shared + stage * STAGE_BYTES, &barriers.full[stage], phase);
    ptx::wgmma_wait_all();
    weigh(span.first_tile);
    const int last_tile = span.end_tile - 1;
    for (int tile = span.first_tile; tile < last_tile; ++tile) {
        clear(tile);
        pack_weights(s, p);
        const int this_stage = stage;
        if (++stage == STAGES) stage = 0, phase ^= 1;
        start_scores(s, q, shared + stage * STAGE_BYTES, &barriers.full[stage], phase);
        start_values(out, p, shared + this_stage * STAGE_BYTES);
        ptx::wgmma_wait<1>();  // the scores; exponentials run beside the other product
        weigh(tile + 1);
        ptx::wgmma_wait_all();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&barriers.empty[this_stage]);
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) out[i] *= rescale[i / 2 % 2];
    }
    clear(last_tile);
    pack_weights(s, p);
    start_values(out, p, shared + stage * STAGE_BYTES);
    ptx::wgmma_wait_all();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&barriers.empty[stage]);
    if (++stage == STAGES) stage = 0, phase ^= 1;
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) ptx::pin(out[i]);
    write_rows(args, rows, out);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_attention(const __grid_constant__ PrefillAttentionArgs args) {
    extern __shared__ uint8_t shared[];
    __shared__ Barriers barriers;
    uint8_t* stages = shared + (-ptx::shared_address(shared) & 1023);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            ptx::mbarrier_init(&barriers.full[i], 1);
            ptx::mbarrier_init(&barriers.empty[i], CONSUMERS / 32);
        }
        ptx::fence_barrier_init();
        ptx::prefetch_tensor_map(&args.cache);
    }
    __syncthreads();
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const int items = Span::count(args);
    int stage = 0;
    uint32_t phase = 0;
    if (threadIdx.x >= CONSUMERS) {
        ptx::give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x >= CONSUMERS + 32) return;
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            produce(args, Span(args, item), stage, phase, stages, barriers);
        }
    } else {
        ptx::take_registers<CONSUMER_REGISTERS>();
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            consume(args, Span(args, item), stage, phase, stages, barriers);
        }
    }
}
