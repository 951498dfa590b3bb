// What exchanges over peer memory have in common: a rank's weighted sum of experts, values in packets, and residual add and norm.
//
// A packet is 32 bits of data and the number of the exchange, in a word that is written whole: data and their arrival are one, so
// one way over NVLink and no fence, at twice the bytes. Thread = 8 values of a token, 4 packets.
#pragma once
#include "../ptx/peer.cuh"
#include "../rows/rows.cuh"

namespace exchange {

using ptx::MAX_RANKS;
constexpr int LOADS = 4;          // outputs of experts that a thread has on their way at once
constexpr int MAX_THREADS = 512;  // hidden is at most 8 times that

// Fields of Args: `y` [slots, hidden], `weight` and `slot` [tokens, top], `top`, `hidden`.
template <class Args>
__device__ __forceinline__ uint4 weighted_sum(const Args& args, int token, int first) {
    float sum[8] = {};
    for (int begin = 0; begin < args.top; begin += LOADS) {
        uint4 y[LOADS];
        float weight[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {  // all loads first
            const int j = begin + i, slot = j < args.top ? args.slot[token * args.top + j] : -1;
            weight[i] = j < args.top ? args.weight[token * args.top + j] : 0.0f;
            y[i] = make_uint4(0, 0, 0, 0);
            if (slot >= 0) y[i] = *reinterpret_cast<const uint4*>(args.y + static_cast<int64_t>(slot) * args.hidden + first);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {  // beyond `top`, zeros are added
            float values[8];
            rows::unpack8(y[i], values);
#pragma unroll
            for (int k = 0; k < 8; ++k) sum[k] = fmaf(weight[i], values[k], sum[k]);
        }
    }
    return rows::pack8(sum);
}

// This thread's part of norm(residual + delta), of which the residual is written to its place: `token` of Args' `residual`, [tokens,
// hidden]. All threads of the block take part. Other fields of Args: `hidden`, `eps`.
template <class Args>
__device__ __forceinline__ uint4 add_norm(const Args& args, int token, int first, bool used, const uint4& delta,
                                          const uint4& norm_weight, const uint4& residual) {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (used) {
        x = rows::add8(residual, delta);
        *reinterpret_cast<uint4*>(args.residual + static_cast<int64_t>(token) * args.hidden + first) = x;
    }
    return rows::block_norm(x, norm_weight, args.hidden, args.eps);
}

__device__ __forceinline__ void add(float (&sum)[8], const uint4& part) {
    float values[8];
    rows::unpack8(part, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += values[i];
}

__device__ __forceinline__ uint64_t packet(uint32_t data, uint32_t epoch) {
    return static_cast<uint64_t>(epoch) << 32 | data;
}

// Writes 8 values to `inbox`, 4 words.
__device__ __forceinline__ void send(uint64_t* inbox, const uint4& values, uint32_t epoch) {
    ptx::store_pair(inbox, packet(values.x, epoch), packet(values.y, epoch));
    ptx::store_pair(inbox + 2, packet(values.z, epoch), packet(values.w, epoch));
}

// Waits for the parts in `missing`, a bit each, of SENDERS parts that lie `step` words from one another.
template <int SENDERS>
__device__ __forceinline__ void receive(uint4 (&parts)[SENDERS], uint32_t missing, const uint64_t* inbox, int64_t step, uint32_t epoch,
                                        ptx::Patience& patience) {
    constexpr int GROUP = SENDERS < 4 ? SENDERS : 4;  // parts looked for at once
    while (missing != 0) {
#pragma unroll
        for (int base = 0; base < SENDERS; base += GROUP) {
            uint64_t words[GROUP][2][2];
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {  // all loads first
                if (!(missing >> (base + i) & 1)) continue;
                ptx::load_pair(inbox + (base + i) * step, words[i][0]);
                ptx::load_pair(inbox + (base + i) * step + 2, words[i][1]);
            }
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                if (!(missing >> (base + i) & 1)) continue;
                const auto& [low, high] = words[i];
                if (low[0] >> 32 != epoch || low[1] >> 32 != epoch || high[0] >> 32 != epoch || high[1] >> 32 != epoch) continue;
                parts[base + i] = make_uint4(low[0], low[1], high[0], high[1]);
                missing &= ~(1u << (base + i));
            }
        }
        if (missing != 0 && patience.is_over()) break;
    }
}

}  // namespace exchange
