// out[s, r] = epilogue(sum_k x[row(s), k] * W[expert(s)][r, k] + bias[expert(s)][r]) for few columns s (tokens or slots) a matrix.
//
//   weights  packed (packed/packed.cuh, packed/fp8.cuh), bf16, MXFP4 or FP8, one matrix or one an expert
//   x        [rows, k] bf16 row-major; row(s) = gather[s], or s
//   out      [slots, rows of W] bf16 or f32; or [slots, rows / 2] bf16 after clamped SwiGLU
//
// Bound by memory: each weight is read once for each tile of up to NT x 8 slots of its expert. The work is a line of *units*: a unit
// is a run of k-tiles of a group of 4 strips (64 rows), one bulk copy. Persistent blocks take contiguous, equally long parts of it.
//
//   warps 0..15  consumers: warp w takes strips 2 (w % 2) and 2 (w % 2) + 1 of the group and every 8th tile: an activation fragment
//                serves two strips, whose sums are independent chains. They hand over 8 partial sums a group.
//   warp 16      producer: keeps `stages` units in flight, independent of everything else in the block
//   warp 17      epilogue: sums the partials in fixed order, adds bias, applies the activation, writes
//
// A group cut by the end of a block's part is finished by the block that begins it: the others, which as a rule come to their part of it
// first, leave sums in global memory, where no number is also the sign that nothing is there yet. They are added in the order of the
// blocks, the first one's own last. So the order of a sum depends on the matrix, the grid and the number of tiles, never on timing.
//
// The weights do not depend on the preceding kernel: the producer starts before the grid dependency is met.
//
// MXFP4 and more than 8 columns, where unpacking takes more instructions than memory leaves time for, is warpgroups.cuh's.
//
// Shared memory: stages; partial sums 8 x 4 x NT x 512 bytes; activations NT x 8 x 2 bytes for each k of `x_units` units.
//
// What did not help: bringing the next product's weights towards the L2 cache when this one's have been fetched. A step of 20b took as long
// at every batch (1.79 and 1.81 ms at batch 1, one H200): what products lose between them is latency, not idle memory.
#include "finish.cuh"
#include "warpgroups.cuh"

