// out[s, r] = epilogue(sum_k x[s, k] * W[expert(s)][r, k] + bias[expert(s)][r]) for many columns s (tokens or slots) a matrix.
//
//   weights  packed (packed/packed.cuh, packed/fp8.cuh), bf16, MXFP4 or FP8, one matrix or one an expert: as skinny_gemm streams them
//   x        [columns, k] bf16 row-major, by tensor map; an expert's rows lie together
//   out      [columns, rows of W] bf16 or f32; or [columns, rows / 2] bf16 after clamped SwiGLU
//
// Bound by the tensor cores from about 100 columns on. A tile is 128 weight rows x NT columns: weights are the A operand, unpacked
// into registers, activations the B operand, in shared memory. Persistent blocks of 2 consumer warpgroups (64 rows each) and a
// producer warpgroup, of which a thread in each of three warps works: each keeps its own kind of copy for `stages` stages, of one step of
// 64 along k or two, in flight, across tiles, so that an epilogue hides the next tile's start. (One for all could not issue them fast
// enough.)
//
// Tiles of MXFP4 experts may have any number of columns: what one lacks of NT is neither fetched nor multiplied, in steps of NT / 4.
//
// With few tiles, k is split: partial sums go through global memory, and each split's block adds up a share of the columns, in order.
// Tiles of up to 64 columns of MXFP4 experts are cut so that all blocks have equally much to do: sums of a cut tile go the same way.
// The weights do not depend on the preceding kernel: their copies start before the grid dependency is met.
//
// Shared memory: a step takes 128 NT bytes of activations and 8 strips of 2048 (bf16), 1024 (FP8) or 544 (MXFP4) bytes.
#include <type_traits>

#include "../packed/epilogue.cuh"
#include "../packed/fp8.cuh"
#include "../ptx/wgmma.cuh"

struct TileArgs {
    ptx::TensorMap x;
    const uint8_t* weights;
    const float* scales;        // of blocks of 128 x 128; Fp8 only
    const __nv_bfloat16* bias;  // [experts, rows of W], or null
    void* out;
    const int4* tiles;          // {expert, first column, columns, 0}; null: runs of NT of all `columns`
    const int32_t* num_tiles;
    float4* partials;           // [work items or blocks, NT / 8, 256]; only with splits or cuts
    uint32_t* counters;         // [tiles of columns x blocks of rows, or blocks], zero between launches
    uint64_t expert_bytes;
    int32_t columns;
    int32_t strips;             // of a matrix
    int32_t row_blocks;         // of 8 strips; the last may have fewer
    int32_t steps;              // of 64 along k
    int32_t splits;             // of k
    int32_t stages;
};
static_assert(sizeof(TileArgs) == 256);

namespace {

constexpr int GROUPS = 2, STRIPS = GROUPS * packed::GROUP, CONSUMERS = 256, THREADS = CONSUMERS + 128, MAX_STAGES = 12;
template <int NT>
constexpr int BLOCKS = NT <= 64 ? 2 : 1;  // a multiprocessor: with few columns, waiting for memory must overlap
// Registers of a thread: all start with 168 (80 with two blocks); the producer's warpgroup gives to the consumers, who hold the sums.
constexpr int PRODUCER_REGISTERS = 40;
template <int NT>
constexpr int CONSUMER_REGISTERS = NT <= 64 ? 96 : 232;
// Columns by which a tile may be narrower: rows of a box of x.
template <class Format, int NT>
constexpr int BOX = std::is_same_v<Format, packed::Mxfp4> ? NT / 4 : NT;
// Steps of a stage. Unpacking a few columns' MXFP4 is bound by the number of instructions, and two steps share those of a stage.
template <class Format, int NT>
constexpr int STAGE_STEPS = std::is_same_v<Format, packed::Mxfp4> && NT <= 64 ? 2 : 1;

struct Barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
};

struct Work {
    int4 tile;  // {expert, first column, columns, 0}
    int row_block, split, tile_index, first_step, last_step;
};

