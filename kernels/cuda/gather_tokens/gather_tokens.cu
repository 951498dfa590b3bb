// The tokens of all attention groups on every rank, through peer memory (NVLink): each group has its own, experts want all of them.
//
//   residual[t, h] = bf16(residual + delta);   row[t, h] = bf16(rmsnorm(residual[t])[h] * w[h])      or only row = values
//   out[starts[g] + t, h] = row of token t of group g, for every group
//
// delta or values, residual [own tokens, hidden], out [tokens of all groups, hidden] bf16; w [hidden]. A group's ranks hold the same
// rows: each sends to the one rank of every other group that has its place there. Block = one token at a time, thread = 8 values.
//
// Each rank has an inbox of packets (exchange.cuh), [2 turns][tokens][hidden]; `epochs` numbers a token's exchanges and lives on the
// device, so that graphs can be replayed; odd and even ones take turns. A row of exchange e overwrites that of e - 2. Between two
// gathers lies one reduce_scatter of the same tokens, which its owners end when all ranks have taken part. So whoever has ended gather
// e - 1 has a row of a group that ended reduce_scatter e - 2, or owns all rows itself and ended reduce_scatter e - 1: all ranks had
// ended gather e - 2.
// Blocks, all of them resident, send all their rows before they wait for one. Bound by latency: store, way, load.
// Nobody waits for ever: see Patience.
#include "../exchange/exchange.cuh"

using exchange::MAX_RANKS;
using exchange::MAX_THREADS;

struct GatherTokensArgs {
    uint64_t* inboxes[MAX_RANKS];  // of this place in each group
    uint32_t* epochs;              // [tokens]
    uint32_t* host;                // see Patience, as `failed`
    uint32_t* failed;
    const __nv_bfloat16* values;   // delta, or the rows as they are
    __nv_bfloat16* residual;       // null: no norm
    const __nv_bfloat16* norm_weight;
    __nv_bfloat16* out;
    int32_t starts[MAX_RANKS + 1];  // first token of each group, and the number of all
    int32_t group;                 // of this rank
    int32_t groups;
    int32_t room;                  // tokens of an inbox
    int32_t hidden;
    float eps;
    uint32_t limit_ms;
    int32_t padding;
};
static_assert(sizeof(GatherTokensArgs) == 184);

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 2) gather_tokens(const __grid_constant__ GatherTokensArgs args) {
    const int first = threadIdx.x * 8;
    const bool used = first < args.hidden;
    uint4 norm_weight = make_uint4(0, 0, 0, 0);
    if (used && args.residual) norm_weight = *reinterpret_cast<const uint4*>(args.norm_weight + first);

    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const int begin = args.starts[args.group], end = args.starts[args.group + 1], tokens = args.starts[args.groups];
    const int64_t turn_words = static_cast<int64_t>(args.room) * args.hidden / 2;
    const auto place = [&](int token, uint32_t epoch) {
        return epoch % 2 * turn_words + (static_cast<int64_t>(token) * args.hidden + first) / 2;  // 4 words for 8 values
    };
    const auto is_own = [&](int token) { return token >= begin && token < end; };
    for (int token = blockIdx.x; token < tokens; token += gridDim.x) {
        if (!is_own(token)) continue;
        const uint32_t epoch = args.epochs[token] + 1;
        const int64_t at = static_cast<int64_t>(token - begin) * args.hidden + first;
        uint4 row = make_uint4(0, 0, 0, 0);
        if (used) row = *reinterpret_cast<const uint4*>(args.values + at);
        if (args.residual) {
            uint4 residual = make_uint4(0, 0, 0, 0);
            if (used) residual = *reinterpret_cast<const uint4*>(args.residual + at);
            row = exchange::add_norm(args, token - begin, first, used, row, norm_weight, residual);
        }
        if (!used) continue;
        for (int i = 1; i < args.groups; ++i) {
            exchange::send(args.inboxes[(args.group + i) % args.groups] + place(token, epoch), row, epoch);
        }
        *reinterpret_cast<uint4*>(args.out + static_cast<int64_t>(token) * args.hidden + first) = row;
    }
    ptx::Patience patience(args.host, args.failed, args.limit_ms);
    for (int token = blockIdx.x; token < tokens; token += gridDim.x) {
        const uint32_t epoch = args.epochs[token] + 1;
        if (used && !is_own(token)) {
            uint4 rows[1] = {make_uint4(0, 0, 0, 0)};
            exchange::receive(rows, 1, args.inboxes[args.group] + place(token, epoch), 0, epoch, patience);
            *reinterpret_cast<uint4*>(args.out + static_cast<int64_t>(token) * args.hidden + first) = rows[0];
        }
        __syncthreads();  // all have read the epoch
        if (threadIdx.x == 0) args.epochs[token] = epoch;
    }
}
