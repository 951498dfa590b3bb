// What a launch of skinny_gemm or skinny_experts works off, and how its blocks share it out.
#pragma once
#include "../packed/epilogue.cuh"
#include "../packed/fp8.cuh"

struct SkinnyArgs {
    const uint8_t* weights;
    const float* scales;         // of blocks of 128 x 128; Fp8 only
    const __nv_bfloat16* x;
    const __nv_bfloat16* bias;   // [experts, rows of W], or null
    void* out;
    const int4* tiles;           // {expert, first slot, slots, 0}; null: one tile of all `tokens`
    const int32_t* num_tiles;
    const int32_t* gather;       // row of x of a slot; null: the slot itself
    float4* joins;               // [blocks, 4 strips, NT, 32] (of streams as warpgroups.cuh says), all NOTHING between launches
    uint32_t* done;              // of two products in one launch: groups done, by tile and counted by each finisher, zero between
                                 // launches; or null
    uint64_t expert_bytes;       // from one expert's matrix to the next
    int32_t tokens;
    int32_t strips;              // of a matrix
    int32_t groups;              // of 4 strips; the last may have fewer
    int32_t k;
    int32_t strip_tiles;         // k-tiles of a strip
    int32_t unit_tiles;          // k-tiles of a unit; the last of a strip may have fewer
    int32_t group_units;         // units of a group
    int32_t x_units;             // units whose activations are held: all of a group's, or all of a block's
    int32_t stages;
    int32_t stage_bytes;         // of the ring: a unit's at least
    int32_t early_tiles;         // 1: `tiles` was written before the preceding kernel began
    int32_t tiles_room;          // of `tiles`
    int32_t awaited_groups;      // of a tile, which the product before this one in the launch yields; 0: there is none
    int32_t padding;
};
static_assert(sizeof(SkinnyArgs) == 144);

// Both products of experts: `out` of the first is `x` of the second. They have `stages` and `stage_bytes` in common.
struct SkinnyExpertsArgs {
    SkinnyArgs products[2];
};
static_assert(sizeof(SkinnyExpertsArgs) == 288);

namespace skinny {

using packed::GROUP;
constexpr int MAX_STAGES = 16;
constexpr int CONSUMERS = 16;
constexpr int FINISHERS = 2;
constexpr int STRIPS = GROUP / FINISHERS;  // of a finisher
constexpr int THREADS = (CONSUMERS + 1 + FINISHERS) * 32;
constexpr uint32_t NOTHING = ~0u;  // a NaN that no arithmetic yields

using packed::Epilogue;
using packed::swiglu;

// Partial sums of a group: how many consumers share its k.
constexpr int PARTS = CONSUMERS / 2;

struct Barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    uint64_t sums_full, sums_empty;
};

// Where a consumer is: in the ring, and in handing over sums.
struct Consumer {
    ptx::RingPosition at;
    uint32_t sums_phase = 1;
};

// The units [begin, end) of this block. A unit's index counts parts of groups of tiles; times the number of blocks it is below 2^32.
struct Range {
    uint32_t begin, end, units, blocks;

    __device__ Range(const SkinnyArgs& args, int num_tiles) {
        units = num_tiles * args.groups * args.group_units;
        blocks = min(gridDim.x, units);  // so that none in between is empty
        const bool used = blockIdx.x < blocks;
        begin = used ? units * blockIdx.x / blocks : 0;
        end = used ? units * (blockIdx.x + 1) / blocks : 0;
    }
    // The block whose range contains `unit`.
    __device__ int owner(int unit) const { return ((unit + 1) * blocks - 1) / units; }
};

// Walks through a range without dividing at each step.
struct Cursor {
    int index, tile, group, part;

    __device__ Cursor(const SkinnyArgs& args, int first) : index(first) {
        part = first % args.group_units;
        const int group_index = first / args.group_units;
        group = group_index % args.groups;
        tile = group_index / args.groups;
    }
    __device__ void next(const SkinnyArgs& args) {
        ++index;
        if (++part == args.group_units) next_group(args);
    }
    __device__ void next_group(const SkinnyArgs& args) {
        part = 0;
        if (++group == args.groups) group = 0, ++tile;
    }
};

// By all consumers, before they load activations of a tile: nobody reads the old ones any more, and the new ones are there.
__device__ __forceinline__ void await_activations(const SkinnyArgs& args, int tile) {
    if (args.awaited_groups > 0 && threadIdx.x == 0) {
        while (ptx::load_acquire_device(args.done + tile) < static_cast<uint32_t>(args.awaited_groups * FINISHERS)) {
        }
    }
    ptx::named_barrier(1, CONSUMERS * 32);
}

__device__ __forceinline__ int4 tile_of(const SkinnyArgs& args, int tile) {
    return args.tiles ? args.tiles[tile] : make_int4(0, 0, args.tokens, 0);
}

}  // namespace skinny
