// The producer warp of skinny_gemm and skinny_experts: weights into the ring.
#pragma once
#include "work.cuh"

namespace skinny {

// The units of one product, by one thread; `tile` is the one whose `expert` is known, or -1.
template <class Format>
__device__ void fetch_units(const SkinnyArgs& args, const Range& range, int tile, int expert, uint8_t* ring, Barriers& barriers,
                            ptx::RingPosition& at) {
    for (Cursor unit(args, range.begin); unit.index < range.end; unit.next(args)) {
        const int first = unit.part * args.unit_tiles, strips = min(GROUP, args.strips - unit.group * GROUP);
        const uint32_t bytes = min(args.unit_tiles, args.strip_tiles - first) * strips * Format::TILE_BYTES;
        const uint64_t tiles = static_cast<uint64_t>(unit.group) * GROUP * args.strip_tiles + first * strips;
        if (unit.tile != tile) tile = unit.tile, expert = tile_of(args, tile).x;
        ptx::mbarrier_wait(&barriers.empty[at.stage], at.phase ^ 1);
        ptx::mbarrier_arrive_expect(&barriers.full[at.stage], bytes);
        ptx::bulk_copy_once(ring + at.stage * args.stage_bytes,
                            args.weights + expert * args.expert_bytes + tiles * Format::TILE_BYTES, bytes,
                            &barriers.full[at.stage]);
        at.next(args.stages);
    }
}

// By one warp, of which a thread does the copies. Nothing is fetched before the first expert is known: its number is looked up while the
// number of tiles is, which says whose it is.
template <class Format, int N>
__device__ void produce(const SkinnyArgs* products, uint8_t* ring, Barriers& barriers) {
    constexpr int LANES = 32;
    const int lane = threadIdx.x % LANES;
    int expert = 0, num_tiles = 1;
    if (products[0].tiles) {
        expert = lane < products[0].tiles_room ? products[0].tiles[lane].x : 0;
        num_tiles = *products[0].num_tiles;
    }
    ptx::RingPosition at;
#pragma unroll 1
    for (int i = 0; i < N; ++i) {
        const Range range(products[i], num_tiles);
        const int first_tile = Cursor(products[i], range.begin).tile;
        const int first_expert = __shfl_sync(~0u, expert, first_tile);
        if (lane == 0) {
            fetch_units<Format>(products[i], range, first_tile < LANES ? first_tile : -1, first_expert, ring, barriers, at);
        }
    }
}

}  // namespace skinny
