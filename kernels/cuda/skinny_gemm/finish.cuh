// The epilogue warp of skinny_gemm and skinny_experts: sums of parts and of blocks, bias, activation, output.
#pragma once
#include "work.cuh"

namespace skinny {

__device__ __forceinline__ void add(float4& sum, const float4& term) {
    sum.x += term.x, sum.y += term.y, sum.z += term.z, sum.w += term.w;
}

// Leaves this block's part of a group for the block that begins the group.
template <int NT>
__device__ void post_part(const SkinnyArgs& args, const float4 (&sum)[GROUP][NT]) {
    float4* place = args.joins + blockIdx.x * GROUP * NT * 32 + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < GROUP * NT; ++i) ptx::store_relaxed(place + i * 32, sum[i / NT][i % NT]);
}

// Adds up the parts that other blocks leave, waiting for them. Those blocks run: all blocks of a launch fit the device at once. Loads
// go out together, those of BLOCKS blocks at a time.
template <int NT, int BLOCKS>
__device__ void take_parts(const SkinnyArgs& args, const Range& range, int group_end, float4 (&sum)[GROUP][NT]) {
    constexpr int COUNT = GROUP * NT;  // of a block
    const float nothing = __uint_as_float(NOTHING);
    const int last = range.owner(group_end - 1);
#pragma unroll 1
    for (int first = blockIdx.x + 1; first <= last; first += BLOCKS) {
        float4* place = args.joins + first * COUNT * 32 + threadIdx.x % 32;
        const int parts = min(last + 1 - first, BLOCKS) * COUNT;
        float4 part[BLOCKS * COUNT];
        bool is_there;
        do {
            is_there = true;
#pragma unroll
            for (int i = 0; i < BLOCKS * COUNT; ++i) {
                part[i] = make_float4(0, 0, 0, 0);
                if (i < parts) part[i] = ptx::load_relaxed(place + i * 32);
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
            ptx::store_relaxed(place + i * 32, make_float4(nothing, nothing, nothing, nothing));
        }
    }
}

template <class Format, int NT, Epilogue E>
__device__ void write_strip(const SkinnyArgs& args, const int4& tile, int strip, float2 bias, const float4 (&sum)[NT]) {
    constexpr float UNSCALE = BY_WARPGROUPS<Format, NT> ? Format::UNSCALE : 1.0f;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int64_t rows = static_cast<int64_t>(args.strips) * packed::STRIP_ROWS;
    const int2 row = packed::rows_of<E>(strip);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const float low[2] = {sum[n].x, sum[n].y}, high[2] = {sum[n].z, sum[n].w};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = n * 8 + 2 * t + i;
            if (column >= tile.z) continue;
            const int64_t slot = tile.y + column;
            const float value0 = fmaf(low[i], UNSCALE, bias.x), value1 = fmaf(high[i], UNSCALE, bias.y);
            if constexpr (E == Epilogue::SWIGLU) {
                static_cast<__nv_bfloat16*>(args.out)[slot * (rows / 2) + strip * 8 + g] =
                    __float2bfloat16(swiglu(value0, value1));
            } else if constexpr (E == Epilogue::F32) {
                static_cast<float*>(args.out)[slot * rows + row.x] = value0;
                static_cast<float*>(args.out)[slot * rows + row.y] = value1;
            } else {
                static_cast<__nv_bfloat16*>(args.out)[slot * rows + row.x] = __float2bfloat16(value0);
                static_cast<__nv_bfloat16*>(args.out)[slot * rows + row.y] = __float2bfloat16(value1);
            }
        }
    }
}

// Says that this warp has written a group. The last one of a tile leaves the counter as it was: all that wait for the tile's
// activations have a part in the groups that came after them.
__device__ __forceinline__ void count_group(const SkinnyArgs& args, int tile) {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    uint32_t* done = args.done + tile;
    if (args.awaited_groups == 0) {
        ptx::add_release_device(done, 1);
    } else if (atomicAdd(done, 1u) + 1 == static_cast<uint32_t>(args.awaited_groups + args.groups)) {
        *done = 0;
    }
}

template <class Format, int NT, Epilogue E>
__device__ void finish(const SkinnyArgs& args, const Range& range, const float4* sums, Barriers& barriers, uint32_t& phase) {
    const int lane = threadIdx.x % 32;
    for (Cursor unit(args, range.begin); unit.index < range.end; phase ^= 1) {
        const int group_begin = unit.index - unit.part, group_end = group_begin + args.group_units;
        const int4 tile = tile_of(args, unit.tile);
        float2 bias[GROUP] = {};
        if (args.bias) {  // before the sums are waited for
#pragma unroll
            for (int s = 0; s < GROUP; ++s) {
                const int2 row = packed::rows_of<E>(min(unit.group * GROUP + s, args.strips - 1));
                const __nv_bfloat16* expert = args.bias + static_cast<int64_t>(tile.x) * args.strips * packed::STRIP_ROWS;
                bias[s] = make_float2(__bfloat162float(expert[row.x]), __bfloat162float(expert[row.y]));
            }
        }
        const bool begins = unit.part == 0;
        float4 sum[GROUP][NT];
#pragma unroll
        for (int i = 0; i < GROUP * NT; ++i) sum[i / NT][i % NT] = make_float4(0, 0, 0, 0);
        if (begins && group_end > range.end) take_parts<NT, NT == 1 ? 2 : 1>(args, range, group_end, sum);
        ptx::mbarrier_wait(&barriers.sums_full, phase);
#pragma unroll
        for (int i = 0; i < GROUP * NT; ++i) {
            if (i % NT > 0 && i % NT * 8 >= tile.z) continue;  // columns that nobody has
#pragma unroll
            for (int part = 0; part < PARTS<Format, NT>; ++part) {
                add(sum[i / NT][i % NT], sums[(part * GROUP * NT + i) * 32 + lane]);
            }
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&barriers.sums_empty);
        if (begins) {
#pragma unroll
            for (int s = 0; s < GROUP; ++s) {
                const int strip = unit.group * GROUP + s;
                if (strip < args.strips) write_strip<Format, NT, E>(args, tile, strip, bias[s], sum[s]);
            }
            if (args.done) count_group(args, unit.tile);
        } else {
            post_part<NT>(args, sum);
        }
        unit.index = group_end;
        unit.next_group(args);
    }
}

}  // namespace skinny
