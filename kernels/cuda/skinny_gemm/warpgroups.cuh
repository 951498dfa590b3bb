// skinny_gemm for MXFP4 weights and more than 8 columns: warpgroups on the tensor cores, for tiles of up to 24 slots.
//
// What bounds this is the number of instructions: unpacking takes 60 for a warp's 16 rows of 64 values along k, a product of N columns
// keeps the scheduler for 2 (4 + N / 2) cycles more (it reads its sums from registers), and at 4.3 TB/s of weights there is time for
// 120 to 130. So all else is kept short, and nobody waits for anybody within a tile of slots:
//
//   activations     a tile of slots' columns, all of k, in shared memory: [64 of k][column] of 128 bytes, swizzled by 128 bytes. What 16
//                   or 24 columns, as the block's widest tile has, leave of shared memory is the rings'
//   warpgroup w     of 4: a *stream*, an equally long part of the line of k-tiles of the block's groups of 4 strips, a strip a warp. Weights
//                   are the A operand, unpacked into registers, activations the B operand. Only as many columns are multiplied as
//                   a tile of slots has, in steps of 8. The sums of a group stay in registers up to its epilogue.
//   warps 16..19    a producer for each: chunks of 3 k-tiles, a ring of them in flight, independent of everything else
//
// A group cut by the end of a stream is finished by the stream that begins it: the others, which as a rule come to their part of it
// first, leave sums in global memory, where no number is also the sign that nothing is there yet. They are added in the order of the
// line: what the order of a sum depends on is the matrix, the grid and the tiles.
#pragma once
#include "../ptx/wgmma.cuh"
#include "work.cuh"

namespace skinny::streams {

constexpr int WARPGROUPS = CONSUMERS / 4;
constexpr int THREADS = (CONSUMERS + WARPGROUPS) * 32;
constexpr int MAX_COLUMNS = 24;
constexpr int CHUNK_TILES = 3;
constexpr int STAGE_BYTES = CHUNK_TILES * GROUP * packed::Mxfp4::TILE_BYTES;
constexpr int MAX_STAGES = 8;
constexpr int ALIGNMENT = 1024;  // of activations

struct Barriers {
    uint64_t full[WARPGROUPS][MAX_STAGES], empty[WARPGROUPS][MAX_STAGES];
};

// The k-tiles of all groups of all tiles of slots, in that order; blocks take equally long parts. Little is kept in registers.
struct Line {
    const SkinnyArgs& args;
    int num_tiles;

