// Sums what the experts of all ranks made of a token, on the ranks of the attention group whose token it is, through peer memory
// (NVLink), fused with what lies around it:
//
//   part_r[t, h] = bf16(sum_j weight[t, j] * y[slot(t, j), h])                              rank r's own (as in combine.cu)
//   sum[t, h]    = bf16(part_0 + part_1 + ..)                                               f32, in the order of ranks
//   residual[t, h] = bf16(residual + sum);   out[t, h] = bf16(rmsnorm(residual[t])[h] * w[h])      on the token's owners
//
// y [slots, hidden]; weight, slot [tokens of all groups, top]; residual, out [own tokens, hidden] bf16. All ranks of a group add the
// same numbers in the same order: they have the same bits. Block = one token at a time, thread = 8 values.
//
// Each rank has an inbox of packets (exchange.cuh), [2 turns][ranks][tokens][hidden]; `epochs` numbers a token's exchanges on every rank,
// owner or not, and lives on the device, so that graphs can be replayed. A part of exchange e overwrites that of e - 2: its sender has
// the token's row from the owners' group (gather_tokens), which had ended all exchanges before.
// Blocks, all of them resident, send all their parts before they wait for one. Bound by latency: store, way, load.
// Nobody waits for ever: see Patience.
#include "../exchange/exchange.cuh"

using exchange::MAX_RANKS;
using exchange::MAX_THREADS;

struct ReduceScatterArgs {
    uint64_t* inboxes[MAX_RANKS];  // of each rank
    uint32_t* epochs;              // [tokens]
    uint32_t* host;                // see Patience, as `failed`
    uint32_t* failed;
    const __nv_bfloat16* y;
    const float* weight;
    const int32_t* slot;
    __nv_bfloat16* residual;
    const __nv_bfloat16* norm_weight;
    __nv_bfloat16* out;
    int32_t starts[MAX_RANKS + 1];  // first token of each group, and the number of all
    int32_t groups;
    int32_t group_ranks;
    int32_t rank;
    int32_t room;                  // tokens of an inbox
    int32_t hidden;
    int32_t top;
    float eps;
    uint32_t limit_ms;
    int32_t padding;
};
static_assert(sizeof(ReduceScatterArgs) == 208);

namespace {

template <int RANKS>
__device__ void reduce_scatter(const ReduceScatterArgs& args) {
    const int first = threadIdx.x * 8;
    const bool used = first < args.hidden;
    uint4 norm_weight = make_uint4(0, 0, 0, 0);
    if (used) norm_weight = *reinterpret_cast<const uint4*>(args.norm_weight + first);

    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const int own_group = args.rank / args.group_ranks, tokens = args.starts[args.groups];
    const int begin = args.starts[own_group], end = args.starts[own_group + 1];
    const int64_t step = static_cast<int64_t>(args.room) * args.hidden / 2;
    const auto place = [&](int token, uint32_t epoch) {  // of rank 0's part; 4 words for 8 values
        return epoch % 2 * RANKS * step + (static_cast<int64_t>(token) * args.hidden + first) / 2;
    };
    uint4 first_part = make_uint4(0, 0, 0, 0);
    for (int token = blockIdx.x, group = 0; token < tokens; token += gridDim.x) {
        const uint32_t epoch = args.epochs[token] + 1;
        while (token >= args.starts[group + 1]) ++group;
        if (!used) continue;
        const uint4 part = exchange::weighted_sum(args, token, first);
        if (token == static_cast<int>(blockIdx.x)) first_part = part;
        for (int i = 0; i < args.group_ranks; ++i) {
            const int owner = group * args.group_ranks + (args.rank + i) % args.group_ranks;
            if (owner != args.rank) exchange::send(args.inboxes[owner] + args.rank * step + place(token, epoch), part, epoch);
        }
    }
    ptx::Patience patience(args.host, args.failed, args.limit_ms);
    for (int token = blockIdx.x; token < tokens; token += gridDim.x) {
        const uint32_t epoch = args.epochs[token] + 1;
        if (token >= begin && token < end) {  // the same for all threads
            const int64_t at = static_cast<int64_t>(token - begin) * args.hidden + first;
            uint4 own = first_part, residual = make_uint4(0, 0, 0, 0);
            if (used) {
                if (token != static_cast<int>(blockIdx.x)) own = exchange::weighted_sum(args, token, first);
                residual = *reinterpret_cast<const uint4*>(args.residual + at);
            }
            uint4 parts[RANKS];
#pragma unroll
            for (int r = 0; r < RANKS; ++r) parts[r] = r == args.rank ? own : make_uint4(0, 0, 0, 0);
            const uint32_t missing = used ? ((1u << RANKS) - 1) & ~(1u << args.rank) : 0;
            exchange::receive(parts, missing, args.inboxes[args.rank] + place(token, epoch), step, epoch, patience);
            float sum[8] = {};
#pragma unroll
            for (int r = 0; r < RANKS; ++r) exchange::add(sum, parts[r]);
            const uint4 normed =
                exchange::add_norm(args, token - begin, first, used, rows::pack8(sum), norm_weight, residual);
            if (used) *reinterpret_cast<uint4*>(args.out + at) = normed;
        }
        __syncthreads();  // all have read the epoch
        if (threadIdx.x == 0) args.epochs[token] = epoch;
    }
}

}  // namespace

#define REDUCE_SCATTER(RANKS)                                                                                               \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                            \
        reduce_scatter_##RANKS(const __grid_constant__ ReduceScatterArgs args) {                                            \
        reduce_scatter<RANKS>(args);                                                                                        \
    }

REDUCE_SCATTER(2)
REDUCE_SCATTER(4)
REDUCE_SCATTER(8)
