// mbarrier: one instruction each. A fresh barrier is in phase 0, so a consumer starts with parity 0 on "full" and a
// producer with parity 1 on "empty" (which returns at once).
#pragma once
#include "device/types.cuh"

DEVICE void mbarrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the async proxy; one thread, then __syncthreads().
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }

// One arrival that also announces `bytes` of bulk copies.
DEVICE void mbarrier_arrive_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has completed.
DEVICE void mbarrier_wait(u32 bar, u32 parity) {
#ifdef MASKC_BOUNDED_WAITS  // a hang becomes a trap: about 2 s of tries
  asm volatile(
      "{\n"
      ".reg .pred done, more;\n"
      ".reg .u32 tries;\n"
      "mov.u32 tries, 0;\n"
      "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0xf4240;\n"
      "@done bra DONE;\n"
      "add.u32 tries, tries, 1;\n"
      "setp.lt.u32 more, tries, 2000;\n"
      "@more bra AGAIN;\n"
      "trap;\n"
      "DONE: }\n" ::"r"(bar),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra DONE;\n"
      "bra AGAIN;\n"
      "DONE: }\n" ::"r"(bar),
      "r"(parity)
      : "memory");
#endif
}
