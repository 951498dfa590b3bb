// The finishers of skinny_gemm and skinny_experts, warps that share the strips of a group: sums of parts and of blocks, bias,
// activation, output.
#pragma once
#include "../ptx/wgmma.cuh"
#include "work.cuh"

namespace skinny {

__device__ __forceinline__ void add(float4& sum, const float4& term) {
    sum.x += term.x, sum.y += term.y, sum.z += term.z, sum.w += term.w;
}

// The first strip in its group of this warp.
__device__ __forceinline__ int first_strip() { return (threadIdx.x / 32 - CONSUMERS - 1) * STRIPS; }

// Where a block leaves its part of this warp's strips.
template <int NT>
__device__ __forceinline__ float4* join_place(const SkinnyArgs& args, int block) {
    return args.joins + (block * GROUP + first_strip()) * NT * 32 + threadIdx.x % 32;
}

// Leaves this block's part of a group for the block that begins the group.
template <int NT>
__device__ void post_part(const SkinnyArgs& args, const float4 (&sum)[STRIPS][NT]) {
    float4* place = join_place<NT>(args, blockIdx.x);
#pragma unroll
    for (int i = 0; i < STRIPS * NT; ++i) ptx::store_relaxed(place + i * 32, sum[i / NT][i % NT]);
}

// Adds up the parts that other blocks leave, waiting for them. Those blocks run: all blocks of a launch fit the device at once. Loads
// go out together, those of BLOCKS blocks at a time.
template <int NT, int BLOCKS>
__device__ void take_parts(const SkinnyArgs& args, const Range& range, int group_end, float4 (&sum)[STRIPS][NT]) {
    constexpr int COUNT = STRIPS * NT;  // of a block
    const float nothing = __uint_as_float(NOTHING);
    const int last = range.owner(group_end - 1);
#pragma unroll 1
    for (int first = blockIdx.x + 1; first <= last; first += BLOCKS) {
        const auto place = [&](int i) { return join_place<NT>(args, first + i / COUNT) + i % COUNT * 32; };
        const int parts = min(last + 1 - first, BLOCKS) * COUNT;
        float4 part[BLOCKS * COUNT];
        bool is_there;
        do {
            is_there = true;
#pragma unroll
            for (int i = 0; i < BLOCKS * COUNT; ++i) {
                part[i] = make_float4(0, 0, 0, 0);
                if (i < parts) part[i] = ptx::load_relaxed(place(i));
            }
#pragma unroll
            for (int i = 0; i < BLOCKS * COUNT; ++i) {
                is_there &= __float_as_uint(part[i].x) != NOTHING && __float_as_uint(part[i].y) != NOTHING &&
                            __float_as_uint(part[i].z) != NOTHING && __float_as_uint(part[i].w) != NOTHING;
            }
        } while (!is_there);
#pragma unroll
        for (int i = 0; i < BLOCKS * COUNT; ++i) {
            if (i >= parts) continue;
            add(sum[i % COUNT / NT][i % NT], part[i]);
            ptx::store_relaxed(place(i), make_float4(nothing, nothing, nothing, nothing));
        }
    }
}

// Of this warp's strips from `strip` on.
template <int NT, Epilogue E>
__device__ void write_strips(const SkinnyArgs& args, const int4& tile, int strip, const float2 (&bias)[STRIPS],
                             const float4 (&sum)[STRIPS][NT]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int64_t rows = static_cast<int64_t>(args.strips) * packed::STRIP_ROWS;
    float low[STRIPS][NT][2], high[STRIPS][NT][2];
#pragma unroll
    for (int i = 0; i < STRIPS * NT; ++i) {
        const int s = i / NT, n = i % NT;
        const float4& v = sum[s][n];
        low[s][n][0] = v.x + bias[s].x, low[s][n][1] = v.y + bias[s].x;
        high[s][n][0] = v.z + bias[s].y, high[s][n][1] = v.w + bias[s].y;
        if constexpr (E == Epilogue::SWIGLU) {  // of columns that nobody has too: side by side, they take no longer
            low[s][n][0] = swiglu(low[s][n][0], high[s][n][0]), low[s][n][1] = swiglu(low[s][n][1], high[s][n][1]);
            ptx::pin(low[s][n][0]), ptx::pin(low[s][n][1]);
        }
    }
#pragma unroll
    for (int i = 0; i < STRIPS * NT * 2; ++i) {
        const int s = i / (NT * 2), n = i / 2 % NT, column = n * 8 + 2 * t + i % 2;
        if (column >= tile.z || strip + s >= args.strips) continue;
        const int64_t slot = tile.y + column;
        const int2 row = packed::rows_of<E>(strip + s);
        const float value0 = low[s][n][i % 2], value1 = high[s][n][i % 2];
        if constexpr (E == Epilogue::SWIGLU) {
            static_cast<__nv_bfloat16*>(args.out)[slot * (rows / 2) + (strip + s) * 8 + g] = __float2bfloat16(value0);
        } else if constexpr (E == Epilogue::F32) {
            static_cast<float*>(args.out)[slot * rows + row.x] = value0;
            static_cast<float*>(args.out)[slot * rows + row.y] = value1;
        } else {
            static_cast<__nv_bfloat16*>(args.out)[slot * rows + row.x] = __float2bfloat16(value0);
            static_cast<__nv_bfloat16*>(args.out)[slot * rows + row.y] = __float2bfloat16(value1);
        }
    }
}

// Says that this warp has written a group, once that is so for others too. The last one of a tile leaves the counter as it was: all that
// wait for the tile's activations have a part in the groups that came after them.
__device__ __forceinline__ void count_group(const SkinnyArgs& args, int tile) {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    uint32_t* done = args.done + tile;
    if (args.awaited_groups == 0) {
        ptx::add_release_device(done, 1);
    } else if (atomicAdd(done, 1u) + 1 == static_cast<uint32_t>((args.awaited_groups + args.groups) * FINISHERS)) {
        *done = 0;
    }
}

template <int NT, Epilogue E>
__device__ void finish(const SkinnyArgs& args, const Range& range, const float4* sums, Barriers& barriers, uint32_t& phase) {
    const int lane = threadIdx.x % 32;
    int written = -1;  // tile of a group that has been written and not been counted
    for (Cursor unit(args, range.begin); unit.index < range.end; phase ^= 1) {
        const int group_begin = unit.index - unit.part, group_end = group_begin + args.group_units;
        const int4 tile = tile_of(args, unit.tile);
        const int strip = unit.group * GROUP + first_strip();
        float2 bias[STRIPS] = {};
        if (args.bias) {  // before the sums are waited for
#pragma unroll
            for (int s = 0; s < STRIPS; ++s) {
                const int2 row = packed::rows_of<E>(min(strip + s, args.strips - 1));
                const __nv_bfloat16* expert = args.bias + static_cast<int64_t>(tile.x) * args.strips * packed::STRIP_ROWS;
                bias[s] = make_float2(__bfloat162float(expert[row.x]), __bfloat162float(expert[row.y]));
            }
        }
        const bool begins = unit.part == 0;
        float4 sum[STRIPS][NT];
#pragma unroll
        for (int i = 0; i < STRIPS * NT; ++i) sum[i / NT][i % NT] = make_float4(0, 0, 0, 0);
        if (begins && group_end > range.end) take_parts<NT, 2>(args, range, group_end, sum);
        ptx::mbarrier_wait(&barriers.sums_full, phase);
#pragma unroll
        for (int i = 0; i < STRIPS * NT; ++i) {
            if (i % NT > 0 && i % NT * 8 >= tile.z) continue;  // columns that nobody has
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                add(sum[i / NT][i % NT], sums[((part * GROUP + first_strip()) * NT + i) * 32 + lane]);
            }
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&barriers.sums_empty);
        if (written >= 0) count_group(args, written);  // which takes a while: consumers do not wait for it
        written = -1;
        if (begins) {
            write_strips<NT, E>(args, tile, strip, bias, sum);
            if (args.done) written = unit.tile;
        } else {
            post_part<NT>(args, sum);
        }
        unit.index = group_end;
        unit.next_group(args);
    }
    if (written >= 0) count_group(args, written);
}

}  // namespace skinny
