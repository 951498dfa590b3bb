// Causal attention of a run of new tokens of one sequence over its cached keys, their own included, with sinks:
//   out[i, h] = sum_j 2^(s_j - m) v_j / (sum_j 2^(s_j - m) + 2^(sink_h - m)),   s_j = log2(e) * q[i, h] . k_j / sqrt(64)
// over the keys max(0, p - window + 1) <= j <= p of a query at position p = start + i; the sink is not scaled.
//
//   q, out  [tokens, q_heads, 64] bf16, q rotated;  sinks [q_heads] bf16
//   cache   rows of 64 bf16 as the tensor map sees them: [page][layer][kv head][K, V][token]
//
// Bound by the tensor cores and, head dimension 64 being small, as much by exponentials; in long prompts by the card's power. A block =
// 192 rows of (token, query head) that share a kv head, 24 tokens for groups of 8: each key is loaded once for all of them. Three
// consumer warpgroups of 64 rows take turns at the tensor cores: one multiplies, O += P V with P in registers and then the next tile's
// S = Q K^T with Q in shared memory, while the others compute exponentials. A producer warp keeps 5 tiles of 128 keys and values in flight.
//
// Weights 2^(s - m) need no true maximum m, only one for which nothing overflows. So m is that of a row's first tile (`soften`), and
// later tiles are taken by it as they are (`soften_on`), without looking for a maximum or scaling what is there; where a sum then exceeds
// 2^64, the tile is done again, with its maximum.
//
// Persistent, longest rows first; the producer runs ahead into the next rows. Shared memory: 5 stages of 32 KB, and 24 KB of queries.
#include "../ptx/wgmma.cuh"

struct PrefillAttentionArgs {
    ptx::TensorMap cache;
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
    int32_t kv_heads;
    int32_t group_bits;    // log2 of the query heads that share a kv head
    int32_t tiles;         // of 192 rows, of a kv head
    int32_t window;        // keys visible; 0: all
};
static_assert(sizeof(PrefillAttentionArgs) == 256);

namespace {

constexpr int DIM = 64, KEYS = 128, WARPGROUPS = 3, ROWS = 64 * WARPGROUPS, STAGES = 5;
constexpr int CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = 160;
constexpr int PLANE_BYTES = KEYS * DIM * 2, STAGE_BYTES = 2 * PLANE_BYTES, QUERY_BYTES = 64 * DIM * 2;  // a warpgroup's
constexpr float SCALE = ptx::LOG2E / 8.0f;
constexpr float SUM_MAX = 18446744073709551616.0f;  // 2^64
// Named barriers: of all consumers, of each warpgroup's turn, and of each warpgroup.
constexpr int ALL = 1, TURN = 2, OWN = TURN + WARPGROUPS;

struct Barriers {
    uint64_t full[STAGES], empty[STAGES];
};

// Tokens of a tile of rows.
__device__ __forceinline__ int tile_tokens(const PrefillAttentionArgs& args) { return ROWS >> args.group_bits; }

// The query head of a tile's row `row`.
__device__ __forceinline__ int head_of(const PrefillAttentionArgs& args, int kv_head, int row) {
    return (kv_head << args.group_bits) + (row & ((1 << args.group_bits) - 1));
}

// Where it is in q and out.
__device__ __forceinline__ int64_t offset_of(const PrefillAttentionArgs& args, int kv_head, int token, int row) {
    return ((static_cast<int64_t>(token) * args.kv_heads << args.group_bits) + head_of(args, kv_head, row)) * DIM;
}

// One item of work: 192 rows, the keys that they may see, and the tiles that hold those.
struct Span {
    int kv_head, first_token, first_key, end_key, first_tile, end_tile;

    __device__ Span(const PrefillAttentionArgs& args, int item) {
        kv_head = item % args.kv_heads;
        first_token = (args.tiles - 1 - item / args.kv_heads) * tile_tokens(args);
        first_key = args.window > 0 ? max(0, args.start + first_token - args.window + 1) : 0;
        end_key = args.start + min(first_token + tile_tokens(args), args.tokens);
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
    int position;  // of the first one's query; the last key that it sees
    float max[2] = {-INFINITY, -INFINITY};  // of scores, when it was last looked for
    float sum[2] = {0.0f, 0.0f};

    __device__ static int row(int half) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half; }

