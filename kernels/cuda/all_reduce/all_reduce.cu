// Sums a vector a token over the ranks of a group, one a GPU, through peer memory (NVLink), fused with what lies around it:
//
//   part_r[t, h] = bf16(values[t, h])  or  bf16(sum_j weight[t, j] * y[slot(t, j), h])      rank r's own (as in combine.cu)
//   sum[t, h]    = bf16(part_0 + part_1 + ..)                                               f32, in the order of ranks
//   residual[t, h] = bf16(residual + sum);   out[t, h] = bf16(rmsnorm(residual[t])[h] * w[h])      or only out = sum
//
// All ranks add the same numbers in the same order: they have the same bits. values, residual, out [tokens, hidden] bf16;
// y [slots, hidden] bf16; weight, slot [tokens, top]. Thread = 8 values of a token.
//
// Each rank has an inbox, [2 turns][ranks][tokens][hidden]; a rank pushes its part into the others' and waits for theirs in its
// own. A token's exchanges are numbered by `epochs`, which lives on the device so that graphs can be replayed; odd and even ones
// take turns. A part of exchange e overwrites that of e - 2: its sender has all parts of e - 1, so their senders had ended e - 2.
//
// `packets`, few tokens: block = one token; see exchange.cuh. Bound by latency: store, way, load.
// `bulk`, many tokens: data as they are, then a flag a token. Blocks, all of them resident, take tokens in turn and push two
// tokens ahead of the one that they wait for. Bound by NVLink.
// Nobody waits for ever: see Patience.
#include "../exchange/exchange.cuh"

using exchange::MAX_RANKS;
using exchange::MAX_THREADS;

struct AllReduceArgs {
    uint64_t* inboxes[MAX_RANKS];  // of each rank; bulk: bf16 under another name
    uint32_t* flags[MAX_RANKS];    // bulk: [2 turns][ranks][tokens], of each rank
    uint32_t* epochs;              // [tokens]
    uint32_t* host;                // see Patience, as `failed`
    uint32_t* failed;
    const __nv_bfloat16* values;   // null: the weighted sum
    const __nv_bfloat16* y;
    const float* weight;
    const int32_t* slot;
    __nv_bfloat16* residual;       // null: only the sum
    const __nv_bfloat16* norm_weight;
    __nv_bfloat16* out;
    int32_t rank;
    int32_t tokens;
    int32_t room;                  // tokens of an inbox
    int32_t hidden;
    int32_t top;
    float eps;
    uint32_t limit_ms;
    int32_t padding;
};
static_assert(sizeof(AllReduceArgs) == 240);

namespace {

// This rank's part of 8 values, as two words of four.
__device__ __forceinline__ uint4 own_part(const AllReduceArgs& args, int token, int first, bool used) {
    if (!used) return make_uint4(0, 0, 0, 0);
    if (args.values) {
        return *reinterpret_cast<const uint4*>(args.values + static_cast<int64_t>(token) * args.hidden + first);
    }
    return exchange::weighted_sum(args, token, first);
}

// What follows the sum. `norm_weight` and `residual` are this thread's 8 values of each.
__device__ __forceinline__ void finish(const AllReduceArgs& args, int token, int first, bool used, const uint4& sum,
                                       const uint4& norm_weight, const uint4& residual) {
    const int64_t at = static_cast<int64_t>(token) * args.hidden + first;
    if (!args.residual) {
        if (used) *reinterpret_cast<uint4*>(args.out + at) = sum;
        return;
    }
    const uint4 normed = exchange::add_norm(args, token, first, used, sum, norm_weight, residual);
    if (used) *reinterpret_cast<uint4*>(args.out + at) = normed;
}

__device__ __forceinline__ uint4 load_residual(const AllReduceArgs& args, int token, int first, bool used) {
    if (!used || !args.residual) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(args.residual + static_cast<int64_t>(token) * args.hidden + first);
}

template <int RANKS>
__device__ void packets(const AllReduceArgs& args) {
    const int token = blockIdx.x, first = threadIdx.x * 8;
    const bool used = first < args.hidden;
    uint4 norm_weight = make_uint4(0, 0, 0, 0);
    if (used && args.residual) norm_weight = *reinterpret_cast<const uint4*>(args.norm_weight + first);

    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const uint32_t epoch = args.epochs[token] + 1;
    const uint4 own = own_part(args, token, first, used);
    const int64_t turn = static_cast<int64_t>(epoch % 2) * RANKS;
    const int64_t place = (static_cast<int64_t>(token) * args.hidden + first) / 2;  // 4 words for 8 values
    const int64_t step = static_cast<int64_t>(args.room) * args.hidden / 2;
    if (used) {
        const int64_t at = (turn + args.rank) * step + place;
#pragma unroll
        for (int i = 1; i < RANKS; ++i) exchange::send(args.inboxes[(args.rank + i) % RANKS] + at, own, epoch);
    }
    const uint4 residual = load_residual(args, token, first, used);

    uint4 parts[RANKS];
    const uint32_t missing = used ? ((1u << RANKS) - 1) & ~(1u << args.rank) : 0;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) parts[r] = r == args.rank ? own : make_uint4(0, 0, 0, 0);
    ptx::Patience patience(args.host, args.failed, args.limit_ms);
    exchange::receive(parts, missing, args.inboxes[args.rank] + turn * step + place, step, epoch, patience);
    float sum[8] = {};
#pragma unroll
    for (int r = 0; r < RANKS; ++r) exchange::add(sum, parts[r]);
    __syncthreads();  // all have read the epoch
    if (threadIdx.x == 0) args.epochs[token] = epoch;
    finish(args, token, first, used, rows::pack8(sum), norm_weight, residual);
}