// What a block works off, item by item: 128 rows of a tile, or a part of their k.
//
// Few columns of MXFP4 experts: all items' stages form a line, and each block takes an equally long piece of it, whose ends may cut an item.
// Tiles come before blocks of rows: a piece then has tiles of many widths, and one expert's tiles meet its weights in the L2 cache.
//
// Otherwise: every grid-th item. Splits of one tile are neighbours, then blocks of rows: what runs at the same time shares
// activations, and an expert's weights are still in the L2 cache for its next tile.
template <class Format, int NT>
struct Line {
    static constexpr int S = STAGE_STEPS<Format, NT>;
    const TileArgs& args;
    int tiles, at, end;  // little is kept in registers

    __device__ explicit Line(const TileArgs& args) : args(args) {
        tiles = args.tiles ? *args.num_tiles : (args.columns + NT - 1) / NT;
        at = is_cut() ? first_of(blockIdx.x) : blockIdx.x;
        end = is_cut() ? first_of(blockIdx.x + 1) : length();
    }
    __device__ bool is_cut() const { return S > 1 && args.tiles; }
    __device__ int item_stages() const { return (args.steps + S - 1) / S; }
    __device__ int length() const { return tiles * args.row_blocks * (is_cut() ? item_stages() : args.splits); }
    __device__ int pieces() const { return min(static_cast<int>(gridDim.x), length()); }  // so that none in between is empty
    __device__ int first_of(int piece) const {
        return piece < pieces() ? static_cast<int64_t>(length()) * piece / pieces() : length();
    }
    // The last piece that has a part of the item at `at`.
    __device__ int last_piece() const {
        const int64_t item_end = (at / item_stages() + 1) * item_stages();
        return static_cast<int>((item_end * pieces() - 1) / length());
    }
    __device__ Work work() const {
        Work work;
        if (is_cut()) {
            const int item = at / item_stages(), first = at % item_stages();
            work.tile_index = item % tiles, work.row_block = item / tiles, work.split = 0;
            work.first_step = first * S;
            work.last_step = min(args.steps, (first + end - at) * S);
        } else {
            const int item = at / args.splits;
            work.split = at % args.splits;
            work.row_block = item % args.row_blocks, work.tile_index = item / args.row_blocks;
            work.first_step = args.steps * work.split / args.splits;
            work.last_step = args.steps * (work.split + 1) / args.splits;
        }
        const int first = work.tile_index * NT;
        work.tile = args.tiles ? args.tiles[work.tile_index] : make_int4(0, first, min(NT, args.columns - first), 0);
        return work;
    }
    __device__ void next(const Work& work) { at += is_cut() ? (work.last_step - work.first_step + S - 1) / S : gridDim.x; }
};

template <class Format>
constexpr int STEP_BYTES = Format::TILE_BYTES * (64 / Format::TILE_K);  // of a strip

