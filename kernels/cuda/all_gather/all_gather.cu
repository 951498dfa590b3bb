// Puts the columns of all ranks side by side on every rank: out_p[t, first + c] = part[t, c], for each rank p of a group.
//
// part [rows, cols] f32, this rank's; out [rows, pitch] f32 on each rank. Thread = 4 values at a time. With flags, ranks are one
// a GPU: a block first learns that the others' blocks of its number have begun, so that what is overwritten has been read, then
// pushes its share over NVLink, and ends when theirs has arrived. `epochs` numbers a block's exchanges. Without flags the caller
// orders it all. Bound by NVLink: rows x cols x 4 bytes to each other rank.
#include "../ptx/peer.cuh"

using ptx::MAX_RANKS;

struct AllGatherArgs {
    const float* part;
    float* outs[MAX_RANKS];
    uint32_t* flags[MAX_RANKS];  // [2 kinds][ranks][blocks], of each rank; null without flags
    uint32_t* epochs;            // [blocks]
    uint32_t* host;              // see Patience, as `failed`
    uint32_t* failed;
    int32_t rank;
    int32_t ranks;
    int32_t rows;
    int32_t cols;                // of this rank; a multiple of 4
    int32_t first;               // column in `outs`; a multiple of 4
    int32_t pitch;               // of `outs`; a multiple of 4
    uint32_t limit_ms;
    int32_t padding;
};
static_assert(sizeof(AllGatherArgs) == 192);

namespace {

// Tells the other ranks' blocks of this number, and waits for them.
__device__ void meet(const AllGatherArgs& args, int kind, uint32_t epoch, ptx::Patience& patience) {
    __syncthreads();
    const int blocks = gridDim.x, peer = threadIdx.x;
    if (peer < args.ranks && peer != args.rank) {
        ptx::store_release(args.flags[peer] + (kind * args.ranks + args.rank) * blocks + blockIdx.x, epoch);
        const uint32_t* flag = args.flags[args.rank] + (kind * args.ranks + peer) * blocks + blockIdx.x;
        while (ptx::load_acquire(flag) != epoch && !patience.is_over()) {
        }
    }
    __syncthreads();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512) all_gather(const __grid_constant__ AllGatherArgs args) {
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const bool meets = args.flags[0] != nullptr;
    const uint32_t epoch = meets ? args.epochs[blockIdx.x] + 1 : 0;
    ptx::Patience patience(args.host, args.failed, args.limit_ms);
    if (meets) meet(args, 0, epoch, patience);
    const int width = args.cols / 4;
    const int64_t count = static_cast<int64_t>(args.rows) * width;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += threads) {
        const int64_t row = i / width, col = i % width;
        const float4 values = reinterpret_cast<const float4*>(args.part)[i];
        const int64_t at = row * args.pitch + args.first + col * 4;
        for (int p = 0; p < args.ranks; ++p) {
            *reinterpret_cast<float4*>(args.outs[(args.rank + p) % args.ranks] + at) = values;
        }
    }
    if (!meets) return;
    meet(args, 1, epoch, patience);
    if (threadIdx.x == 0) args.epochs[blockIdx.x] = epoch;
}