    __device__ int group_length() const { return args.strip_tiles; }
    __device__ int tile_length() const { return args.groups * args.strip_tiles; }
    __device__ int begin_of(int block) const {
        const int length = num_tiles * tile_length(), blocks = min(static_cast<int>(gridDim.x), length);  // so that none in between is empty
        return block < blocks ? static_cast<int64_t>(length) * block / blocks : length;
    }
    // [x, y): the stream of a block's warpgroup in a tile of slots.
    __device__ int2 stream(int tile, int block, int warpgroup) const {
        const int begin = max(begin_of(block), tile * tile_length()), end = min(begin_of(block + 1), (tile + 1) * tile_length());
        return make_int2(begin + (end - begin) * warpgroup / WARPGROUPS, begin + (end - begin) * (warpgroup + 1) / WARPGROUPS);
    }
    // Whether the block begins with this tile.
    __device__ bool is_first(int tile, int block) const { return begin_of(block) >= tile * tile_length(); }
};

// By a thread of each producer warp.
__device__ void produce_stream(const SkinnyArgs& args, const Line& line, int warpgroup, uint8_t* ring, int stages,
                               Barriers& barriers) {
    constexpr int TILE_BYTES = packed::Mxfp4::TILE_BYTES;
    uint64_t *full = barriers.full[warpgroup], *empty = barriers.empty[warpgroup];
    ptx::RingPosition at;
    const int end_of_block = line.begin_of(blockIdx.x + 1);
    for (int begin = line.begin_of(blockIdx.x); begin < end_of_block;) {
        const int tile = begin / line.tile_length();
        const uint8_t* expert = args.weights + tile_of(args, tile).x * args.expert_bytes;
        const int2 stream = line.stream(tile, blockIdx.x, warpgroup);
        for (int place = stream.x; place < stream.y;) {
            const int group = place / line.group_length() - tile * args.groups, first = place % line.group_length();
            const int end = min(line.group_length(), first + stream.y - place), strips = min(GROUP, args.strips - group * GROUP);
            const uint8_t* source = expert + static_cast<uint64_t>(group) * GROUP * line.group_length() * TILE_BYTES;
            for (int k = first; k < end; k += CHUNK_TILES) {
                const uint32_t bytes = min(CHUNK_TILES, end - k) * strips * TILE_BYTES;
                ptx::mbarrier_wait(&empty[at.stage], at.phase ^ 1);
                ptx::mbarrier_arrive_expect(&full[at.stage], bytes);
                ptx::bulk_copy_once(ring + at.stage * STAGE_BYTES, source + k * strips * TILE_BYTES, bytes, &full[at.stage]);
                at.next(stages);
            }
            place += end - first;
        }
        begin = (tile + 1) * line.tile_length();
    }
}

// Copies the tile's rows of x, all at once. k beyond the matrix is zero; columns beyond the tile stay as they are: no sum of another
// column sees them. Threads move chunks of 8 values, neighbours of a row, which lie in different banks.
template <int ROOM>
__device__ void load_columns(const SkinnyArgs& args, const int4& tile, uint32_t x) {
    constexpr int STEP = CONSUMERS * 32;
    const int lane = threadIdx.x % 32, chunks = args.strip_tiles * 8;
    int row_of_lane = 0;  // of x, for column `lane`
    if (lane < tile.z) row_of_lane = args.gather ? args.gather[tile.y + lane] : tile.y + lane;
    const int step_columns = STEP / chunks, step_chunks = STEP % chunks;
    int column = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
    for (int done = 0; done < tile.z * chunks; done += STEP) {
        const int row = __shfl_sync(~0u, row_of_lane, column);
        const uint32_t place = x + (chunk / 8 * ROOM + column) * 128 + (chunk % 8 ^ column % 8) * 16;
        if (column < tile.z) {
            const bool exists = chunk * 8 < args.k;
            ptx::copy_async(place, args.x + static_cast<int64_t>(row) * args.k + (exists ? chunk * 8 : 0), exists ? 16 : 0);
        }
        column += step_columns, chunk += step_chunks;
        if (chunk >= chunks) chunk -= chunks, ++column;
    }
    ptx::copy_async_wait_all();
    ptx::fence_async_shared();
}

// Where a thread of a stream leaves 4 sums of 8 columns. Those of a block's first tile of slots may be for another block, which takes them
// when its own stream ends; those of later tiles are taken within the block, before it goes on to the next tile.
__device__ __forceinline__ float4* join_of(const SkinnyArgs& args, bool is_first, int block, int warpgroup, int n) {
    return args.joins + (((block * 2 + is_first) * WARPGROUPS + warpgroup) * (MAX_COLUMNS / 8) + n) * 128 + threadIdx.x % 128;
}

// Adds up what other streams leave of the group that ends at `group_end` of the line, from `at` on, waiting for it. Those streams run:
// all blocks of a launch fit the device at once.
template <int COLUMNS>
__device__ void take_joins(const SkinnyArgs& args, const Line& line, int tile, int at, int group_end, float (&acc)[COLUMNS / 2]) {
    const float nothing = __uint_as_float(NOTHING);
    int block = blockIdx.x, warpgroup = threadIdx.x / 128;
    while (at < group_end) {
        if (++warpgroup == WARPGROUPS) warpgroup = 0, ++block;
        const int2 stream = line.stream(tile, block, warpgroup);
        if (stream.x == stream.y) continue;
        at = stream.y;
        const bool is_first = line.is_first(tile, block);
        float4 part[COLUMNS / 8];
        bool is_there;
        do {
            is_there = true;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n) part[n] = ptx::load_relaxed(join_of(args, is_first, block, warpgroup, n));
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n) {
                is_there &= __float_as_uint(part[n].x) != NOTHING && __float_as_uint(part[n].y) != NOTHING &&
                            __float_as_uint(part[n].z) != NOTHING && __float_as_uint(part[n].w) != NOTHING;
            }
        } while (!is_there);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
            acc[4 * n] += part[n].x, acc[4 * n + 1] += part[n].y, acc[4 * n + 2] += part[n].z, acc[4 * n + 3] += part[n].w;
            ptx::store_relaxed(join_of(args, is_first, block, warpgroup, n), make_float4(nothing, nothing, nothing, nothing));
        }
    }
}