// By one thread each: 0 and 1 copy a group of strips, 2 activations.
template <class Format, int NT>
__device__ void produce(const TileArgs& args, int role, uint8_t* x, uint8_t* weights, Barriers& barriers) {
    constexpr int ACTIVATIONS = GROUPS, S = STAGE_STEPS<Format, NT>;
    if (role == ACTIVATIONS || args.tiles) ptx::grid_dependency_wait();
    int stage = 0;
    uint32_t phase = 0;
    for (Line<Format, NT> line(args); line.at < line.end;) {
        const Work work = line.work();
        const int first_strip = work.row_block * STRIPS + role * packed::GROUP;
        const int strips = max(0, min(packed::GROUP, args.strips - first_strip));
        const int boxes = (work.tile.z + BOX<Format, NT> - 1) / BOX<Format, NT>;
        const uint32_t bytes = role == ACTIVATIONS ? boxes * BOX<Format, NT> * 128 : strips * STEP_BYTES<Format>;
        const uint8_t* source = args.weights + work.tile.x * args.expert_bytes +
                                static_cast<uint64_t>(first_strip) * args.steps * STEP_BYTES<Format>;
        for (int step = work.first_step; step < work.last_step; step += S) {
            const int steps = min(S, work.last_step - step);
            ptx::mbarrier_wait(&barriers.empty[stage], phase ^ 1);
            ptx::mbarrier_arrive_expect(&barriers.full[stage], steps * bytes);
            if (role == ACTIVATIONS) {
                for (int s = 0; s < steps; ++s) {
                    for (int box = 0; box < boxes; ++box) {
                        ptx::tensor_copy(x + ((stage * S + s) * NT + box * BOX<Format, NT>) * 128, &args.x, (step + s) * 64,
                                         work.tile.y + box * BOX<Format, NT>, &barriers.full[stage]);
                    }
                }
            } else if (bytes > 0) {
                ptx::bulk_copy(weights + (stage * STRIPS + role * packed::GROUP) * S * STEP_BYTES<Format>,
                               source + static_cast<uint64_t>(step) * bytes, steps * bytes, &barriers.full[stage]);
            }
            if (++stage == args.stages) stage = 0, phase ^= 1;
        }
        line.next(work);
    }
}

// Sums of a lane for 8 columns, from column 8 j of the tile on: bias, activation, and out by way of a transposition, after which a lane
// holds neighbouring rows.
template <class Format, packed::Epilogue E>
__device__ __forceinline__ void write_columns(const TileArgs& args, const Work& work, float2 bias, int j, const float4& sum) {
    using packed::Epilogue;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int strip = work.row_block * STRIPS + threadIdx.x / 32;
    const int64_t rows = static_cast<int64_t>(args.strips) * packed::STRIP_ROWS;
    const float low0 = fmaf(sum.x, Format::UNSCALE, bias.x), low1 = fmaf(sum.y, Format::UNSCALE, bias.x);
    const float high0 = fmaf(sum.z, Format::UNSCALE, bias.y), high1 = fmaf(sum.w, Format::UNSCALE, bias.y);
    if constexpr (E == Epilogue::F32) {
        const int2 row = packed::rows_of<E>(strip);
        float* out = static_cast<float*>(args.out) + (work.tile.y + 8 * j + 2 * t) * rows;
        if (8 * j + 2 * t < work.tile.z) out[row.x] = low0, out[row.y] = high0;
        if (8 * j + 2 * t + 1 < work.tile.z) out[rows + row.x] = low1, out[rows + row.y] = high1;
    } else if constexpr (E == Epilogue::SWIGLU) {
        const uint32_t pair =
            ptx::transpose8x8(ptx::pack_bf16(packed::swiglu(low0, high0), packed::swiglu(low1, high1)));
        auto* out = static_cast<__nv_bfloat16*>(args.out) + (work.tile.y + 8 * j + g) * (rows / 2) + strip * 8 + 2 * t;
        if (8 * j + g < work.tile.z) *reinterpret_cast<uint32_t*>(out) = pair;
    } else {
        const uint32_t low = ptx::transpose8x8(ptx::pack_bf16(low0, low1));
        const uint32_t high = ptx::transpose8x8(ptx::pack_bf16(high0, high1));
        auto* out = static_cast<__nv_bfloat16*>(args.out) + (work.tile.y + 8 * j + g) * rows +
                    strip * packed::STRIP_ROWS + 2 * t;
        if (8 * j + g < work.tile.z) {
            *reinterpret_cast<uint32_t*>(out) = low;
            *reinterpret_cast<uint32_t*>(out + 8) = high;
        }
    }
}

template <packed::Epilogue E>
__device__ __forceinline__ float2 bias_of(const TileArgs& args, const Work& work) {
    const int strip = work.row_block * STRIPS + threadIdx.x / 32;
    if (!args.bias || strip >= args.strips) return make_float2(0.0f, 0.0f);
    const __nv_bfloat16* bias = args.bias + static_cast<int64_t>(work.tile.x) * args.strips * packed::STRIP_ROWS;
    const int2 row = packed::rows_of<E>(strip);
    return make_float2(__bfloat162float(bias[row.x]), __bfloat162float(bias[row.y]));
}

