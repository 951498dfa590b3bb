// out[s] = E4M3 of x[row(s)] for the slots s < rows, with one power of two for 128 values: the input of fp8_gemm.
//
//   x       [tokens, k] bf16 row-major; row(s) = gather[s], or s
//   out     [slots, pitch] in the order of packed/fp8.cuh; pitch is k rounded up to 64, places beyond k are zero
//   scales  [blocks of k][slots] f32: the smallest power of two that keeps a block within E4M3's 448
//
// A warp takes a row, 4 values a lane; lane l writes places 4 l to 4 l + 3 of a block. Bound by memory.
#include "../packed/fp8.cuh"
#include "../ptx/wgmma_fp8.cuh"

struct QuantizeArgs {
    const __nv_bfloat16* x;
    const int32_t* gather;    // or null
    const int32_t* num_rows;  // or null: `slots`
    uint8_t* out;
    float* scales;
    int32_t slots;
    int32_t stride;  // from one block of k to the next in `scales`
    int32_t k;
    int32_t pitch;
};
static_assert(sizeof(QuantizeArgs) == 56);

namespace {

constexpr int WARPS = 8, AHEAD = 4;  // blocks read at a time

}  // namespace

extern "C" __global__ void __launch_bounds__(WARPS * 32) quantize_rows(const __grid_constant__ QuantizeArgs args) {
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const int lane = threadIdx.x % 32, rows = args.num_rows ? *args.num_rows : args.slots;
    const int blocks = (args.k + packed::SCALE_BLOCK - 1) / packed::SCALE_BLOCK;
    // Places 4 l + {0, 1, 2, 3} hold values first, first + 8, first + 1, first + 9.
    const int first = lane / 16 * 64 + packed::k_of_place(lane % 16 * 4);
    for (int slot = blockIdx.x * WARPS + threadIdx.x / 32; slot < rows; slot += gridDim.x * WARPS) {
        const __nv_bfloat16* x = args.x + static_cast<int64_t>(args.gather ? args.gather[slot] : slot) * args.k;
        uint8_t* out = args.out + static_cast<int64_t>(slot) * args.pitch;
        for (int base = 0; base < blocks; base += AHEAD) {
            uint32_t low[AHEAD], high[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int k = (base + i) * packed::SCALE_BLOCK + first;
                low[i] = k < args.k ? *reinterpret_cast<const uint32_t*>(x + k) : 0;
                high[i] = k + 8 < args.k ? *reinterpret_cast<const uint32_t*>(x + k + 8) : 0;
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (base + i >= blocks) break;
                const float a = ptx::low_bf16(low[i]), b = ptx::high_bf16(low[i]);
                const float c = ptx::low_bf16(high[i]), d = ptx::high_bf16(high[i]);
                // Magnitudes order as their bits do.
                uint32_t largest = __float_as_uint(fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d))));
                largest = __reduce_max_sync(~0u, largest);
                const float scale = packed::scale_of(__uint_as_float(largest)), inverse = packed::inverse_of(scale);
                if (lane == 0) args.scales[static_cast<int64_t>(base + i) * args.stride + slot] = scale;
                const int place = (base + i) * packed::SCALE_BLOCK + 4 * lane;
                if (place < args.pitch) {
                    *reinterpret_cast<uint32_t*>(out + place) =
                        ptx::pack4_e4m3(a * inverse, c * inverse, b * inverse, d * inverse);
                }
            }
        }
    }
}