// Bias, activation, and out by way of a transposition, after which a lane holds neighbouring rows.
template <int COLUMNS, Epilogue E>
__device__ void write_sums(const SkinnyArgs& args, const int4& tile, int strip, const float (&acc)[COLUMNS / 2]) {
    constexpr float UNSCALE = packed::Mxfp4::UNSCALE;
    float2 bias = make_float2(0.0f, 0.0f);
    if (args.bias) {
        const int2 row = packed::rows_of<E>(strip);
        const __nv_bfloat16* expert = args.bias + static_cast<int64_t>(tile.x) * args.strips * packed::STRIP_ROWS;
        bias = make_float2(__bfloat162float(expert[row.x]), __bfloat162float(expert[row.y]));
    }
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int64_t rows = static_cast<int64_t>(args.strips) * packed::STRIP_ROWS;
    auto* out = static_cast<__nv_bfloat16*>(args.out);
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
        const float low0 = fmaf(acc[4 * n], UNSCALE, bias.x), low1 = fmaf(acc[4 * n + 1], UNSCALE, bias.x);
        const float high0 = fmaf(acc[4 * n + 2], UNSCALE, bias.y), high1 = fmaf(acc[4 * n + 3], UNSCALE, bias.y);
        const bool is_used = 8 * n + g < tile.z;
        const int64_t slot = tile.y + 8 * n + g;
        if constexpr (E == Epilogue::SWIGLU) {
            const uint32_t pair = ptx::transpose8x8(ptx::pack_bf16(swiglu(low0, high0), swiglu(low1, high1)));
            if (is_used) *reinterpret_cast<uint32_t*>(out + slot * (rows / 2) + strip * 8 + 2 * t) = pair;
        } else {
            const uint32_t low = ptx::transpose8x8(ptx::pack_bf16(low0, low1));
            const uint32_t high = ptx::transpose8x8(ptx::pack_bf16(high0, high1));
            if (!is_used) continue;
            *reinterpret_cast<uint32_t*>(out + slot * rows + strip * packed::STRIP_ROWS + 2 * t) = low;
            *reinterpret_cast<uint32_t*>(out + slot * rows + strip * packed::STRIP_ROWS + 2 * t + 8) = high;
        }
    }
}

// Works off this warpgroup's stream of a tile of slots, with COLUMNS of its columns.
template <int COLUMNS, int ROOM, Epilogue E>
__device__ void consume_stream(const SkinnyArgs& args, const Line& line, int tile_idx, const uint8_t* ring, int stages, uint32_t x,
                               Barriers& barriers, ptx::RingPosition& at) {
    using Format = packed::Mxfp4;
    constexpr uint32_t TILE_DESCRIPTOR = ROOM * 128 / 16;  // from one k-tile's columns to the next one's
    const int lane = threadIdx.x % 32, in_group = threadIdx.x / 32 % GROUP, warpgroup = threadIdx.x / 128;
    uint32_t full = ptx::shared_address(barriers.full[warpgroup]), empty = ptx::shared_address(barriers.empty[warpgroup]);
    uint32_t columns = static_cast<uint32_t>(ptx::matrix_descriptor(x));
    ptx::pin(full), ptx::pin(empty), ptx::pin(columns);  // else each chunk makes them anew
    float acc[COLUMNS / 2];
    const auto multiply = [&](const Format::Words& words, uint32_t low, uint32_t(&a)[4][4]) {
        constexpr uint64_t HIGH = static_cast<uint64_t>(ptx::MATRIX_DESCRIPTOR_HIGH) << 32;
        Format::scaled_fragments(words, a);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) ptx::wgmma<COLUMNS>(acc, a[step], HIGH | (low + 2 * step), true);
        ptx::wgmma_commit();
    };
    const auto release = [&]() {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(empty + 8 * at.stage);
        at.next(stages);
    };
    const uint8_t* mine = ring + in_group * Format::TILE_BYTES;
    const int2 stream = line.stream(tile_idx, blockIdx.x, warpgroup);
    for (int place = stream.x; place < stream.y;) {
        const int group = place / line.group_length() - tile_idx * args.groups, first = place % line.group_length();
        const int end = min(line.group_length(), first + stream.y - place);
        const int strips = min(GROUP, args.strips - group * GROUP);  // one that does not exist yields sums that nobody reads
        const int stride = strips * Format::TILE_BYTES;
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) acc[i] = 0.0f;
        // All descriptors of a chunk come from one register that the compiler knows to be the same in all lanes: others it would move, two
        // words each, from lanes to the uniform unit. A tile is unpacked beside the products of the one before.
        int k = first;
        for (; k + CHUNK_TILES <= end; k += CHUNK_TILES) {
            ptx::mbarrier_wait(full + 8 * at.stage, at.phase);
            const uint8_t* weights = mine + at.stage * STAGE_BYTES;
            const Format::Words words = Format::load_words(weights, lane), next = Format::load_words(weights + stride, lane);
            const uint32_t low = ptx::uniform(columns + k * TILE_DESCRIPTOR);
            uint32_t a[2][4][4];
            multiply(words, low, a[0]);
            const Format::Words last = Format::load_words(weights + 2 * stride, lane);
            multiply(next, low + TILE_DESCRIPTOR, a[1]);
            release();
            ptx::wgmma_wait<1>();
            multiply(last, low + 2 * TILE_DESCRIPTOR, a[0]);
            ptx::wgmma_wait_all();  // other warpgroups fill the gap
        }
        if (k < end) {
            ptx::mbarrier_wait(full + 8 * at.stage, at.phase);
            const uint8_t* weights = mine + at.stage * STAGE_BYTES;
            for (; k < end; ++k, weights += stride) {
                uint32_t a[4][4];
                multiply(Format::load_words(weights, lane), ptx::uniform(columns + k * TILE_DESCRIPTOR), a);
                ptx::wgmma_wait_all();
            }
            release();
        }
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) ptx::pin(acc[i]);
        if (first > 0) {
            const auto sum = [&](int i) { return __fadd_rn(acc[i], 0.0f); };  // of what is no number makes the one that arithmetic yields
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n) {
                ptx::store_relaxed(join_of(args, line.is_first(tile_idx, blockIdx.x), blockIdx.x, warpgroup, n),
                                   make_float4(sum(4 * n), sum(4 * n + 1), sum(4 * n + 2), sum(4 * n + 3)));
            }
        } else {
            take_joins<COLUMNS>(args, line, tile_idx, place + end, place + line.group_length(), acc);
            if (in_group < strips) write_sums<COLUMNS, E>(args, tile_of(args, tile_idx), group * GROUP + in_group, acc);
        }
        place += end - first;
    }
}