// Leaves this split's sums to all splits of the tile, waits for theirs, and finishes a share of the columns. The blocks of the others run:
// a split product has no more items than blocks, and all blocks of a launch fit the device at once.
template <class Format, int NT, int COLUMNS, packed::Epilogue E>
__device__ void join_splits(const TileArgs& args, const Work& work, int index, const float (&acc)[COLUMNS / 2]) {
    const int first = index - work.split, strip = work.row_block * STRIPS + threadIdx.x / 32;
    const auto part = [&](int item, int j) {
        return args.partials + (static_cast<int64_t>(item) * (NT / 8) + j) * CONSUMERS + threadIdx.x;
    };
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
        __stcg(part(index, j), make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]));
    }
    const float2 bias = bias_of<E>(args, work);
    __threadfence();
    ptx::named_barrier(1, CONSUMERS);
    uint32_t* counter = args.counters + work.tile_index * args.row_blocks + work.row_block;
    if (threadIdx.x == 0) {
        atomicAdd(counter, 1u);
        while (ptx::load_acquire_device(counter) < static_cast<uint32_t>(args.splits)) {
        }
    }
    ptx::named_barrier(1, CONSUMERS);
    const int groups = (work.tile.z + 7) / 8;  // of columns
    for (int j = groups * work.split / args.splits; j < groups * (work.split + 1) / args.splits; ++j) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int item = first; item < first + args.splits; ++item) {
            const float4 values = __ldcg(part(item, j));
            sum.x += values.x, sum.y += values.y, sum.z += values.z, sum.w += values.w;
        }
        if (strip < args.strips) write_columns<Format, E>(args, work, bias, j, sum);
    }
    // Each split arrives twice; the last one leaves the counter as it was.
    ptx::named_barrier(1, CONSUMERS);
    if (threadIdx.x == 0 && atomicAdd(counter, 1u) == static_cast<uint32_t>(2 * args.splits - 1)) *counter = 0;
}

// The ends of a piece of the line: an item that another block begins is left to that one; to one that goes on in other blocks, theirs are
// added, in the order of blocks. They come to their part of it first, as a rule, so it is there by then; and all blocks of a launch
// fit the device at once. Returns whether the sums are now whole.
template <class Format, int NT, int COLUMNS>
__device__ bool join_pieces(const TileArgs& args, const Line<Format, NT>& line, const Work& work, float (&acc)[COLUMNS / 2]) {
    const auto part = [&](int piece, int j) {
        return args.partials + (static_cast<int64_t>(piece) * (NT / 8) + j) * CONSUMERS + threadIdx.x;
    };
    if (work.first_step > 0) {
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            __stcg(part(blockIdx.x, j), make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]));
        }
        __threadfence();
        ptx::named_barrier(1, CONSUMERS);
        if (threadIdx.x == 0) ptx::store_release_device(args.counters + blockIdx.x, 1);
        return false;
    }
    if (work.last_step == args.steps) return true;
    const int last = line.last_piece();
    for (int piece = blockIdx.x + 1; piece <= last; ++piece) {
        if (threadIdx.x == 0) {
            while (ptx::load_acquire_device(args.counters + piece) == 0) {
            }
            args.counters[piece] = 0;
        }
        ptx::named_barrier(1, CONSUMERS);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            const float4 sum = __ldcg(part(piece, j));
            acc[4 * j] += sum.x, acc[4 * j + 1] += sum.y, acc[4 * j + 2] += sum.z, acc[4 * j + 3] += sum.w;
        }
    }
    return true;
}

