// From logits to a token, one row a sequence, in this order: repetition, frequency and presence penalties, bias, masks; temperature;
// top-k; top-p over what top-k left; min-p; the draw. Log-probabilities are those of the logits as they come in.
//
// A cluster of 8 blocks takes a row; each block keeps its eighth of the vocabulary in shared memory, so logits are read once. All
// decisions are made on integers, whose sums do not depend on order or batch:
//   rank    e = (greatest logit - logit) / temperature in units of 28 / 2^30: 30 bits; equal ranks: the lower id first
//   weight  2^40 exp(-e) of the rank, rounded down; zero from e = 27.7 on
// Top-k, top-p and the draw under them look for the token at which a running sum over the order of ranks reaches a target: three
// histogram passes of 10 bits each. Where top-k or top-p leaves few tokens, one pass finds them, and block 0 sorts them and goes on
// alone. Without top-k and top-p the running sum follows the ids, in one pass.
//
// A row whose logits are not all numbers below infinity, or of which nothing is allowed, reports it in `status`; its token is 0. Of all
// others the greatest logit is finite, so it has rank 0 and the greatest weight, and a token is found whatever the rest is.
// Shared memory: a slice of logits (100 KB for 201088 tokens) and a histogram of 12 KB.
#include <cfloat>

#include "../ptx/order.cuh"
#include "philox.cuh"

struct SampleRow {
    uint64_t seed;
    uint32_t choice;
    uint32_t output_idx;
    float temperature;  // 0: the greatest logit, lowest id among equals
    float top_p;        // 1: off
    float min_p;        // 0: off
    uint32_t top_k;     // 0: off
    float presence_penalty;
    float frequency_penalty;
    float repetition_penalty;
    int32_t counts_row;  // row of `counts`; negative: no penalties
    int32_t mask_row;    // row of `masks`; negative: none
    int32_t bias_first;  // entries of the bias list
    int32_t bias_count;
    int32_t logprobs;    // alternatives to report, at most 20; negative: not even the token's own
};
static_assert(sizeof(SampleRow) == 64);

struct SampleArgs {
    const float* logits;          // [rows, vocab]
    const SampleRow* rows;
    int32_t* token;               // [rows]
    uint32_t* status;             // [rows]: 0 sampled, 1 a NaN or +inf, 2 nothing allowed
    float* logprob;               // [rows]
    int32_t* top_token;           // [rows, 20]
    float* top_logprob;           // [rows, 20]
    uint16_t* counts;             // [count rows, vocab]: 0 unseen, 1 in the prompt only, 1 + n generated n times
    const uint32_t* masks;        // [mask rows, ceil(vocab / 32)], bit set: allowed
    const uint32_t* assigned;     // ids that exist, as a mask; null: all
    const int32_t* bias_token;
    const float* bias_value;
    int32_t vocab;
    int32_t slice;                // tokens of a block, a multiple of 4
};
static_assert(sizeof(SampleArgs) == 104);

namespace {

constexpr int CLUSTER = 8, THREADS = 512, WARPS = THREADS / 32, BINS = 1024, MAX_TOP = 20;
constexpr float WEIGHT_ONE = 1099511627776.0f;                  // 2^40
constexpr float MAX_DISTANCE = 28.0f;                           // weights are zero beyond
constexpr float RANKS_A_UNIT = 1073741824.0f / MAX_DISTANCE;    // 2^30 / 28
constexpr uint64_t EVERYTHING = ~0ull;
constexpr uint32_t NEVER = ~0u;                                 // rank of a token without weight

// Shared memory has no native 64-bit addition, so weights are counted in pieces of 14 bits, which a slice cannot overflow.
constexpr int PIECES = 3, PIECE_BITS = 14;
constexpr int MAX_LISTED = BINS;                                // tokens that block 0 sorts

struct Shared {
    union {
        uint32_t pieces[PIECES][BINS];
        uint64_t histogram[BINS];
        uint64_t list[MAX_LISTED];
    };
    uint32_t listed;
    uint64_t slot[2];        // this block's part of a cluster-wide reduction, by turns
    uint64_t warp[WARPS];
    uint64_t found[2];
};

// One row, as its cluster sees it.
class Row {
  public:
    __device__ Row(const SampleArgs& args, Shared& shared, float* logits)
        : args_(args), shared_(shared), logits_(logits), row_(blockIdx.x / CLUSTER), rank_(ptx::cluster_rank()) {
        first_ = rank_ * args.slice;
        count_ = max(0, min(args.slice, args.vocab - first_));
    }

