// logits[t, e] = sum_k x[t, k] * w[e, k] + b[e], f32 sums;  experts[t] = the TOP largest, lowest index among equals, descending;
// weights[t] = softmax over those alone. In bf16 mode, as published, logits are rounded to bf16 before they are compared and
// weights after the softmax; in f32 mode neither is.
//
// x [tokens, k] bf16, w [experts, k] bf16, b [experts] bf16; experts <= 128, k a multiple of 32.
// A cluster of 6 blocks takes 8 tokens at a time and splits k (2880 = 6 x 15 x 32), since for few tokens latency is all there is. A
// warp takes 16 experts (and a share of the block's k when there are fewer than 128): m16n8k16 with the experts as rows, operands
// straight from global memory, k permuted alike on both sides so that a lane loads 16 bytes. The weights do not depend on the
// preceding kernel: a warp holds its part in registers before it waits, and keeps it for all tokens. Block 0 adds the partial
// logits in order of rank and finds the top: a warp a token. Up to 8 tokens are one cluster's, whose block 0 can then do what dispatch.cu
// does as well: which token goes where. Tokens that only fill a batch up choose expert -1, which no rank has. Shared memory: 8 KB.
#include "../ptx/order.cuh"
#include "../rows/rows.cuh"

struct RouterArgs {
    const __nv_bfloat16* x;
    const __nv_bfloat16* weight;
    const __nv_bfloat16* bias;
    int32_t* experts;      // [tokens, top]
    float* weights;        // [tokens, top]
    float* logits;         // [tokens, num_experts] unrounded, or null
    int32_t tokens;
    int32_t num_experts;
    int32_t k;
    int32_t top;           // at most 8
    int32_t round_bf16;
    int32_t first_expert;  // of this rank
    int32_t* slot;         // [tokens, top], as in dispatch.cu with the rest; null: no dispatch
    int32_t* gather;
    int32_t* offsets;
    int4* tiles;
    int32_t* num_tiles;
    const int32_t* present;  // [tokens], 0 for tokens that choose nothing: expert -1; null: all choose
    int32_t local_experts; // of this rank
    int32_t padding;
};
static_assert(sizeof(RouterArgs) == 128);

namespace {

constexpr int CLUSTER = 6;
constexpr int WARPS = 8;
constexpr int TOKENS = 8;          // of a cluster
constexpr int MAX_EXPERTS = 128;

// By one warp. `logit_of(expert)` is the token's unrounded logit. Returns its lane's expert, if lane < top.
template <class LogitOf>
__device__ int choose(const RouterArgs& args, int token, LogitOf logit_of) {
    const int lane = threadIdx.x % 32;
    const bool chooses = !args.present || args.present[token] != 0;
    float value[MAX_EXPERTS / 32];
    uint64_t key[MAX_EXPERTS / 32];
#pragma unroll
    for (int i = 0; i < MAX_EXPERTS / 32; ++i) {
        const int expert = lane + 32 * i;
        key[i] = 0;
        if (expert >= args.num_experts) continue;
        value[i] = logit_of(expert);
        if (args.round_bf16) value[i] = __bfloat162float(__float2bfloat16(value[i]));
        key[i] = ptx::order_key(value[i], expert);
    }
    float mine = 0.0f, top_logit = 0.0f;  // lane j keeps the j-th
    int winner = 0;
    for (int j = 0; j < args.top; ++j) {
        uint64_t best = 0;
#pragma unroll
        for (int i = 0; i < MAX_EXPERTS / 32; ++i) best = max(best, key[i]);
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) best = max(best, __shfl_xor_sync(~0u, best, lanes));
        const int expert = ptx::key_number(best);
        float logit = 0.0f;
#pragma unroll
        for (int i = 0; i < MAX_EXPERTS / 32; ++i) {
            if (key[i] == best) key[i] = 0, logit = value[i];
        }
        logit = __shfl_sync(~0u, logit, expert % 32);
        if (j == 0) top_logit = logit;
        if (lane == j) mine = logit, winner = expert;
    }
    const float weight = lane < args.top ? expf(mine - top_logit) : 0.0f;
    float share = weight / rows::warp_sum(weight);
    if (args.round_bf16) share = __bfloat162float(__float2bfloat16(share));
    if (!chooses) winner = -1, share = 0.0f;
    if (lane < args.top) {
        args.experts[token * args.top + lane] = winner;
        args.weights[token * args.top + lane] = share;
    }
    return winner;
}