// acc += the products of `left` steps from `at` on, two a stage: `multiply`, below, for few columns of MXFP4.
//
// What bounds this is the number of instructions: unpacking takes 60 a step, all else some 30. So addresses are sums of few terms, and
// a stage's descriptors come from one register that the compiler knows to be the same in all lanes: others it would move, two words
// each, from lanes to the uniform unit.
template <class Format, int NT, int COLUMNS>
__device__ __forceinline__ void multiply_stages(const TileArgs& args, const uint8_t* x, const uint8_t* weights, Barriers& barriers,
                                                int tile_stride, int left, ptx::RingPosition& at, float (&acc)[COLUMNS / 2]) {
    constexpr int STAGE_BYTES = 2 * STRIPS * STEP_BYTES<Format>, STEP_DESCRIPTOR = NT * 128 / 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / packed::GROUP, in_group = warp % packed::GROUP;
    const uint8_t* mine = weights + 2 * group * packed::GROUP * STEP_BYTES<Format> + in_group * Format::TILE_BYTES;
    const uint64_t descriptor = ptx::matrix_descriptor(ptx::shared_address(x));
    uint32_t full = ptx::shared_address(barriers.full), empty = ptx::shared_address(barriers.empty);
    uint32_t first = static_cast<uint32_t>(descriptor);
    ptx::pin(full), ptx::pin(empty), ptx::pin(first);  // else each stage makes them anew
    const auto load = [&](int step) { return Format::load_words(mine + at.stage * STAGE_BYTES + step * tile_stride, lane); };
    const auto issue = [&](const typename Format::Words& words, uint32_t low, uint32_t(&a)[4][4]) {
        constexpr uint64_t HIGH = static_cast<uint64_t>(ptx::MATRIX_DESCRIPTOR_HIGH) << 32;
        Format::scaled_fragments(words, a);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::wgmma<COLUMNS>(acc, a[i], HIGH | (low + 2 * i), true);
        ptx::wgmma_commit();
    };
    const auto release = [&]() {
        if (lane == 0) ptx::mbarrier_arrive(empty + 8 * at.stage);
        at.next(args.stages);
    };
    // Two sets of fragments beside the sums of more than 48 columns would not fit the registers.
    for (; COLUMNS <= 48 && left > 1; left -= 2) {
        ptx::mbarrier_wait(full + 8 * at.stage, at.phase);
        const auto words = load(0), next = load(1);
        const uint32_t low = ptx::uniform(first + at.stage * (2 * STEP_DESCRIPTOR));
        uint32_t a[2][4][4];
        issue(words, low, a[0]);
        issue(next, low + STEP_DESCRIPTOR, a[1]);  // unpacked beside the first one's products
        ptx::wgmma_wait_all();
        release();
    }
    for (; left > 0; left -= 2) {
        ptx::mbarrier_wait(full + 8 * at.stage, at.phase);
        const uint32_t low = ptx::uniform(first + at.stage * (2 * STEP_DESCRIPTOR));
#pragma unroll 1
        for (int step = 0; step < min(left, 2); ++step) {
            uint32_t a[4][4];
            issue(load(step), low + step * STEP_DESCRIPTOR, a);
            ptx::wgmma_wait_all();
        }
        release();
    }
}