    __device__ void run() {
        const SampleRow params = args_.rows[row_];
        bool is_broken = false;  // a NaN, or +inf, beside which no weight is a number
        const float* source = args_.logits + static_cast<int64_t>(row_) * args_.vocab + first_;
#pragma unroll 8
        for (int i = threadIdx.x; i < count_; i += THREADS) {
            const float logit = source[i];
            logits_[i] = logit;
            is_broken |= !(logit < INFINITY);
        }
        __syncthreads();
        if (reduce<true>(is_broken) != 0) return fail(1);

        float log_sum = 0.0f;
        if (params.logprobs >= 0) log_sum = report_top(params.logprobs);
        adjust(params);
        const uint64_t best = reduce<true>(best_key(EVERYTHING));
        top_ = ptx::key_value(best);
        if (best == 0 || top_ == -INFINITY) return fail(2);
        if (!(top_ < INFINITY)) return fail(1);  // by a penalty
        int token = ptx::key_number(best);
        if (params.temperature > 0.0f) token = draw(params);
        if (rank_ != 0 || threadIdx.x != 0) return;
        args_.token[row_] = token;
        args_.status[row_] = 0;
        if (params.logprobs >= 0) {
            args_.logprob[row_] = args_.logits[static_cast<int64_t>(row_) * args_.vocab + token] - log_sum;
        }
        if (params.counts_row >= 0) {
            uint16_t& count = args_.counts[static_cast<int64_t>(params.counts_row) * args_.vocab + token];
            count = count < 1 ? 2 : min(count + 1, 0xffff);
        }
    }

