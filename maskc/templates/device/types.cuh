// Plain types and one-line helpers. No CUDA header is included anywhere: NVRTC needs none.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// An encoded cuTensorMap; always a __grid_constant__ kernel parameter, never copied.
struct alignas(128) TensorMap {
  u64 words[16];
};

#define DEVICE __device__ __forceinline__

DEVICE float neg_inf() { return __int_as_float(0xff800000); }

// Shared-memory address as the 32-bit number PTX wants.
DEVICE u32 smem_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// The same value in every lane, and known so to the compiler: index arithmetic then stays in uniform registers.
DEVICE int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