// acc += the products of `left` steps from `at` on. `tile_stride`: from one k-tile of this warp's strip to the next. `scales`: of
// this tile's blocks of rows, from step `step` on; Fp8 only.
//
// Many columns: a step's products take long enough to unpack the next step's fragments beside them, into a second set of registers.
// Few columns: a batch of DEPTH steps is unpacked, then multiplied; other warps fill the gaps.
template <class Format, int NT, int COLUMNS>
__device__ void multiply(const TileArgs& args, const uint8_t* x, const uint8_t* weights, Barriers& barriers, int tile_stride,
                         const float* scales, int step, int left, ptx::RingPosition& at, float (&acc)[COLUMNS / 2]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, in_group = warp % packed::GROUP;
    const auto unpack = [&](const ptx::RingPosition& position, uint32_t(&a)[4][4]) {
        float scale = 1.0f;
        if constexpr (Format::BLOCK_SCALES) scale = __ldg(scales + step++ / 2);
        ptx::mbarrier_wait(&barriers.full[position.stage], position.phase);
        const uint8_t* group = weights + (position.stage * STRIPS + warp - in_group) * STEP_BYTES<Format>;
        if constexpr (Format::BLOCK_SCALES) {
            Format::scaled_fragments(group + in_group * Format::TILE_BYTES, lane, scale, a);
        } else {
            Format::scaled_fragments(group + in_group * Format::TILE_BYTES, tile_stride, lane, a);
        }
    };
    const auto issue = [&](const ptx::RingPosition& position, const uint32_t(&a)[4][4]) {
        const uint64_t b = ptx::matrix_descriptor(ptx::shared_address(x) + position.stage * NT * 128);
        const uint32_t low = static_cast<uint32_t>(b), high = static_cast<uint32_t>(b >> 32);
#pragma unroll
        for (int step = 0; step < 4; ++step) {  // a sum of 32 bits: a tenth of the instructions here was carrying
            ptx::wgmma<COLUMNS>(acc, a[step], static_cast<uint64_t>(high) << 32 | (low + 2 * step), true);
        }
    };
    const auto release = [&]() {
        if (lane == 0) ptx::mbarrier_arrive(&barriers.empty[at.stage]);
        at.next(args.stages);
    };
    if constexpr (STAGE_STEPS<Format, NT> == 2) {
        multiply_stages<Format, NT, COLUMNS>(args, x, weights, barriers, tile_stride, left, at, acc);
    } else if constexpr (NT <= 64) {
        constexpr int DEPTH = NT == 32 ? 3 : 2;
        uint32_t a[DEPTH][4][4];
        for (; left >= DEPTH; left -= DEPTH) {
            ptx::RingPosition ahead = at;
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) unpack(ahead, a[d]), ahead.next(args.stages);
            ahead = at;
            ptx::wgmma_fence();
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) issue(ahead, a[d]), ahead.next(args.stages);
            ptx::wgmma_commit();
            ptx::wgmma_wait_all();
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) release();
        }
        for (; left > 0; --left) {
            unpack(at, a[0]);
            ptx::wgmma_fence();
            issue(at, a[0]);
            ptx::wgmma_commit();
            ptx::wgmma_wait_all();
            release();
        }
    } else {
        uint32_t a[2][4][4];
        unpack(at, a[0]);
        const auto advance = [&](const uint32_t(&now)[4][4], uint32_t(&next)[4][4], bool more) {
            ptx::wgmma_fence();
            issue(at, now);
            ptx::wgmma_commit();
            ptx::RingPosition following = at;
            following.next(args.stages);
            if (more) unpack(following, next);
            ptx::wgmma_wait_all();
            release();
        };
        for (; left > 1; left -= 2) {
            advance(a[0], a[1], true);
            advance(a[1], a[0], left > 2);
        }
        if (left == 1) advance(a[0], a[1], false);
    }
}

template <class Format, int NT, int COLUMNS, packed::Epilogue E>
__device__ void compute(const TileArgs& args, const Line<Format, NT>& line, const Work& work, const uint8_t* x,
                        const uint8_t* weights, Barriers& barriers, ptx::RingPosition& at) {
    // A group that does not exist yields sums that nobody reads.
    const int group_strips = args.strips - work.row_block * STRIPS - threadIdx.x / 32 / packed::GROUP * packed::GROUP;
    const int tile_stride = max(0, min(packed::GROUP, group_strips)) * Format::TILE_BYTES;
    float acc[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) acc[i] = 0.0f;
    const float* scales = args.scales + (work.tile.x * args.row_blocks + work.row_block) * ((args.steps + 1) / 2);
    multiply<Format, NT, COLUMNS>(args, x, weights, barriers, tile_stride, scales, work.first_step,
                                  work.last_step - work.first_step, at, acc);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) ptx::pin(acc[i]);
    if (args.splits > 1) return join_splits<Format, NT, COLUMNS, E>(args, work, line.at, acc);
    if (line.is_cut() && !join_pieces<Format, NT, COLUMNS>(args, line, work, acc)) return;
    if (work.row_block * STRIPS + static_cast<int>(threadIdx.x) / 32 >= args.strips) return;
    const float2 bias = bias_of<E>(args, work);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
        const float4 sum = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
        write_columns<Format, E>(args, work, bias, j, sum);
    }
}

