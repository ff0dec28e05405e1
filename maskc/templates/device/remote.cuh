// What a kernel writes for other GPUs, and reads of what they wrote.
#pragma once
#include "device/types.cuh"

// What this thread, and what it was told of, wrote is seen by other GPUs before what follows.
DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

DEVICE void store_f4(float* p, float x, float y, float z, float w) { *reinterpret_cast<float4*>(p) = make_float4(x, y, z, w); }

// Of what others wrote before this thread was told so.
DEVICE float4 load_once_f4(const float* p) {
  float4 v;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}
