// Consumers as single warps.
#pragma once
#include "work.cuh"

namespace skinny {

// Copies the tile's rows of x into shared memory in fragment order, for the `x_units` units from `first_unit` on, cyclically. k beyond
// the matrix is zero; columns beyond the tile stay as they are: no sum of another column sees them.
//
// A lane moves chunks of 8 values. Few columns: all lanes of a warp on one row. Eight: 4 chunks of each; the four stores of a
// chunk go in an order that depends on the lane, which spreads a warp's 32 words over the 32 banks.
template <class Format, int NT>
__device__ void load_activations(const SkinnyArgs& args, const int4& tile, int first_unit, uint4* x) {
    constexpr int IN_FLIGHT = 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int unit_chunks = args.unit_tiles * Format::TILE_K / 8, chunks = args.x_units * unit_chunks;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int columns = min(tile.z - n * 8, 8);
        if (columns <= 0) break;
        const int spread = columns == 1 ? 1 : columns == 2 ? 2 : columns <= 4 ? 4 : 8;  // columns a warp covers
        const int column = lane / 4 % spread, rotation = lane / 8;
        const int step = CONSUMERS * 32 / spread;
        const bool used = column < columns;
        const int slot = tile.y + n * 8 + (used ? column : 0);
        const __nv_bfloat16* row = args.x + static_cast<int64_t>(args.gather ? args.gather[slot] : slot) * args.k;
        const int first = warp * (32 / spread) + lane / (4 * spread) * 4 + lane % 4;
        for (int base = first; base < chunks; base += IN_FLIGHT * step) {
            uint4 values[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const int chunk = base + i * step;
                int source = first_unit * unit_chunks + chunk;
                if (source >= args.group_units * unit_chunks) source -= args.group_units * unit_chunks;
                values[i] = make_uint4(0, 0, 0, 0);
                if (used && chunk < chunks && source * 8 < args.k) {
                    values[i] = *reinterpret_cast<const uint4*>(row + source * 8);
                }
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const int chunk = base + i * step;
                if (!used || chunk >= chunks) continue;
                uint4 v = values[i];
                if (rotation & 1) v = make_uint4(v.y, v.z, v.w, v.x);
                if (rotation & 2) v = make_uint4(v.z, v.w, v.x, v.y);
                const uint32_t pairs[4] = {Format::prepare(v.x), Format::prepare(v.y), Format::prepare(v.z),
                                           Format::prepare(v.w)};
                uint4* fragment = x + (chunk / 4 * NT + n) * 32 + column * 4;
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    reinterpret_cast<uint32_t*>(fragment + (t + rotation) % 4)[chunk % 4] = pairs[t];
                }
            }
        }
    }
}

// The scale of tile `tile` along k of a unit's 64 rows.
__device__ __forceinline__ float block_scale(const SkinnyArgs& args, int expert, int group, int tile) {
    const int k_blocks = (args.strip_tiles + 1) / 2, row_blocks = (args.groups + 1) / 2;
    return __ldg(args.scales + (expert * row_blocks + group / 2) * k_blocks + min(tile, args.strip_tiles - 1) / 2);
}

template <class Format, int NT>
__device__ void consume(const SkinnyArgs& args, const Range& range, const uint8_t* ring, uint4* x, float4* sums,
                        Barriers& barriers, Consumer& consumer) {
    constexpr int UNROLL = NT == 1 && !Format::BLOCK_SCALES ? 3 : 1;  // a unit of Fp8 has one tile a warp
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int pair = warp % 2, my_part = warp / 2;
    float acc[2][NT][4] = {};
    int loaded = -1, live = 0;
    ptx::RingPosition& at = consumer.at;
    uint32_t& sums_phase = consumer.sums_phase;
    Cursor unit(args, range.begin);
    const int first_unit = unit.part;
    for (; unit.index < range.end; unit.next(args)) {
        if (unit.tile != loaded) {
            const int4 tile = tile_of(args, unit.tile);
            await_activations(args, unit.tile);
            load_activations<Format, NT>(args, tile, first_unit, x);
            ptx::named_barrier(1, CONSUMERS * 32);
            loaded = unit.tile, live = (tile.z + 7) / 8;
        }
        const int tiles = min(args.unit_tiles, args.strip_tiles - unit.part * args.unit_tiles);
        const int local = unit.part - first_unit + (unit.part < first_unit ? args.group_units : 0);
        const int first_block = local * args.unit_tiles * Format::BLOCKS;
        const int strip = unit.group * GROUP + 2 * pair;  // strips come in pairs or, at the end of a matrix, one alone
        const int strips = min(GROUP, args.strips - unit.group * GROUP);
        const uint8_t* low = ring + at.stage * args.stage_bytes + 2 * pair * Format::TILE_BYTES;
        float scale = 1.0f;  // fetched before the weights are waited for; a unit of Fp8 has at most one tile a warp
        if constexpr (Format::BLOCK_SCALES) {
            scale = block_scale(args, tile_of(args, unit.tile).x, unit.group, unit.part * args.unit_tiles + my_part);
        }
        ptx::mbarrier_wait(&barriers.full[at.stage], at.phase);
        const auto multiply = [&](int strips) {
            const uint8_t* tile_bytes = low + my_part * strips * Format::TILE_BYTES;
            int block = first_block + my_part * Format::BLOCKS;
#pragma unroll UNROLL
            for (int tile = my_part; tile < tiles; tile += PARTS) {
                uint4 columns[NT][Format::BLOCKS];
#pragma unroll
                for (int n = 0; n < NT; ++n) {
#pragma unroll
                    for (int b = 0; b < Format::BLOCKS; ++b) {
                        columns[n][b] = packed::activation<NT>(x, block + b, n, lane);
                    }
                }
#pragma unroll
                for (int s = 0; s < 2; ++s) {  // a strip that does not exist yields sums that nobody reads
                    const auto weights = Format::load(tile_bytes + s * Format::TILE_BYTES, lane);
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        if (n > 0 && n >= live) continue;
                        if constexpr (Format::BLOCK_SCALES) {
                            Format::accumulate(weights, columns[n], scale, acc[s][n]);
                        } else {
                            Format::accumulate(weights, columns[n], acc[s][n]);
                        }
                    }
                }
                tile_bytes += PARTS * strips * Format::TILE_BYTES;
                block += PARTS * Format::BLOCKS;
            }
        };
        if (strips == GROUP) {
            multiply(GROUP);  // with constant strides
        } else if (strip < args.strips) {
            multiply(strips);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&barriers.empty[at.stage]);
        at.next(args.stages);

        if (unit.part + 1 == args.group_units || unit.index + 1 == range.end) {
            ptx::mbarrier_wait(&barriers.sums_empty, sums_phase);
            sums_phase ^= 1;
#pragma unroll
            for (int s = 0; s < 2; ++s) {
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    float(&sum)[4] = acc[s][n];
                    sums[((my_part * GROUP + 2 * pair + s) * NT + n) * 32 + lane] =
                        make_float4(sum[0], sum[1], sum[2], sum[3]);
                    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
                }
            }
            // The arrival of lane 0 releases its warp's writes, which racecheck does not credit: its hazards here are false.
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(&barriers.sums_full);
        }
    }
}

}  // namespace skinny