// Orders the pairs of up to 8 tokens by expert, then by token, as dispatch.cu does for many. A pair's place is the number of pairs
// before it, which its thread counts. An expert has at most as many slots as there are tokens: one tile.
__device__ void dispatch(const RouterArgs& args, const int* experts) {
    const int pairs = args.tokens * args.top, i = threadIdx.x;
    const auto local = [&](int pair) {
        const int expert = experts[pair] - args.first_expert;
        return expert >= 0 && expert < args.local_experts ? expert : -1;
    };
    if (i < 64) {  // two warps
        uint32_t visited[MAX_EXPERTS / 32] = {};
        for (int j = i % 32; j < pairs; j += 32) {
            const int expert = local(j);
#pragma unroll
            for (int w = 0; w < MAX_EXPERTS / 32; ++w) visited[w] |= expert >> 5 == w ? 1u << (expert & 31) : 0;
        }
        const int mine = i < pairs ? local(i) : -1;
        int tile = 0, tiles = 0;
#pragma unroll
        for (int w = 0; w < MAX_EXPERTS / 32; ++w) {
            visited[w] = __reduce_or_sync(~0u, visited[w]);
            const int below = mine - 32 * w;  // experts of this word before mine
            tile += __popc(below <= 0 ? 0 : below >= 32 ? visited[w] : visited[w] & ((1u << below) - 1));
            tiles += __popc(visited[w]);
        }
        int slot = 0, first_slot = 0, count = 0;
        for (int j = 0; j < pairs; ++j) {
            const int other = local(j);
            if (other < 0) continue;
            first_slot += other < mine;
            slot += other == mine && j < i;
            count += other == mine;
        }
        if (i < pairs) args.slot[i] = mine < 0 ? -1 : first_slot + slot;
        if (mine >= 0) args.gather[first_slot + slot] = i / args.top;
        if (mine >= 0 && slot == 0) args.tiles[tile] = make_int4(mine, first_slot, count, 0);
        if (i == 0) *args.num_tiles = tiles;
    } else if (i - 64 <= args.local_experts) {
        int before = 0;
        for (int j = 0; j < pairs; ++j) before += static_cast<uint32_t>(local(j)) < static_cast<uint32_t>(i - 64);
        args.offsets[i - 64] = before;
    }
}

// This warp's part of the logits of 16 experts and 8 tokens, into its place in `partial`. `x`: this lane's part of its token.
template <int BLOCKS>
__device__ void multiply(const uint4 (&weight)[2][BLOCKS], const __nv_bfloat16* x, int count, float (*partial)[TOKENS]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    uint4 columns[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        columns[b] = make_uint4(0, 0, 0, 0);
        if (b < count) columns[b] = *reinterpret_cast<const uint4*>(x + b * 32);
    }
    float acc[2][4] = {};  // two chains
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const uint4 low = weight[0][b], high = weight[1][b];
        const uint32_t a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
        ptx::mma_bf16(acc[0], a0, columns[b].x, columns[b].y);
        ptx::mma_bf16(acc[1], a1, columns[b].z, columns[b].w);
    }
    partial[g][2 * t] = acc[0][0] + acc[1][0], partial[g][2 * t + 1] = acc[0][1] + acc[1][1];
    partial[g + 8][2 * t] = acc[0][2] + acc[1][2], partial[g + 8][2 * t + 1] = acc[0][3] + acc[1][3];
}