  private:
    // Greatest (or sum) of `value` over the cluster, to every thread.
    template <bool MAX>
    __device__ uint64_t reduce(uint64_t value) {
        const auto merge = [](uint64_t a, uint64_t b) { return MAX ? max(a, b) : a + b; };
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) value = merge(value, __shfl_xor_sync(~0u, value, lanes));
        if (threadIdx.x % 32 == 0) shared_.warp[threadIdx.x / 32] = value;
        __syncthreads();
        if (threadIdx.x < 32) {
            value = threadIdx.x < WARPS ? shared_.warp[threadIdx.x] : 0;
#pragma unroll
            for (int lanes = WARPS / 2; lanes > 0; lanes /= 2) value = merge(value, __shfl_xor_sync(~0u, value, lanes));
            if (threadIdx.x == 0) shared_.slot[turn_] = value;
        }
        ptx::cluster_barrier();
        value = 0;
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) value = merge(value, ptx::read_cluster(&shared_.slot[turn_], rank));
        turn_ ^= 1;  // a slot is written again only after the barrier of the reduction between
        return value;
    }

    // This thread's best key below `bound`; 0 if none.
    __device__ uint64_t best_key(uint64_t bound) const {
        uint64_t best = 0;
        for (int i = threadIdx.x; i < count_; i += THREADS) {
            const uint64_t key = ptx::order_key(logits_[i], first_ + i);
            if (key < bound) best = max(best, key);
        }
        return best;
    }

    // Writes the `wanted` most probable tokens; returns the logarithm of the sum of exponentials.
    __device__ float report_top(int wanted) {
        uint64_t bound = reduce<true>(best_key(EVERYTHING));
        const float top = ptx::key_value(bound);
        double sum = 0.0;
        for (int i = threadIdx.x; i < count_; i += THREADS) sum += ptx::exp2_approx((logits_[i] - top) * ptx::LOG2E);
        // 2^-32 of the greatest term is far below what a logarithm in f32 shows.
        const double total = static_cast<double>(reduce<false>(static_cast<uint64_t>(sum * 4294967296.0))) / 4294967296.0;
        const float log_sum = top + static_cast<float>(log(total));
        for (int j = 0; j < min(wanted, MAX_TOP); ++j) {
            if (rank_ == 0 && threadIdx.x == 0) {
                args_.top_token[row_ * MAX_TOP + j] = ptx::key_number(bound);
                args_.top_logprob[row_ * MAX_TOP + j] = ptx::key_value(bound) - log_sum;
            }
            if (j + 1 < wanted) bound = reduce<true>(best_key(bound));
        }
        return log_sum;
    }

    __device__ void adjust(const SampleRow& params) {
        const int words = (args_.vocab + 31) / 32;
        const uint16_t* counts = args_.counts + static_cast<int64_t>(max(params.counts_row, 0)) * args_.vocab + first_;
        const uint32_t* mask = args_.masks + static_cast<int64_t>(max(params.mask_row, 0)) * words;
        for (int i = threadIdx.x; i < count_ && params.counts_row >= 0; i += THREADS) {
            const int count = counts[i];
            if (count == 0) continue;
            float logit = logits_[i];
            logit = logit > 0.0f ? logit / params.repetition_penalty : logit * params.repetition_penalty;
            if (count > 1) logit -= params.frequency_penalty * (count - 1) + params.presence_penalty;
            logits_[i] = logit;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < params.bias_count; i += THREADS) {
            const int local = args_.bias_token[params.bias_first + i] - first_;
            if (local >= 0 && local < count_) atomicAdd(&logits_[local], args_.bias_value[params.bias_first + i]);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < count_; i += THREADS) {
            const int id = first_ + i;
            bool allowed = params.mask_row < 0 || (mask[id / 32] >> (id % 32) & 1);
            if (args_.assigned) allowed = allowed && (args_.assigned[id / 32] >> (id % 32) & 1);
            if (!allowed) logits_[i] = -INFINITY;
        }
        __syncthreads();
    }

    // From here on the slice holds ranks in place of logits.
    __device__ int draw(const SampleRow& params) {
        // Of a subnormal temperature the inverse would be infinite, and the greatest logit's distance, 0 times it, no number.
        const float inverse_temperature = fminf(1.0f / params.temperature, FLT_MAX);
        for (int i = threadIdx.x; i < count_; i += THREADS) {
            const float distance = (top_ - logits_[i]) * inverse_temperature;
            const bool never = !(distance < MAX_DISTANCE);
            logits_[i] = __uint_as_float(never ? NEVER : static_cast<uint32_t>(distance * RANKS_A_UNIT));
        }
        __syncthreads();
        const uint64_t u = philox::uniform_bits(params.seed, params.choice, params.output_idx, 0);
        const bool by_rank = params.top_p < 1.0f || (params.top_k > 0 && params.top_k < static_cast<uint32_t>(args_.vocab));
        if (by_rank) {
            const int token = draw_from_few(params, u);
            if (token >= 0) return token;
        }
        uint64_t bound = EVERYTHING - 1;  // of what is kept
        if (params.top_k > 0 && by_rank) bound = select<false>(bound, params.top_k);
        if (params.top_p < 1.0f) {
            bound = min(bound, select<true>(bound, nucleus(params, mass(bound))));
        }
        if (params.min_p > 0.0f) {
            const float least = fminf(-logf(params.min_p), MAX_DISTANCE) * RANKS_A_UNIT;
            bound = min(bound, static_cast<uint64_t>(least) << 32 | 0xffffffffu);
        }
        const uint64_t target = __umul64hi(u, mass(bound)) + 1;
        if (by_rank) return static_cast<int>(static_cast<uint32_t>(select<true>(bound, target)));
        return find_by_id<true>(NEVER, bound, target);
    }

    __device__ uint32_t rank(int i) const { return __float_as_uint(logits_[i]); }
    __device__ uint64_t order(int i) const { return static_cast<uint64_t>(rank(i)) << 32 | (first_ + i); }
    // Of a rank that is not `NEVER`.
    __device__ static uint64_t weight(uint32_t rank) {
        return static_cast<uint64_t>(ptx::exp2_approx(rank * (-ptx::LOG2E / RANKS_A_UNIT)) * WEIGHT_ONE);
    }

    __device__ uint64_t mass(uint64_t bound) {
        uint64_t sum = 0;
        for (int i = threadIdx.x; i < count_; i += THREADS) {
            if (rank(i) != NEVER && order(i) <= bound) sum += weight(rank(i));
        }
        return reduce<false>(sum);
    }

    // Inclusive prefix sum over the block.
    __device__ uint64_t scan(uint64_t value) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            const uint64_t below = __shfl_up_sync(~0u, value, lanes);
            if (lane >= lanes) value += below;
        }
        __syncthreads();  // an earlier result may still be read
        if (lane == 31) shared_.warp[warp] = value;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < WARPS; ++i) value += i < warp ? shared_.warp[i] : 0;
        return value;
    }

    __device__ void count(int bin, uint64_t value) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const uint32_t part = value >> (piece * PIECE_BITS) & ((1u << PIECE_BITS) - 1);
            if (part != 0) atomicAdd(&shared_.pieces[piece][bin], part);
        }
    }

    // Puts each bin's pieces together, in their place.
    __device__ void gather_pieces() {
        __syncthreads();
        uint64_t whole[BINS / THREADS] = {};
#pragma unroll
        for (int b = 0; b < BINS / THREADS; ++b) {
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                const uint64_t part = shared_.pieces[piece][threadIdx.x + b * THREADS];
                whole[b] += part << (piece * PIECE_BITS);
            }
        }
        __syncthreads();
