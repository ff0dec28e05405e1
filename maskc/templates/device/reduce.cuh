// What only the backward needs: adding fp32 tiles to global memory, and passing a turn from block to block.
#pragma once
#include "device/types.cuh"

// Adds four floats at a 16-byte aligned global address; the order against other blocks is not defined.
DEVICE void red_add_v4(float* dst, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(dst), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// Flags in global memory that order the work of blocks.
template <class T>
DEVICE T load_acquire(const T* p) {
  T v;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void add_release(u32* p, u32 v) { asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE void store_release(int* p, int v) { asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

// Orders generic and bulk accesses of global memory in this thread.
DEVICE void fence_proxy_async_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// 0xffffffff << n; n of 32 or more gives 0, as the instruction does (in C++ it is undefined).
DEVICE u32 ones_from(u32 n) {
  u32 r;
  asm("shl.b32 %0, %1, %2;" : "=r"(r) : "r"(0xffffffffu), "r"(n));
  return r;
}

// Zeroes 16 bytes of global memory.
DEVICE void zero_global_v4(float* p) { asm volatile("st.global.v4.b32 [%0], {%1, %1, %1, %1};" ::"l"(p), "r"(0) : "memory"); }

// Zeroes 16 bytes of shared memory.
DEVICE void zero_shared_v4(u32 address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}
