// What happens to a product of packed weights on its way out.
#pragma once
#include "packed.cuh"

namespace packed {

enum class Epilogue { BF16, F32, SWIGLU };

// gate: not above `limit`; up: within +-limit; alpha and limit as published for gpt-oss.
__device__ __forceinline__ float swiglu(float gate, float up) {
    constexpr float ALPHA = 1.702f, LIMIT = 7.0f;
    gate = fminf(gate, LIMIT);
    up = fminf(fmaxf(up, -LIMIT), LIMIT);
    return gate / (1.0f + __expf(-ALPHA * gate)) * (up + 1.0f);
}

// Rows of the matrix that this lane's sums of a strip belong to. With SwiGLU, strip row g is the gate and g + 8 the up row of unit
// 8 * strip + g; bias and output are not rearranged.
template <Epilogue E>
__device__ __forceinline__ int2 rows_of(int strip) {
    const int g = threadIdx.x % 32 / 4, first = strip * packed::STRIP_ROWS;
    return E == Epilogue::SWIGLU ? make_int2(first + 2 * g, first + 2 * g + 1) : make_int2(first + g, first + g + 8);
}

}  // namespace packed