#pragma unroll
        for (int b = 0; b < BINS / THREADS; ++b) shared_.histogram[threadIdx.x + b * THREADS] = whole[b];
    }

    // A histogram of the whole row, as this thread sees it.
    struct Bins {
        uint64_t mine[2];  // bins 2 t and 2 t + 1
        uint64_t before;   // all bins below
        uint64_t total;
    };

    // Weights (or numbers) of the tokens up to `bound` whose rank begins with `prefix`, by the next 10 bits of the rank.
    template <bool WEIGHTS>
    __device__ Bins bins(uint64_t bound, uint32_t prefix, int shift) {
        for (int i = threadIdx.x; i < PIECES * BINS; i += THREADS) shared_.pieces[i / BINS][i % BINS] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count_; i += THREADS) {
            const uint32_t r = rank(i);
            if (r >> (shift + 10) != prefix || r == NEVER || order(i) > bound) continue;
            count(r >> shift & (BINS - 1), WEIGHTS ? weight(r) : 1);
        }
        gather_pieces();
        ptx::cluster_barrier();
        Bins bins = {};
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) {
            bins.mine[0] += ptx::read_cluster(&shared_.histogram[2 * threadIdx.x], rank);
            bins.mine[1] += ptx::read_cluster(&shared_.histogram[2 * threadIdx.x + 1], rank);
        }
        bins.before = scan(bins.mine[0] + bins.mine[1]) - bins.mine[0] - bins.mine[1];
