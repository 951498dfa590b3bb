// Widens one layer of some pages from E4M3 to bf16, exactly: out[i] = cache[page[i]], for prefill attention, whose tensor cores
// take both operands in 16 bits.
//
//   cache  pages of [layer of the group][kv head][K, V][token][dim] E4M3
//   out    the same of one layer, page after page, bf16
//
// A page's layer is one piece of memory. A thread takes 16 numbers; blockIdx.y is the page. Bound by memory.
#include "../ptx/e4m3.cuh"

struct UnpackKvArgs {
    const uint8_t* cache;
    __nv_bfloat16* out;
    const int32_t* pages;
    int64_t page_stride;   // elements
    int64_t layer_offset;  // elements from a page's start
    int64_t len;           // elements of a page's layer, a multiple of 16
};
static_assert(sizeof(UnpackKvArgs) == 48);

extern "C" __global__ void __launch_bounds__(256) unpack_kv(const __grid_constant__ UnpackKvArgs args) {
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
    if (at >= args.len) return;
    const int64_t page = args.pages[blockIdx.y];
    const uint4 packed = *reinterpret_cast<const uint4*>(args.cache + page * args.page_stride + args.layer_offset + at);
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
    uint32_t wide[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t low, high;
        ptx::unpack4_e4m3(words[i], low, high);
        wide[2 * i] = ptx::bf16_of_f16(low), wide[2 * i + 1] = ptx::bf16_of_f16(high);
    }
    uint4* out = reinterpret_cast<uint4*>(args.out + blockIdx.y * args.len + at);
    out[0] = make_uint4(wide[0], wide[1], wide[2], wide[3]);
    out[1] = make_uint4(wide[4], wide[5], wide[6], wide[7]);
}
