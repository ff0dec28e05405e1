// Fences, named barriers, register split, and the stores that feed the async proxy. One instruction each.
#pragma once
#include "device/types.cuh"

// Generic writes to shared memory become visible to wgmma and bulk copies: every writing thread, before the barrier.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barrier `id` for `threads` threads: sync arrives and waits, arrive does not wait.
DEVICE void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

template <int REGISTERS>
DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// The same the other way: the A fragment of m64k16 for a warp's 16 rows, if matrices go down, then right.
DEVICE void ldmatrix_x4(u32 address, u32& r0, u32& r1, u32& r2, u32& r3) {
  asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(address) : "memory");
}
DEVICE void store_shared_v4(u32 address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEVICE void store_shared(u32 address, u32 a) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(a) : "memory"); }
DEVICE void store_shared_v2(u32 address, u32 a, u32 b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

DEVICE u32 load_shared(u32 address) {
  u32 a;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a) : "r"(address) : "memory");
  return a;
}
DEVICE void load_shared_v2(u32 address, int& a, int& b) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(address) : "memory");
}
DEVICE void load_shared_v2(u32 address, float& a, float& b) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(address) : "memory");
}
DEVICE void load_shared_v4(u32 address, int& a, int& b, int& c, int& d) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address) : "memory");
}

// Coarse wall clock of the GPU in nanoseconds (trace variants only).
DEVICE u64 global_timer() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