// BLOCKS: 32-blocks of k that a warp takes at most.
template <int BLOCKS>
__device__ void route(const RouterArgs& args) {
    __shared__ float partial[WARPS * 16][TOKENS];  // [k share][expert][token], later the whole logits
    __shared__ float sums[MAX_EXPERTS][TOKENS];
    __shared__ int picks[TOKENS * 8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = ptx::cluster_rank();

    const int strips = (args.num_experts + 15) / 16, shares = WARPS / strips;
    const int strip = warp % strips, share = warp / strips;
    const int blocks = args.k / 32, parts = CLUSTER * shares, part = rank * shares + share;
    const int first = blocks * part / parts, count = share < shares ? blocks * (part + 1) / parts - first : 0;
    uint4 weight[2][BLOCKS];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int expert = strip * 16 + g + 8 * half;
        const __nv_bfloat16* row = args.weight + static_cast<int64_t>(expert) * args.k + first * 32 + 8 * t;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            weight[half][b] = make_uint4(0, 0, 0, 0);
            if (expert < args.num_experts && b < count) weight[half][b] = *reinterpret_cast<const uint4*>(row + b * 32);
        }
    }

    ptx::launch_dependents();
    ptx::grid_dependency_wait();
    for (int first_token = blockIdx.x / CLUSTER * TOKENS; first_token < args.tokens;
         first_token += gridDim.x / CLUSTER * TOKENS) {
        const int token = min(first_token + g, args.tokens - 1);
        const __nv_bfloat16* x = args.x + static_cast<int64_t>(token) * args.k + first * 32 + 8 * t;
        if (share < shares) multiply(weight, x, count, partial + (share * strips + strip) * 16);
        __syncthreads();
        for (int i = threadIdx.x; i < strips * 16 * TOKENS; i += WARPS * 32) {
            float sum = 0.0f;
            for (int s = 0; s < shares; ++s) sum += partial[s * strips * 16 + i / TOKENS][i % TOKENS];
            sums[i / TOKENS][i % TOKENS] = sum;
        }
        ptx::cluster_barrier();
        if (rank == 0) {
#pragma unroll 2
            for (int i = threadIdx.x; i < args.num_experts * TOKENS; i += WARPS * 32) {
                const int expert = i / TOKENS, column = i % TOKENS;
                float logit = __bfloat162float(args.bias[expert]);
#pragma unroll
                for (int r = 0; r < CLUSTER; ++r) logit += ptx::read_cluster(&sums[expert][column], r);
                partial[expert][column] = logit;
            }
            __syncthreads();
            if (first_token + warp < args.tokens) {
                const int expert = choose(args, first_token + warp, [&](int expert) {
                    const float logit = partial[expert][warp];
                    const int64_t at = static_cast<int64_t>(first_token + warp) * args.num_experts + expert;
                    if (args.logits) args.logits[at] = logit;
                    return logit;
                });
                if (lane < args.top) picks[warp * args.top + lane] = expert;
            }
            if (args.slot) {
                __syncthreads();
                dispatch(args, picks);
            }
        }
        ptx::cluster_barrier();  // a block's sums stay until block 0 has read them
    }
}

}  // namespace

#define ROUTER(name, blocks)                                                                         \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WARPS * 32, 1)      \
        name(const __grid_constant__ RouterArgs args) {                                              \
        route<blocks>(args);                                                                         \
    }
ROUTER(router_4, 4)
ROUTER(router_15, 15)

// The choice alone, for logits that are already there: many tokens take them from tile_gemm. A warp a token.
extern "C" __global__ void __launch_bounds__(WARPS * 32) choose_experts(const __grid_constant__ RouterArgs args) {
    ptx::launch_dependents();
    ptx::grid_dependency_wait();
    const int token = blockIdx.x * WARPS + threadIdx.x / 32;
    if (token >= args.tokens) return;
    const float* logits = args.logits + static_cast<int64_t>(token) * args.num_experts;
    choose(args, token, [&](int expert) { return logits[expert]; });
}
