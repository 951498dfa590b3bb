// Memory that other devices and the host write while a kernel runs: accesses at system scope, and waiting with an end.
#pragma once
#include "ptx.cuh"

namespace ptx {

constexpr int MAX_RANKS = 8;  // of a group

__device__ __forceinline__ uint32_t load_system(const uint32_t* p) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

__device__ __forceinline__ void store_system(uint32_t* p, uint32_t value) {
    asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// What other devices wrote before the matching `store_release` is visible afterwards.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(uint32_t* p, uint32_t value) {
    asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// Two 64-bit words. Each is read or written whole; the pair need not be.
__device__ __forceinline__ void load_pair(const uint64_t* p, uint64_t (&words)[2]) {
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(words[0]), "=l"(words[1]) : "l"(p) : "memory");
}

__device__ __forceinline__ void store_pair(uint64_t* p, uint64_t first, uint64_t second) {
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(first), "l"(second) : "memory");
}

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Words of host memory that every rank of a group sees.
constexpr int STOP = 0;     // the host: a rank is gone, nobody waits any more
constexpr int GAVE_UP = 1;  // a kernel: one of us waited in vain

// How long to go on waiting for another device.
//
// Host memory is far away, and thousands of threads wait at once: it is looked at after 2 ms, and again every 2 ms.
class Patience {
   public:
    // `failed` lies on this device: once one has given up, later kernels do so at once.
    __device__ __forceinline__ Patience(uint32_t* host, uint32_t* failed, uint32_t limit_ms)
        : host_(host), failed_(failed), limit_ms_(limit_ms) {}

    // Whether to stop: asked each time that what is waited for was not there.
    __device__ __forceinline__ bool is_over() {
        if (++asked_ % ASKED_OFTEN != 0) return false;
        const uint64_t now = nanoseconds();
        if (asked_ == ASKED_OFTEN) {
            begin_ = now, look_ms_ = LOOK_MS;
            return load_system(failed_) != 0;
        }
        const uint64_t waited_ms = (now - begin_) / 1000000;
        if (waited_ms < look_ms_) return false;
        look_ms_ = waited_ms + LOOK_MS;
        if (waited_ms < limit_ms_ && load_system(host_ + STOP) == 0 && load_system(host_ + GAVE_UP) == 0) return false;
        store_system(failed_, 1);
        store_system(host_ + GAVE_UP, 1);
        return true;
    }

   private:
    static constexpr uint32_t ASKED_OFTEN = 256, LOOK_MS = 2;
    uint32_t* host_;
    uint32_t* failed_;
    uint64_t begin_ = 0;
    uint64_t look_ms_ = 0;
    uint32_t limit_ms_;
    uint32_t asked_ = 0;
};

}  // namespace ptx
