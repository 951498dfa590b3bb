// One thin function per PTX instruction, sm_90a. Nothing here decides anything.
#pragma once
#include <cuda_bf16.h>
#include <cstdint>

namespace ptx {

// --- programmatic dependent launch -----------------------------------------------------------------------------------

// Blocks until every kernel that this one depends on has finished and its writes are visible. Each kernel here executes it
// before its first dependent read and before its first write, so completion is transitive along a stream.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel of the stream start its prologue where there is room. Executed first of all, except by kernels whose successor
// relies on what they wait for: several kernels may then be under way, and each still begins its work when the one before has ended.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// --- shared-memory addresses and barriers ------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders this thread's shared-memory writes before later reads by the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) { mbarrier_arrive(shared_address(barrier)); }

__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Waits until the phase of parity `phase` has completed.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(barrier),
        "r"(phase)
        : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t phase) { mbarrier_wait(shared_address(barrier), phase); }

// Where one is in a ring of stages, each with a barrier that is full and one that is empty.
struct RingPosition {
    int stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void next(int stages) {
        if (++stage == stages) stage = 0, phase ^= 1;
    }
};

// A barrier among `threads` threads of the block; `id` 1 to 15.
__device__ __forceinline__ void named_barrier(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts as having reached a named barrier, without waiting.
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- clusters ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of the cluster; shared-memory writes before it are visible to the cluster after it.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Reads a float that lies at `local` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ float read_cluster(const float* local, uint32_t rank) {
    uint32_t address;
    float value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(local)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

// Likewise for 64 bits.
__device__ __forceinline__ uint64_t read_cluster(const uint64_t* local, uint32_t rank) {
    uint32_t address;
    uint64_t value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(local)), "r"(rank));
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
    return value;
}

// Writes to block `rank` of the cluster; adds there, returning what was there before.
__device__ __forceinline__ void write_cluster(uint64_t* local, uint32_t rank, uint64_t value) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(local)), "r"(rank));
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}

__device__ __forceinline__ uint32_t add_cluster(uint32_t* local, uint32_t rank, uint32_t value) {
    uint32_t address, before;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(local)), "r"(rank));
    asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(value) : "memory");
    return before;
}

// --- copies ------------------------------------------------------------------------------------------------------------

// Contiguous copy by the copy engine; address, destination and size are multiples of 16. Weights pass once: evict first.
__device__ __forceinline__ void bulk_copy_once(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    constexpr uint64_t EVICT_FIRST = 0x12F0000000000000;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(EVICT_FIRST)
        : "memory");
}

// As bulk_copy_once, for what other blocks will read too.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// 16 bytes of which the first `bytes`, 0 or 16, come from memory, and the rest is zero; by this thread, which may wait for all of its own.
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// What the driver made of a matrix for the copy engine; passed by value among the arguments, and named by its address there.
struct alignas(128) TensorMap {
    uint8_t bytes[128];
};

// Box of a tensor map whose first element is (row, col).
__device__ __forceinline__ void tensor_copy(void* shared, const void* map, int32_t col, int32_t row, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(shared)),
        "l"(map), "r"(col), "r"(row), "r"(shared_address(barrier))
        : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Four floats that other multiprocessors see, or write, in no order with anything else.
__device__ __forceinline__ void store_relaxed(float4* global, const float4& v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

// What other multiprocessors wrote before they released what this reads is visible afterwards.
__device__ __forceinline__ uint32_t load_acquire_device(const uint32_t* global) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
    return value;
}

// Adds; what this thread wrote, and what it has seen written, is visible to those who acquire the sum.
__device__ __forceinline__ void add_release_device(uint32_t* global, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// What this thread, or one that it has met at a barrier after a fence, wrote before is visible to who acquires this.
__device__ __forceinline__ void store_release_device(uint32_t* global, uint32_t value) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

__device__ __forceinline__ float4 load_relaxed(const float4* global) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(global)
                 : "memory");
    return v;
}

// --- matrix fragments, one warp ----------------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements; lane i gives the address of a row (8 lanes a matrix).
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row));
}

__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row));
}

// d[16x8] += a[16x16] * b[16x8], bf16 operands, f32 sums. Lane (g = lane / 4, t = lane % 4) holds
// a: rows g, g+8 of columns 2t, 2t+1 (a0, a1) and 2t+8, 2t+9 (a2, a3); b: rows 2t, 2t+1 (b0) and 2t+8, 2t+9 (b1) of column g;
// d: row g (d0, d1) and g+8 (d2, d3) of columns 2t, 2t+1.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a * b: the first of a sum.
__device__ __forceinline__ void mma_bf16_zero(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// Transposes an 8x8 matrix of 16-bit elements across the warp: lane (g, t) gives row g, columns 2t, 2t+1, and gets column g's
// elements of rows 2t, 2t+1.
__device__ __forceinline__ uint32_t transpose8x8(uint32_t pair) {
    uint32_t transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

// A value that is the same in all lanes of the warp, in a form from which the compiler sees that it is.
__device__ __forceinline__ uint32_t uniform(uint32_t value) { return __reduce_or_sync(~0u, value); }

// Bytes of shared memory that the launch asked for.
__device__ __forceinline__ uint32_t dynamic_shared_bytes() {
    uint32_t bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

// --- arithmetic --------------------------------------------------------------------------------------------------------

// e^x = 2^(LOG2E x).
constexpr float LOG2E = 1.4426950408889634f;

// 2^x, two ulp.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two bf16 in a register, `low` in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Elementwise product of two pairs of bf16.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Product of both bf16 of a pair with the low one of `b`, or the high one: one instruction, as with a pair.
__device__ __forceinline__ uint32_t mul_bf16x2_by_low(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\nmov.b32 both, {low, low};\n"
        "mul.rn.bf16x2 %0, %1, both;\n}"
        : "=r"(product)
        : "r"(a), "r"(b));
    return product;
}
__device__ __forceinline__ uint32_t mul_bf16x2_by_high(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\nmov.b32 both, {high, high};\n"
        "mul.rn.bf16x2 %0, %1, both;\n}"
        : "=r"(product)
        : "r"(a), "r"(b));
    return product;
}

}  // namespace ptx
