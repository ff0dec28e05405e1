// Waiting, for a bounded time, for what copy engines or other GPUs bring while a kernel runs.
#pragma once
#include "device/sync.cuh"
#include "device/system.cuh"

// Epochs are compared in cyclic order: counters are never reset.
DEVICE bool reached(const u32* word, u32 epoch) { return static_cast<int>(load_acquire_system(word) - epoch) >= 0; }

// In units of 1024 ns.
DEVICE u32 microseconds() { return static_cast<u32>(global_timer() >> 10); }

// Returns true once the chunk of a slot is in place for bulk copies that this thread issues next; false once waiting was
// given up: after `timeout`, which is told in `failed` as slot + 1, or when somebody else has written there. `failed` lies in
// host memory, which the whole GPU reads at one word in 2.3 us: a wait looks there after about 4 ms, and then as often.
DEVICE bool arrived(const u32* flags, u32 slot, u32 epoch, u32 timeout, u32* failed) {
  const u32 since = microseconds();
#pragma unroll 1
  for (u32 looks = 0; !reached(flags + slot, epoch); ++looks) {
    if (looks % 4096 == 4095 && load_relaxed_system(failed) != 0) return false;
    if (microseconds() - since > timeout) {
      store_relaxed_system(failed, slot + 1);
      return false;
    }
    nanosleep(100);
  }
  fence_proxy_async_global();
  return true;
}