template <int RANKS>
__device__ void bulk(const AllReduceArgs& args) {
    constexpr int AHEAD = 2;
    const int first = threadIdx.x * 8;
    const bool used = first < args.hidden;
    uint4 norm_weight = make_uint4(0, 0, 0, 0);
    if (used && args.residual) norm_weight = *reinterpret_cast<const uint4*>(args.norm_weight + first);
    const int64_t step = static_cast<int64_t>(args.room) * args.hidden / 4;  // words of 4 values

    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    ptx::Patience patience(args.host, args.failed, args.limit_ms);
    bool gave_up = false;
    for (int push = blockIdx.x; push - AHEAD * static_cast<int>(gridDim.x) < args.tokens; push += gridDim.x) {
        if (push < args.tokens) {
            const uint32_t epoch = args.epochs[push] + 1;
            const int64_t from = static_cast<int64_t>(epoch % 2) * RANKS + args.rank;
            if (used) {
                const uint4 own = own_part(args, push, first, used);
                const uint64_t low = static_cast<uint64_t>(own.y) << 32 | own.x, high = static_cast<uint64_t>(own.w) << 32 | own.z;
                const int64_t at = from * step + (static_cast<int64_t>(push) * args.hidden + first) / 4;
#pragma unroll
                for (int i = 0; i < RANKS; ++i) ptx::store_pair(args.inboxes[(args.rank + i) % RANKS] + at, low, high);
            }
            __syncthreads();
            if (threadIdx.x < RANKS) ptx::store_release(args.flags[threadIdx.x] + from * args.room + push, epoch);
        }
        const int token = push - AHEAD * static_cast<int>(gridDim.x);
        if (token < 0) continue;
        const uint32_t epoch = args.epochs[token] + 1;
        const int64_t turn = static_cast<int64_t>(epoch % 2) * RANKS;
        const uint4 residual = load_residual(args, token, first, used);
        if (threadIdx.x < RANKS) {
            const uint32_t* flag = args.flags[args.rank] + (turn + threadIdx.x) * args.room + token;
            while (!gave_up && ptx::load_acquire(flag) != epoch) gave_up = patience.is_over();
        }
        __syncthreads();  // also: all have read the epoch
        if (threadIdx.x == 0) args.epochs[token] = epoch;
        float sum[8] = {};
        if (used) {
            const uint64_t* inbox = args.inboxes[args.rank] + turn * step + (static_cast<int64_t>(token) * args.hidden + first) / 4;
            uint64_t words[RANKS][2];
#pragma unroll
            for (int r = 0; r < RANKS; ++r) ptx::load_pair(inbox + r * step, words[r]);
#pragma unroll
            for (int r = 0; r < RANKS; ++r) {
                exchange::add(sum, make_uint4(words[r][0], words[r][0] >> 32, words[r][1], words[r][1] >> 32));
            }
        }
        finish(args, token, first, used, rows::pack8(sum), norm_weight, residual);
    }
}

}  // namespace

#define ALL_REDUCE(RANKS)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS) all_reduce_packets_##RANKS(const __grid_constant__ AllReduceArgs args) { \
        packets<RANKS>(args);                                                                                                 \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2) all_reduce_bulk_##RANKS(const __grid_constant__ AllReduceArgs args) {    \
        bulk<RANKS>(args);                                                                                                    \
    }

ALL_REDUCE(2)
ALL_REDUCE(4)
ALL_REDUCE(8)
