// Rotates queries and keys by position (YaRN tables come from the host) and writes keys and values into their pages.
//
//   qkv      [tokens, (q_heads + 2 kv_heads) * dim] bf16: queries, keys, values
//   q        [tokens, q_heads, dim] bf16, rotated
//   angles   [positions, dim / 2] of {cos, sin} f32
//   cache    pages of [layer of the group][kv head][K, V][token][dim], bf16 or E4M3 (rounded once, from f32)
//   position [tokens]; negative for padding rows, which write nothing to the cache
//
// Half-split form: channel i pairs with i + dim / 2. Block = one token; a thread takes 8 channels and their partners of one query or
// key head, or 16 channels of a value head. Reads and writes each value once; bound by memory, for one token by latency.
#include "../rows/rows.cuh"
#include "../ptx/e4m3.cuh"

struct RopeKvArgs {
    const __nv_bfloat16* qkv;
    __nv_bfloat16* q;
    uint8_t* cache;
    const float2* angles;
    const int32_t* position;
    const int32_t* sequence;     // row of the page table of each token; null: the token itself
    const int32_t* page_table;   // [sequences, table_width]
    const int32_t* first_page;   // logical page of each row's first entry; null: 0
    int64_t page_stride;         // elements
    int64_t layer_offset;        // elements from a page's start
    int32_t table_width;
    int32_t page_tokens;
    int32_t q_heads;
    int32_t kv_heads;
    int32_t dim;
    int32_t is_e4m3;             // whether the cache is
};
static_assert(sizeof(RopeKvArgs) == 104);

extern "C" __global__ void __launch_bounds__(1024) rope_kv(const __grid_constant__ RopeKvArgs args) {
    const int half = args.dim / 2, pieces = half / 8, token = blockIdx.x;
    const int head = threadIdx.x / pieces, channel = threadIdx.x % pieces * 8;
    const int heads = args.q_heads + 2 * args.kv_heads;
    ptx::launch_dependents();
    ptx::grid_dependency_wait();
    if (head >= heads) return;
    const int position = args.position[token];
    const __nv_bfloat16* in = args.qkv + (static_cast<int64_t>(token) * heads + head) * args.dim + channel;
    uint4 first = *reinterpret_cast<const uint4*>(in), second = *reinterpret_cast<const uint4*>(in + half);
    const bool is_value = head >= args.q_heads + args.kv_heads;
    float a[8], b[8];
    rows::unpack8(first, a), rows::unpack8(second, b);
    if (!is_value) {
        const float2* angle = args.angles + static_cast<int64_t>(max(position, 0)) * half + channel;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float2 cos_sin = angle[i];
            const float x = a[i], y = b[i];
            a[i] = x * cos_sin.x - y * cos_sin.y;
            b[i] = y * cos_sin.x + x * cos_sin.y;
        }
        first = rows::pack8(a), second = rows::pack8(b);
    }
    __nv_bfloat16* out;
    if (head < args.q_heads) {
        out = args.q + (static_cast<int64_t>(token) * args.q_heads + head) * args.dim + channel;
    } else {
        if (position < 0) return;
        const int row = args.sequence ? args.sequence[token] : token;
        const int entry = position / args.page_tokens - (args.first_page ? args.first_page[row] : 0);
        const int64_t page = args.page_table[static_cast<int64_t>(row) * args.table_width + entry];
        const int kv_head = (head - args.q_heads) % args.kv_heads;
        const int64_t plane = static_cast<int64_t>(args.page_tokens) * args.dim;
        const int64_t at = page * args.page_stride + args.layer_offset + (2 * kv_head + is_value) * plane +
                           static_cast<int64_t>(position % args.page_tokens) * args.dim + channel;
        if (args.is_e4m3) {
            const auto pack = [](const float (&x)[8]) {
                return make_uint2(ptx::pack4_e4m3(x[0], x[1], x[2], x[3]), ptx::pack4_e4m3(x[4], x[5], x[6], x[7]));
            };
            *reinterpret_cast<uint2*>(args.cache + at) = pack(a);
            *reinterpret_cast<uint2*>(args.cache + at + half) = pack(b);
            return;
        }
        out = reinterpret_cast<__nv_bfloat16*>(args.cache) + at;
    }
    *reinterpret_cast<uint4*>(out) = first;
    *reinterpret_cast<uint4*>(out + half) = second;
}
