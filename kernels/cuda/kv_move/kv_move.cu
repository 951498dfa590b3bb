// Pieces of KV between pages, which lie anywhere, and staging, where they lie one behind the other:
//   kv_gather:  staging[i] = page piece i        kv_scatter:  page piece i = staging[i]
// and, if asked for, checksum[i] = sum over j of mix(word j of piece i, j) mod 2^32, of the words as they were read.
// A piece is a number of whole 16-byte words (one head of 64 positions: 16 KiB). A block takes a piece at a time, so that its checksum
// needs no atomics; few blocks are launched, since these kernels run beside a forward pass. Bound by memory.
#include "../ptx/ptx.cuh"

struct KvMoveArgs {
    const uint64_t* pieces;  // addresses in pages
    uint4* staging;
    uint32_t* checksums;  // or null
    int32_t num_pieces;
    int32_t piece_words;  // of 16 bytes
};
static_assert(sizeof(KvMoveArgs) == 32);

namespace {

constexpr int THREADS = 512, UNROLL = 8;

// Every bit of the word, and its place, changes about half of the sum's bits.
__device__ __forceinline__ uint32_t mix(uint32_t word, uint32_t place) {
    uint32_t x = word + place * 0x9e3779b1u;
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    return x ^ (x >> 13);
}

__device__ __forceinline__ uint32_t mix4(uint4 words, int at) {
    const uint32_t place = 4u * static_cast<uint32_t>(at);
    return mix(words.x, place) + mix(words.y, place + 1) + mix(words.z, place + 2) + mix(words.w, place + 3);
}

template <bool TO_PAGES>
__device__ __forceinline__ void kv_move(const KvMoveArgs& args) {
    __shared__ uint32_t partial[THREADS / 32];
    for (int piece = blockIdx.x; piece < args.num_pieces; piece += gridDim.x) {
        uint4* pages = reinterpret_cast<uint4*>(args.pieces[piece]);
        uint4* staging = args.staging + static_cast<int64_t>(piece) * args.piece_words;
        const uint4* from = TO_PAGES ? staging : pages;
        uint4* to = TO_PAGES ? pages : staging;
        uint32_t sum = 0;
        for (int start = threadIdx.x; start < args.piece_words; start += THREADS * UNROLL) {
            uint4 words[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (start + u * THREADS < args.piece_words) words[u] = __ldcs(from + start + u * THREADS);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int at = start + u * THREADS;
                if (at < args.piece_words) {
                    to[at] = words[u];
                    if (args.checksums != nullptr) sum += mix4(words[u], at);
                }
            }
        }
        if (args.checksums != nullptr) {
#pragma unroll
            for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
            if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
            __syncthreads();
            if (threadIdx.x == 0) {
                for (int warp = 1; warp < THREADS / 32; ++warp) sum += partial[warp];
                args.checksums[piece] = sum;
            }
            __syncthreads();
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) kv_gather(const __grid_constant__ KvMoveArgs args) {
    kv_move<false>(args);
}

extern "C" __global__ void __launch_bounds__(THREADS) kv_scatter(const __grid_constant__ KvMoveArgs args) {
    kv_move<true>(args);
}