// Works off the block's part of the line, with room for ROOM columns of each tile of slots.
template <int ROOM, Epilogue E>
__device__ void run_streams(const SkinnyArgs& args, const Line& line, uint8_t* x, Barriers& barriers) {
    const int warp = threadIdx.x / 32, warpgroup = warp < CONSUMERS ? warp / 4 : warp - CONSUMERS;
    const int x_bytes = args.strip_tiles * ROOM * 128;
    const int ring_bytes = static_cast<int>(ptx::dynamic_shared_bytes()) - ALIGNMENT - x_bytes;
    const int stages = min(MAX_STAGES, ring_bytes / (WARPGROUPS * STAGE_BYTES));
    uint8_t* ring = x + x_bytes + warpgroup * stages * STAGE_BYTES;
    if (warp >= CONSUMERS) {
        if (threadIdx.x % 32 == 0) produce_stream(args, line, warpgroup, ring, stages, barriers);
        return;
    }
    const uint32_t columns = ptx::shared_address(x);
    ptx::RingPosition at;
    const int end_of_block = line.begin_of(blockIdx.x + 1);
    for (int begin = line.begin_of(blockIdx.x); begin < end_of_block;) {
        const int tile_idx = begin / line.tile_length();
        const int4 tile = tile_of(args, tile_idx);
        ptx::named_barrier(1, CONSUMERS * 32);  // nobody multiplies by the old activations any more
        load_columns<ROOM>(args, tile, columns);
        ptx::named_barrier(1, CONSUMERS * 32);
        if (tile.z <= 8) {
            consume_stream<8, ROOM, E>(args, line, tile_idx, ring, stages, columns, barriers, at);
        } else if (ROOM == 16 || tile.z <= 16) {
            consume_stream<16, ROOM, E>(args, line, tile_idx, ring, stages, columns, barriers, at);
        } else {
            consume_stream<ROOM, ROOM, E>(args, line, tile_idx, ring, stages, columns, barriers, at);
        }
        begin = (tile_idx + 1) * line.tile_length();
    }
}

template <Epilogue E>
__device__ void run(const SkinnyArgs& args) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Barriers barriers;
    if (threadIdx.x < WARPGROUPS * MAX_STAGES) {
        ptx::mbarrier_init(&barriers.full[0][0] + threadIdx.x, 1);
        ptx::mbarrier_init(&barriers.empty[0][0] + threadIdx.x, 4);
        ptx::fence_barrier_init();
    }
    __syncthreads();

    // The next kernel may start at once, unless it relies on what this one waits for.
    const bool late_tiles = args.tiles && !args.early_tiles;
    if (!late_tiles) ptx::launch_dependents();
    if (late_tiles || threadIdx.x < CONSUMERS * 32) ptx::grid_dependency_wait();
    if (late_tiles) ptx::launch_dependents();
    const Line line{args, args.tiles ? *args.num_tiles : 1};
    int most = 0;  // columns of a tile of this block
    for (int begin = line.begin_of(blockIdx.x), end = line.begin_of(blockIdx.x + 1); begin < end;) {
        const int tile_idx = begin / line.tile_length();
        most = max(most, tile_of(args, tile_idx).z);
        begin = (tile_idx + 1) * line.tile_length();
    }
    uint8_t* x = shared + (-ptx::shared_address(shared) & (ALIGNMENT - 1));
    if (most <= 16) {
        run_streams<16, E>(args, line, x, barriers);
    } else {
        run_streams<MAX_COLUMNS, E>(args, line, x, barriers);
    }
}

}  // namespace skinny::streams