    __device__ Rows(const PrefillAttentionArgs& args, const Span& span) {
        position = args.start + span.first_token + (row(0) >> args.group_bits);
    }
};

// Brings this warpgroup's queries into shared memory, swizzled by 128 bytes.
__device__ void load_queries(const PrefillAttentionArgs& args, const Span& span, int warpgroup, uint8_t* queries) {
    constexpr int CHUNKS = DIM / 8;  // of 8 values, of a row
    ptx::named_barrier(OWN + warpgroup, 128);  // nobody multiplies by the old ones any more
#pragma unroll
    for (int i = 0; i < 64 * CHUNKS / 128; ++i) {
        const int at = i * 128 + threadIdx.x % 128, local = at / CHUNKS, chunk = at % CHUNKS, row = warpgroup * 64 + local;
        const int token = min(span.first_token + (row >> args.group_bits), args.tokens - 1);
        const __nv_bfloat16* source = args.q + offset_of(args, span.kv_head, token, row) + chunk * 8;
        *reinterpret_cast<uint4*>(queries + local * DIM * 2 + (chunk ^ local % 8) * 16) = *reinterpret_cast<const uint4*>(source);
    }
    ptx::fence_async_shared();
    ptx::named_barrier(OWN + warpgroup, 128);
}

// Lets the sink into the sums, divides, writes.
__device__ void write_rows(const PrefillAttentionArgs& args, const Span& span, const Rows& rows, const float (&out)[DIM / 2]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = rows.sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int row = Rows::row(half), token = span.first_token + (row >> args.group_bits);
        if (token >= args.tokens) continue;
        const float sink = __bfloat162float(args.sinks[head_of(args, span.kv_head, row)]) * ptx::LOG2E, own = rows.max[half] * SCALE;
        const float top = fmaxf(own, sink), weight = ptx::exp2_approx(own - top);
        const float scale = weight / (sum * weight + ptx::exp2_approx(sink - top));
        uint32_t* words = reinterpret_cast<uint32_t*>(args.out + offset_of(args, span.kv_head, token, row));
#pragma unroll
        for (int n = 0; n < DIM / 8; ++n) {
            words[n * 4 + t] = ptx::pack_bf16(out[4 * n + 2 * half] * scale, out[4 * n + 2 * half + 1] * scale);
        }
    }
}

// Starts S = Q K^T, once the tile's keys and values have landed.
__device__ __forceinline__ void start_scores(float (&s)[KEYS / 2], uint32_t queries, uint32_t stage, uint64_t* full,
                                             uint32_t phase) {
    ptx::mbarrier_wait(full, phase);
    const uint64_t rows = ptx::matrix_descriptor(queries), keys = ptx::matrix_descriptor(stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) ptx::wgmma_shared(s, rows + 2 * step, keys + 2 * step, step > 0);
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

// Scores to weights of the next product by a maximum that includes theirs, which `rows` gets; returns in `rescale` what earlier sums must
// be multiplied by. Keys that a row does not see have no weight. `first_key`: position of the tile's first.
__device__ __forceinline__ void soften(const PrefillAttentionArgs& args, const float (&s)[KEYS / 2], int first_key, Rows& rows,
                                       float (&rescale)[2], uint32_t (&p)[KEYS / 16][4]) {
    const uint32_t window = args.window > 0 ? args.window : INT32_MAX;
    const int first = rows.position - first_key - static_cast<int>(threadIdx.x % 4) * 2;
    const int ahead[2] = {first, first + (8 >> args.group_bits)};  // of the lane's first key
    const auto is_seen = [&](int i) {
        return static_cast<uint32_t>(ahead[i / 2 % 2] - (i / 4 * 8 + i % 2)) < window;  // how far the key lies behind the query
    };
    float top[2] = {rows.max[0], rows.max[1]};
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
        const int half = i / 2 % 2;
        if (is_seen(i)) top[half] = fmaxf(top[half], s[i]);
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
    for (int i = 0; i < KEYS / 2; i += 2) {
        const int half = i / 2 % 2;
        const float low = is_seen(i) ? ptx::exp2_approx(fmaf(s[i], SCALE, -offset[half])) : 0.0f;
        const float high = is_seen(i + 1) ? ptx::exp2_approx(fmaf(s[i + 1], SCALE, -offset[half])) : 0.0f;
        rows.sum[half] += low, rows.sum[half] += high;
        p[i / 8][i / 2 % 4] = ptx::pack_bf16(low, high);
    }
}

// The same by the maximum that is there, where every row sees every key. False, and nothing has changed, if a sum became too large.
__device__ __forceinline__ bool soften_on(const float (&s)[KEYS / 2], Rows& rows, uint32_t (&p)[KEYS / 16][4]) {
    const float offset[2] = {rows.max[0] * SCALE, rows.max[1] * SCALE};
    float sum[2] = {rows.sum[0], rows.sum[1]};
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 2) {
        const int half = i / 2 % 2;
        const float low = ptx::exp2_approx(fmaf(s[i], SCALE, -offset[half]));
        const float high = ptx::exp2_approx(fmaf(s[i + 1], SCALE, -offset[half]));
        sum[half] += low, sum[half] += high;
        p[i / 8][i / 2 % 4] = ptx::pack_bf16(low, high);
    }
    if (__any_sync(~0u, sum[0] > SUM_MAX || sum[1] > SUM_MAX)) return false;
    rows.sum[0] = sum[0], rows.sum[1] = sum[1];
    return true;
}