namespace {

using namespace skinny;

// By one warp, of which a thread does the copies. Nothing is fetched before the first expert is known: its number is looked up while the
// number of tiles is, which says whose it is.
template <class Format>
__device__ void produce(const SkinnyArgs& args, uint8_t* ring, Barriers& barriers) {
    const int lane = threadIdx.x % 32;
    int expert = 0, num_tiles = 1;
    if (args.tiles) {
        expert = lane < args.tiles_room ? args.tiles[lane].x : 0;
        num_tiles = *args.num_tiles;
    }
    const Range range(args, num_tiles);
    const int first_tile = Cursor(args, range.begin).tile;
    expert = __shfl_sync(~0u, expert, first_tile);
    const bool is_known = first_tile < 32;
    if (lane != 0) return;
    int stage = 0;
    uint32_t phase = 0;
    for (Cursor unit(args, range.begin); unit.index < range.end; unit.next(args)) {
        const int first = unit.part * args.unit_tiles, strips = min(GROUP, args.strips - unit.group * GROUP);
        const uint32_t bytes = min(args.unit_tiles, args.strip_tiles - first) * strips * Format::TILE_BYTES;
        const uint64_t tiles = static_cast<uint64_t>(unit.group) * GROUP * args.strip_tiles + first * strips;
        if (unit.tile != first_tile || !is_known) expert = tile_of(args, unit.tile).x;
        ptx::mbarrier_wait(&barriers.empty[stage], phase ^ 1);
        ptx::mbarrier_arrive_expect(&barriers.full[stage], bytes);
        ptx::bulk_copy_once(ring + stage * GROUP * args.unit_tiles * Format::TILE_BYTES,
                            args.weights + expert * args.expert_bytes + tiles * Format::TILE_BYTES, bytes,
                            &barriers.full[stage]);
        if (++stage == args.stages) stage = 0, phase ^= 1;
    }
}

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
                        Barriers& barriers) {
    constexpr int UNROLL = NT == 1 ? 3 : 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int pair = warp % 2, my_part = warp / 2;
    float acc[2][NT][4] = {};
    int stage = 0, loaded = -1, live = 0;
    uint32_t phase = 0, group_phase = 1;
    Cursor unit(args, range.begin);
    const int first_unit = unit.part;
    for (; unit.index < range.end; unit.next(args)) {
        if (unit.tile != loaded) {
            const int4 tile = tile_of(args, unit.tile);
            ptx::named_barrier(1, CONSUMERS * 32);  // nobody reads the old activations any more
            load_activations<Format, NT>(args, tile, first_unit, x);
            ptx::named_barrier(1, CONSUMERS * 32);
            loaded = unit.tile, live = (tile.z + 7) / 8;
        }
        const int tiles = min(args.unit_tiles, args.strip_tiles - unit.part * args.unit_tiles);
        const int local = unit.part - first_unit + (unit.part < first_unit ? args.group_units : 0);
        const int first_block = local * args.unit_tiles * Format::BLOCKS;
        const int strip = unit.group * GROUP + 2 * pair;  // strips come in pairs or, at the end of a matrix, one alone
        const int strips = min(GROUP, args.strips - unit.group * GROUP);
        const uint8_t* low = ring + (stage * GROUP * args.unit_tiles + 2 * pair) * Format::TILE_BYTES;
        float scale = 1.0f;  // fetched before the weights are waited for; a unit of Fp8 has at most one tile a warp
        if constexpr (Format::BLOCK_SCALES) {
            scale = block_scale(args, tile_of(args, unit.tile).x, unit.group, unit.part * args.unit_tiles + my_part);
        }
        ptx::mbarrier_wait(&barriers.full[stage], phase);
        const auto multiply = [&](int strips) {
            const uint8_t* at = low + my_part * strips * Format::TILE_BYTES;
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
                    const auto weights = Format::load(at + s * Format::TILE_BYTES, lane);
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
                at += PARTS * strips * Format::TILE_BYTES;
                block += PARTS * Format::BLOCKS;
            }
        };
        if (strips == GROUP) {
            multiply(GROUP);  // with constant strides
        } else if (strip < args.strips) {
            multiply(strips);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&barriers.empty[stage]);
        if (++stage == args.stages) stage = 0, phase ^= 1;

        if (unit.part + 1 == args.group_units || unit.index + 1 == range.end) {
            ptx::mbarrier_wait(&barriers.sums_empty, group_phase);
            group_phase ^= 1;
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

template <class Format, int NT, Epilogue E>
__device__ void skinny_gemm(const SkinnyArgs& args) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Barriers barriers;
    uint8_t* ring = shared;
    float4* sums = reinterpret_cast<float4*>(ring + args.stages * GROUP * args.unit_tiles * Format::TILE_BYTES);
    uint8_t* x = reinterpret_cast<uint8_t*>(sums + PARTS * GROUP * NT * 32);

    if (threadIdx.x == 0) {
        for (int i = 0; i < args.stages; ++i) {
            ptx::mbarrier_init(&barriers.full[i], 1);
            ptx::mbarrier_init(&barriers.empty[i], CONSUMERS);
        }
        ptx::mbarrier_init(&barriers.sums_full, CONSUMERS);
        ptx::mbarrier_init(&barriers.sums_empty, 1);
        ptx::fence_barrier_init();
    }
    __syncthreads();

    // The next kernel may start at once, unless it relies on what this one waits for.
    const bool late_tiles = args.tiles && !args.early_tiles;
    const int warp = threadIdx.x / 32;
    if (!late_tiles) ptx::launch_dependents();
    if (warp == CONSUMERS) {
        if (late_tiles) ptx::grid_dependency_wait();
        produce<Format>(args, ring, barriers);
        return;
    }
    ptx::grid_dependency_wait();
    if (late_tiles) ptx::launch_dependents();
    const Range range(args, args.tiles ? *args.num_tiles : 1);
    if (warp < CONSUMERS) {
        consume<Format, NT>(args, range, ring, reinterpret_cast<uint4*>(x), sums, barriers);
    } else {
        finish<Format, NT, E>(args, range, sums, barriers);
    }
}

}  // namespace

#define SKINNY_GEMM(name, format, nt, epilogue)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ SkinnyArgs args) {      \
        skinny_gemm<packed::format, nt, Epilogue::epilogue>(args);                                                \
    }
SKINNY_GEMM(skinny_bf16_n8, Bf16, 1, BF16)
SKINNY_GEMM(skinny_bf16_n16, Bf16, 2, BF16)
SKINNY_GEMM(skinny_bf16_n8_f32, Bf16, 1, F32)
SKINNY_GEMM(skinny_bf16_n16_f32, Bf16, 2, F32)
SKINNY_GEMM(skinny_bf16_n8_swiglu, Bf16, 1, SWIGLU)
SKINNY_GEMM(skinny_bf16_n16_swiglu, Bf16, 2, SWIGLU)
SKINNY_GEMM(skinny_mxfp4_n8, Mxfp4, 1, BF16)
SKINNY_GEMM(skinny_mxfp4_n8_swiglu, Mxfp4, 1, SWIGLU)
SKINNY_GEMM(skinny_fp8_n8, Fp8, 1, BF16)
SKINNY_GEMM(skinny_fp8_n16, Fp8, 2, BF16)
SKINNY_GEMM(skinny_fp8_n8_f32, Fp8, 1, F32)
SKINNY_GEMM(skinny_fp8_n16_f32, Fp8, 2, F32)
SKINNY_GEMM(skinny_fp8_n8_swiglu, Fp8, 1, SWIGLU)
SKINNY_GEMM(skinny_fp8_n16_swiglu, Fp8, 2, SWIGLU)

#define SKINNY_STREAMS(name, epilogue)                                                                                    \
    extern "C" __global__ void __launch_bounds__(streams::THREADS, 1) name(const __grid_constant__ SkinnyArgs args) {    \
        streams::run<Epilogue::epilogue>(args);                                                                          \
    }
SKINNY_STREAMS(skinny_mxfp4_streams, BF16)
SKINNY_STREAMS(skinny_mxfp4_streams_swiglu, SWIGLU)