#pragma unroll
        for (int i = 0; i < WARPS; ++i) bins.total += shared_.warp[i];
        ptx::cluster_barrier();  // histograms have been read
        return bins;
    }

    // The first bin (or any index) at which a running sum of pairs reaches `target`, and the sum before it; `EVERYTHING` if none does.
    __device__ uint64_t reach(const uint64_t (&mine)[2], uint64_t before, uint64_t target, uint64_t& passed) {
        __syncthreads();
        if (threadIdx.x == 0) shared_.found[0] = EVERYTHING;
        __syncthreads();
        if (before < target && before + mine[0] + mine[1] >= target) {
            const bool second = before + mine[0] < target;
            shared_.found[0] = 2 * threadIdx.x + second;
            shared_.found[1] = second ? before + mine[0] : before;
        }
        __syncthreads();
        passed = shared_.found[1];
        return shared_.found[0];
    }

    __device__ static uint64_t nucleus(const SampleRow& params, uint64_t mass) {
        const double wanted = static_cast<double>(params.top_p) * static_cast<double>(mass);
        return max(static_cast<uint64_t>(ceil(wanted)), static_cast<uint64_t>(1));
    }

    // As the rest of `draw`, if no more than `MAX_LISTED` tokens come into question; otherwise -1. The result is block 0's.
    __device__ int draw_from_few(const SampleRow& params, uint64_t u) {
        const bool counts = params.top_k > 0 && params.top_k < static_cast<uint32_t>(args_.vocab);
        if (counts && params.top_k > MAX_LISTED) return -1;
        const Bins first = counts ? bins<false>(EVERYTHING - 1, 0, 20) : bins<true>(EVERYTHING - 1, 0, 20);
        const uint64_t target = counts ? params.top_k : nucleus(params, first.total);
        uint64_t passed;
        const uint32_t last_bin = static_cast<uint32_t>(min(reach(first.mine, first.before, target, passed), uint64_t{BINS - 1}));
        const auto is_listed = [&](int i) { return rank(i) >> 20 <= last_bin; };
        uint64_t listed = 0;
        for (int i = threadIdx.x; i < count_; i += THREADS) listed += is_listed(i);
        listed = reduce<false>(listed);
        if (listed > MAX_LISTED) return -1;
        if (rank_ == 0) {
            for (int i = threadIdx.x; i < MAX_LISTED; i += THREADS) shared_.list[i] = EVERYTHING;
            if (threadIdx.x == 0) shared_.listed = 0;
        }
        ptx::cluster_barrier();
        for (int i = threadIdx.x; i < count_; i += THREADS) {
            if (is_listed(i)) ptx::write_cluster(&shared_.list[ptx::add_cluster(&shared_.listed, 0, 1)], 0, order(i));
        }
        ptx::cluster_barrier();
        return rank_ == 0 ? draw_from_list(params, u, static_cast<int>(listed), counts, first.total) : 0;
    }

    // By block 0, from the `listed` tokens that come first. `mass`: of all tokens.
    __device__ int draw_from_list(const SampleRow& params, uint64_t u, int listed, bool counts, uint64_t mass) {
        sort_list(listed);
        const int at = 2 * threadIdx.x;
        const auto rank_at = [&](int i) { return static_cast<uint32_t>(shared_.list[i] >> 32); };
        int kept = counts ? min(static_cast<int>(params.top_k), listed) : listed;
        uint64_t weights[2] = {at < kept ? weight(rank_at(at)) : 0, at + 1 < kept ? weight(rank_at(at + 1)) : 0}, passed;
        const uint64_t before = scan(weights[0] + weights[1]) - weights[0] - weights[1];
        if (counts) {
            mass = 0;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) mass += shared_.warp[i];
        }
        if (params.top_p < 1.0f) {
            kept = min(reach(weights, before, nucleus(params, mass), passed), static_cast<uint64_t>(kept - 1)) + 1;
        }
        if (params.min_p > 0.0f) {
            const uint32_t least = static_cast<uint32_t>(fminf(-logf(params.min_p), MAX_DISTANCE) * RANKS_A_UNIT);
            const int probable = __syncthreads_count(at < listed && rank_at(at) <= least) +
                                 __syncthreads_count(at + 1 < listed && rank_at(at + 1) <= least);
            kept = min(kept, probable);
        }
        __syncthreads();
        if (at < kept && at + 2 >= kept) shared_.found[0] = before + weights[0] + (at + 1 < kept ? weights[1] : 0);
        __syncthreads();
        const uint64_t target = __umul64hi(u, shared_.found[0]) + 1;
        return static_cast<int>(static_cast<uint32_t>(shared_.list[reach(weights, before, target, passed)]));
    }

    // Ascending, by pairwise exchange over the next power of two; entries beyond `listed` are greatest.
    __device__ void sort_list(int listed) {
        const int size = max(2, 1 << (32 - __clz(listed - 1)));
        for (int run = 2; run <= size; run *= 2) {
            for (int reach = run / 2; reach > 0; reach /= 2) {
                const int t = threadIdx.x, i = (t & ~(reach - 1)) * 2 + (t & (reach - 1));
                if (t < size / 2) {
                    const uint64_t low = shared_.list[i], high = shared_.list[i + reach];
                    if ((low > high) == ((i & run) == 0)) shared_.list[i] = high, shared_.list[i + reach] = low;
                }
                __syncthreads();
            }
        }
    }

    // The first token, in order of rank and id among those up to `bound`, at which the running sum of weights (or of tokens) reaches
    // `target`, as its order; `bound` itself if it never does.
    template <bool WEIGHTS>
    __device__ uint64_t select(uint64_t bound, uint64_t target) {
        uint32_t prefix = 0;  // of the rank, found so far
        for (int shift = 20; shift >= 0; shift -= 10) {
            const Bins found = bins<WEIGHTS>(bound, prefix, shift);
            uint64_t passed;
            const uint64_t bin = reach(found.mine, found.before, target, passed);
            if (bin == EVERYTHING) return bound;
            target -= passed;
            prefix = prefix << 10 | static_cast<uint32_t>(bin);
        }
        return static_cast<uint64_t>(prefix) << 32 | static_cast<uint32_t>(find_by_id<WEIGHTS>(prefix, bound, target));
    }

    // The id at which the running sum, by id, over tokens of rank `wanted` (`NEVER`: of any) up to `bound` reaches `target`.
    template <bool WEIGHTS>
    __device__ int find_by_id(uint32_t wanted, uint64_t bound, uint64_t target) {
        const auto value = [&](int i) -> uint64_t {
            const uint32_t r = rank(i);
            if (r == NEVER || (wanted != NEVER && r != wanted) || order(i) > bound) return 0;
            return WEIGHTS ? weight(r) : 1;
        };
        // Neighbouring tokens to a thread, an odd number of them: their words lie in different banks.
        const int run = (count_ + THREADS - 1) / THREADS | 1;
        const int begin = min(static_cast<int>(threadIdx.x) * run, count_), end = min(begin + run, count_);
        uint64_t mine = 0;
        for (int i = begin; i < end; ++i) mine += value(i);
        const uint64_t through = scan(mine);
        if (threadIdx.x == THREADS - 1) shared_.slot[turn_] = through;
        ptx::cluster_barrier();
        uint64_t before = through - mine;
        for (int r = 0; r < rank_; ++r) before += ptx::read_cluster(&shared_.slot[turn_], r);
        turn_ ^= 1;
        uint64_t result = 0;
        if (before < target && before + mine >= target) {
            for (int i = begin; i < end && result == 0; ++i) {
                before += value(i);
                if (before >= target) result = first_ + i + 1;
            }
        }
        return static_cast<int>(reduce<true>(result)) - 1;
    }

    __device__ void fail(uint32_t status) {
        if (rank_ == 0 && threadIdx.x == 0) args_.token[row_] = 0, args_.status[row_] = status;
    }

    const SampleArgs& args_;
    Shared& shared_;
    float* logits_;
    int row_, rank_, first_, count_;
    int turn_ = 0;
    float top_ = 0.0f;
};

}  // namespace

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 2)
    sample(const __grid_constant__ SampleArgs args) {
    extern __shared__ __align__(16) float slice[];
    __shared__ Shared shared;
    ptx::launch_dependents();
    ptx::grid_dependency_wait();
    Row(args, shared, slice).run();
    ptx::cluster_barrier();  // shared memory lives until the others have read it
}