// Values of keys outside the sequence may be anything, a NaN too, which a weight of zero would not silence.
__device__ void clear_outside(uint8_t* values, int tile, const Span& span) {
    const int row = threadIdx.x, key = tile * KEYS + row;
    if (row < KEYS && (key < span.first_key || key >= span.end_key)) {
        uint4* chunks = reinterpret_cast<uint4*>(values + row * DIM * 2);
#pragma unroll
        for (int i = 0; i < DIM / 8; ++i) chunks[i] = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_async_shared();
    ptx::named_barrier(ALL, CONSUMERS);
}

// Turns at the tensor cores: a warpgroup enqueues a tile's products when the one before it has enqueued its own.
__device__ __forceinline__ void await_turn(int warpgroup) { ptx::named_barrier(TURN + warpgroup, 256); }
__device__ __forceinline__ void pass_turn(int warpgroup) {
    ptx::named_barrier_arrive(TURN + (warpgroup + 1 == WARPGROUPS ? 0 : warpgroup + 1), 256);
}

__device__ void consume(const PrefillAttentionArgs& args, const Span& span, int warpgroup, int& stage, uint32_t& phase,
                        uint8_t* stages, Barriers& barriers) {
    uint8_t* own_queries = stages + STAGES * STAGE_BYTES + warpgroup * QUERY_BYTES;
    const uint32_t shared = ptx::shared_address(stages), queries = ptx::shared_address(own_queries);
    load_queries(args, span, warpgroup, own_queries);
    Rows rows(args, span);
    uint32_t p[KEYS / 16][4];
    float s[KEYS / 2], out[DIM / 2];
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) out[i] = 0.0f;
    bool has_max = false;  // all rows of the warp
    const auto weigh = [&](int tile) {
        // Whether some row of the block may not see some key of the tile.
        const bool late = (tile + 1) * KEYS - 1 > args.start + span.first_token;
        const bool early = args.window > 0 && tile * KEYS < span.end_key - args.window;
        if (has_max && !late && !early && soften_on(s, rows, p)) return;
        float rescale[2];
        soften(args, s, tile * KEYS, rows, rescale, p);
        has_max = __all_sync(~0u, rows.max[0] > -INFINITY && rows.max[1] > -INFINITY);
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) out[i] *= rescale[i / 2 % 2];
    };
    await_turn(warpgroup);
    start_scores(s, queries, shared + stage * STAGE_BYTES, &barriers.full[stage], phase);
    pass_turn(warpgroup);
    ptx::wgmma_wait_all();
    for (int tile = span.first_tile; tile < span.end_tile; ++tile) {
        weigh(tile);
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) ptx::pin(p[i / 4][i % 4]);
        const int this_stage = stage;
        if (tile * KEYS < span.first_key || (tile + 1) * KEYS > span.end_key) {
            clear_outside(stages + this_stage * STAGE_BYTES + PLANE_BYTES, tile, span);
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
        await_turn(warpgroup);
        start_values(out, p, shared + this_stage * STAGE_BYTES);
        if (tile + 1 < span.end_tile) {
            start_scores(s, queries, shared + stage * STAGE_BYTES, &barriers.full[stage], phase);
        }
        pass_turn(warpgroup);
        ptx::wgmma_wait_all();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&barriers.empty[this_stage]);
    }
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) ptx::pin(out[i]);
    write_rows(args, span, rows, out);
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
    const int items = args.tiles * args.kv_heads;
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
        // The same for all lanes, and the compiler knows: descriptors are then made by the uniform unit.
        const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
        if (warpgroup == WARPGROUPS - 1) pass_turn(warpgroup);  // the first begins
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            consume(args, Span(args, item), warpgroup, stage, phase, stages, barriers);
        }
    }
}
