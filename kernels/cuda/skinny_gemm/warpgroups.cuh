// Consumers of MXFP4 weights for more than 8 columns: warpgroups on the tensor cores, in place of warps.
//
//   warpgroup w of 4   every 4th tile of a unit, all 4 strips, a strip a warp: weights are the A operand, unpacked into registers,
//                      activations the B operand, in shared memory: [64 of k][column] of 128 bytes, swizzled by 128 bytes
//
// While one warpgroup's product runs, others unpack. Only as many columns are multiplied as a tile of slots has, in steps of 8.
#pragma once
#include "../ptx/wgmma.cuh"
#include "work.cuh"

namespace skinny {

constexpr int WARPGROUPS = CONSUMERS / 4;
constexpr int UNIT_TILES = 4 * WARPGROUPS;  // of a whole unit

// Copies the tile's rows of x. k beyond the matrix is zero; columns beyond the tile stay as they are: no sum of another column sees
// them. Threads move chunks of 8 values, neighbours of a row, which lie in different banks.
template <int NT>
__device__ void load_columns(const SkinnyArgs& args, const int4& tile, uint8_t* x) {
    constexpr int IN_FLIGHT = 4, STEP = CONSUMERS * 32;
    constexpr uint32_t NOWHERE = ~0u;
    const int lane = threadIdx.x % 32, chunks = args.strip_tiles * 8;
    int row_of_lane = 0;  // of x, for column `lane`
    if (lane < tile.z) row_of_lane = args.gather ? args.gather[tile.y + lane] : tile.y + lane;
    const int step_columns = STEP / chunks, step_chunks = STEP % chunks;
    int column = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
    for (int done = 0; done < tile.z * chunks; done += IN_FLIGHT * STEP) {
        uint4 values[IN_FLIGHT];
        uint32_t places[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int row = __shfl_sync(~0u, row_of_lane, column);
            const bool used = column < tile.z;
            places[i] = used ? (chunk / 8 * NT * 8 + column) * 128 + (chunk % 8 ^ column % 8) * 16 : NOWHERE;
            values[i] = make_uint4(0, 0, 0, 0);
            if (used && chunk * 8 < args.k) {
                values[i] = *reinterpret_cast<const uint4*>(args.x + static_cast<int64_t>(row) * args.k + chunk * 8);
            }
            column += step_columns, chunk += step_chunks;
            if (chunk >= chunks) chunk -= chunks, ++column;
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            if (places[i] != NOWHERE) *reinterpret_cast<uint4*>(x + places[i]) = values[i];
        }
    }
    ptx::fence_async_shared();
}

// By a warp whose weights are in registers.
__device__ __forceinline__ void release_stage(Barriers& barriers, int stage, int lane) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&barriers.empty[stage]);
}

// Works off the units of one tile of slots from `unit` on, with COLUMNS of its columns.
template <int NT, int COLUMNS>
__device__ void consume_tile(const SkinnyArgs& args, const Range& range, const uint8_t* ring, uint32_t x, float4* sums,
                             Barriers& barriers, Cursor& unit, Consumer& consumer) {
    using Format = packed::Mxfp4;
    // The same for all lanes, and the compiler knows: descriptors are then made by the uniform unit.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, strip = warp % GROUP, part = warp / GROUP;
    float acc[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) acc[i] = 0.0f;
    const int slots_tile = unit.tile;
    Position& at = consumer.at;
    uint32_t& sums_phase = consumer.sums_phase;
    for (; unit.index < range.end && unit.tile == slots_tile; unit.next(args)) {
        const int first = unit.part * args.unit_tiles, tiles = min(args.unit_tiles, args.strip_tiles - first);
        const int strips = min(GROUP, args.strips - unit.group * GROUP);  // one that does not exist yields sums that nobody reads
        const uint8_t* weights = ring + at.stage * args.stage_bytes;
        const uint64_t columns = ptx::matrix_descriptor(x + (first + part) * NT * 1024);
        const uint32_t low = static_cast<uint32_t>(columns), high = static_cast<uint32_t>(columns >> 32);
        ptx::mbarrier_wait(&barriers.full[at.stage], at.phase);
        const auto load = [&](int i, int strips) {
            return Format::load_words(weights + ((part + i * WARPGROUPS) * strips + strip) * Format::TILE_BYTES, lane);
        };
        // The warpgroup's i-th tile.
        const auto multiply = [&](int i, const Format::Words& words, uint32_t(&a)[4][4]) {
            Format::scaled_fragments(words, a);
            ptx::wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const uint32_t b = low + i * (WARPGROUPS * NT * 1024 / 16) + 2 * step;
                ptx::wgmma<COLUMNS>(acc, a[step], static_cast<uint64_t>(high) << 32 | b, true);
            }
            ptx::wgmma_commit();
        };
        if (tiles == UNIT_TILES && strips == GROUP) {  // with constant strides
            Format::Words words[UNIT_TILES / WARPGROUPS];
#pragma unroll
            for (int i = 0; i < UNIT_TILES / WARPGROUPS; ++i) words[i] = load(i, GROUP);
            release_stage(barriers, at.stage, lane);
#pragma unroll
            for (int i = 0; i < UNIT_TILES / WARPGROUPS; ++i) {
                uint32_t a[4][4];
                multiply(i, words[i], a);
                ptx::wgmma_wait_all();  // the next tile takes the same registers; other warpgroups fill the gap
            }
        } else {
            for (int i = 0; part + i * WARPGROUPS < tiles; ++i) {
                uint32_t a[4][4];
                multiply(i, load(i, strips), a);
                ptx::wgmma_wait_all();
            }
            release_stage(barriers, at.stage, lane);
        }
        at.next(args);

        if (unit.part + 1 == args.group_units || unit.index + 1 == range.end) {
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) ptx::pin(acc[i]);
            ptx::mbarrier_wait(&barriers.sums_empty, sums_phase);
            sums_phase ^= 1;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n) {
                sums[((part * GROUP + strip) * NT + n) * 32 + lane] =
                    make_float4(acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3]);
            }
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) acc[i] = 0.0f;
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(&barriers.sums_full);
        }
    }
}

template <int NT>
__device__ void consume_by_warpgroups(const SkinnyArgs& args, const Range& range, const uint8_t* ring, uint8_t* x, float4* sums,
                                      Barriers& barriers, Consumer& consumer) {
    const uint32_t columns = ptx::shared_address(x);
    for (Cursor unit(args, range.begin); unit.index < range.end;) {
        const int4 tile = tile_of(args, unit.tile);
        await_activations(args, unit.tile);
        load_columns<NT>(args, tile, x);
        ptx::named_barrier(1, CONSUMERS * 32);
        if (tile.z <= 8) {
            consume_tile<NT, 8>(args, range, ring, columns, sums, barriers, unit, consumer);
        } else {
            consume_tile<NT, NT * 8>(args, range, ring, columns, sums, barriers, unit, consumer);
        }
    }
}

}  // namespace skinny