template <class Format, int NT, packed::Epilogue E>
__device__ void consume(const TileArgs& args, const uint8_t* x, const uint8_t* weights, Barriers& barriers) {
    constexpr int STEP = BOX<Format, NT>;
    ptx::RingPosition at;
    for (Line<Format, NT> line(args); line.at < line.end;) {
        const Work work = line.work();
        if (STEP < NT && work.tile.z <= STEP) {
            compute<Format, NT, STEP, E>(args, line, work, x, weights, barriers, at);
        } else if (STEP < NT && work.tile.z <= 2 * STEP) {
            compute<Format, NT, STEP < NT ? 2 * STEP : NT, E>(args, line, work, x, weights, barriers, at);
        } else if (STEP < NT && work.tile.z <= 3 * STEP) {
            compute<Format, NT, STEP < NT ? 3 * STEP : NT, E>(args, line, work, x, weights, barriers, at);
        } else {
            compute<Format, NT, NT, E>(args, line, work, x, weights, barriers, at);
        }
        line.next(work);
    }
}

template <class Format, int NT, packed::Epilogue E>
__device__ void tile_gemm(const TileArgs& args) {
    extern __shared__ uint8_t shared[];
    __shared__ Barriers barriers;
    uint8_t* x = shared + (-ptx::shared_address(shared) & 1023);
    uint8_t* weights = x + args.stages * STAGE_STEPS<Format, NT> * NT * 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < args.stages; ++i) {
            ptx::mbarrier_init(&barriers.full[i], GROUPS + 1);
            ptx::mbarrier_init(&barriers.empty[i], CONSUMERS / 32);
        }
        ptx::fence_barrier_init();
        ptx::prefetch_tensor_map(&args.x);
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        ptx::give_registers<PRODUCER_REGISTERS>();
        const int role = (threadIdx.x - CONSUMERS) / 32;
        if (role <= GROUPS && threadIdx.x % 32 == 0) produce<Format, NT>(args, role, x, weights, barriers);
    } else {
        ptx::take_registers<CONSUMER_REGISTERS<NT>>();
        ptx::launch_dependents();
        ptx::grid_dependency_wait();
        consume<Format, NT, E>(args, x, weights, barriers);
    }
}

}  // namespace

#define TILE_GEMM(name, format, nt, epilogue)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<nt>) name(const __grid_constant__ TileArgs args) { \
        tile_gemm<packed::format, nt, packed::Epilogue::epilogue>(args);                                       \
    }
#define TILE_GEMM_WIDTHS(name, format, epilogue)  \
    TILE_GEMM(name##_n32, format, 32, epilogue)   \
    TILE_GEMM(name##_n64, format, 64, epilogue)   \
    TILE_GEMM(name##_n128, format, 128, epilogue) \
    TILE_GEMM(name##_n256, format, 256, epilogue)
TILE_GEMM_WIDTHS(tile_bf16, Bf16, BF16)
TILE_GEMM_WIDTHS(tile_bf16_f32, Bf16, F32)
TILE_GEMM_WIDTHS(tile_bf16_swiglu, Bf16, SWIGLU)
TILE_GEMM_WIDTHS(tile_mxfp4, Mxfp4, BF16)
TILE_GEMM_WIDTHS(tile_mxfp4_swiglu, Mxfp4, SWIGLU)
TILE_GEMM_WIDTHS(tile_fp8, Fp8, BF16)
TILE_GEMM_WIDTHS(tile_fp8_f32, Fp8, F32)
TILE_GEMM_WIDTHS(tile_fp8_swiglu, Fp8, SWIGLU)
