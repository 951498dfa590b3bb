// Which token goes where: orders the (token, expert) pairs of this rank's experts by expert, then by token.
//
//   in   experts [tokens, top] i32
//   out  slot    [tokens, top]   the pair's place in that order; -1 for experts of other ranks
//        gather  [slots]         token of each place
//        offsets [experts + 1]   first place of each local expert, and the number of all
//        tiles   {expert, first slot, slots, 0}: each expert's places in runs of at most `tile_slots`, and their number
//
// One block: the pairs are read twice, each warp its own run of them, so that places follow the order of tokens whatever the
// timing. Shared memory: 32 warps x experts counts (at most 128), 16 KB. Bound by latency.
#include "../ptx/ptx.cuh"

struct DispatchArgs {
    const int32_t* experts;
    int32_t* slot;
    int32_t* gather;
    int32_t* offsets;
    int4* tiles;
    int32_t* num_tiles;
    int32_t pairs;         // tokens x top
    int32_t top;
    int32_t first_expert;  // of this rank
    int32_t num_experts;   // of this rank, at most 128
    int32_t tile_slots;
    int32_t padding;
};
static_assert(sizeof(DispatchArgs) == 72);

namespace {

constexpr int WARPS = 32;
constexpr int MAX_EXPERTS = 128;

// Exclusive prefix sums over 128 values, four a lane, by one warp. Returns the total.
__device__ int scan128(int (&value)[4]) {
    const int lane = threadIdx.x % 32;
    int sum = value[0] + value[1] + value[2] + value[3], inclusive = sum;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int below = __shfl_up_sync(~0u, inclusive, lanes);
        if (lane >= lanes) inclusive += below;
    }
    int running = inclusive - sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int next = running + value[i];
        value[i] = running, running = next;
    }
    return __shfl_sync(~0u, inclusive, 31);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(WARPS * 32) dispatch(const __grid_constant__ DispatchArgs args) {
    __shared__ int place[WARPS][MAX_EXPERTS];  // counts, then the next free place of each warp and expert
    __shared__ int counts[MAX_EXPERTS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < WARPS * MAX_EXPERTS; i += WARPS * 32) place[i / MAX_EXPERTS][i % MAX_EXPERTS] = 0;
    const int run = ((args.pairs + WARPS * 32 - 1) / (WARPS * 32)) * 32;  // pairs of a warp
    const int begin = min(warp * run, args.pairs), end = min(begin + run, args.pairs);
    __syncthreads();

    ptx::launch_dependents();
    ptx::grid_dependency_wait();
    for (int i = begin + lane; i < end; i += 32) {
        const int expert = args.experts[i] - args.first_expert;
        if (expert >= 0 && expert < args.num_experts) atomicAdd(&place[warp][expert], 1);
    }
    __syncthreads();
    if (threadIdx.x < MAX_EXPERTS) {
        int count = 0;
        for (int w = 0; w < WARPS; ++w) count += place[w][threadIdx.x];
        counts[threadIdx.x] = count;
    }
    __syncthreads();
    if (warp == 0) {
        int first[4], first_tile[4], count[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            count[i] = first[i] = counts[lane * 4 + i];
            first_tile[i] = (count[i] + args.tile_slots - 1) / args.tile_slots;
        }
        const int slots = scan128(first), tiles = scan128(first_tile);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int expert = lane * 4 + i;
            counts[expert] = first[i];
            if (expert < args.num_experts) args.offsets[expert] = first[i];
            for (int done = 0, tile = first_tile[i]; done < count[i]; done += args.tile_slots, ++tile) {
                args.tiles[tile] = make_int4(expert, first[i] + done, min(args.tile_slots, count[i] - done), 0);
            }
        }
        if (lane == 0) args.offsets[args.num_experts] = slots, *args.num_tiles = tiles;
    }
    __syncthreads();
    if (threadIdx.x < MAX_EXPERTS) {
        int next = counts[threadIdx.x];
        for (int w = 0; w < WARPS; ++w) {
            const int count = place[w][threadIdx.x];
            place[w][threadIdx.x] = next, next += count;
        }
    }
    __syncthreads();
    for (int base = begin; base < end; base += 32) {
        const int i = base + lane;
        const int expert = i < end ? args.experts[i] - args.first_expert : -1;
        const bool local = expert >= 0 && expert < args.num_experts;
        const uint32_t alike = __match_any_sync(~0u, local ? expert : -1);
        const int before = __popc(alike & ((1u << lane) - 1));
        int slot = -1;
        if (local) slot = place[warp][expert] + before;
        __syncwarp();
        if (local && before == 0) place[warp][expert] += __popc(alike);
        __syncwarp();
        if (i < end) args.slot[i] = slot;
        if (local) args.gather[slot] = i / args.top;
    }
}
