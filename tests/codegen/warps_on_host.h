// As much of CUDA as the schedule kernels use, on threads of the CPU: one CTA after the other, one thread per thread.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

using std::max;
using std::min;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define asm(...)

struct Index { int x, y; };
static thread_local Index threadIdx, blockIdx;
struct alignas(8) int2 { int x, y; };
static int2 make_int2(int x, int y) { return {x, y}; }
static float __int_as_float(int x) { float f; std::memcpy(&f, &x, 4); return f; }
static unsigned long __cvta_generic_to_shared(const void*) { return 0; }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __ffs(int x) { return __builtin_ffs(x); }
static int __clz(int x) { return x ? __builtin_clz(x) : 32; }

static std::unique_ptr<std::barrier<>> block_barrier, warp_barriers[32];
static int lanes[32][32];

static void __syncthreads() { block_barrier->arrive_and_wait(); }

// Every collective: each lane publishes a value, then reads all 32.
template <typename Use>
static int exchange(int value, Use use) {
  const int warp = threadIdx.x / 32;
  lanes[warp][threadIdx.x % 32] = value;
  warp_barriers[warp]->arrive_and_wait();
  const int result = use(lanes[warp]);
  warp_barriers[warp]->arrive_and_wait();
  return result;
}
static unsigned __ballot_sync(unsigned, bool x) {
  return exchange(x, [](int* all) { unsigned bits = 0; for (int i = 0; i < 32; ++i) bits |= unsigned(all[i] != 0) << i; return int(bits); });
}
static int __shfl_sync(unsigned, int x, int lane) { return exchange(x, [=](int* all) { return all[lane & 31]; }); }
static int __shfl_up_sync(unsigned, int x, int by) {
  const int lane = threadIdx.x % 32;
  return exchange(x, [=](int* all) { return all[lane >= by ? lane - by : lane]; });
}
static int __reduce_min_sync(unsigned, int x) { return exchange(x, [](int* all) { return *std::min_element(all, all + 32); }); }
static int __reduce_max_sync(unsigned, int x) { return exchange(x, [](int* all) { return *std::max_element(all, all + 32); }); }
static int __reduce_add_sync(unsigned, int x) {
  return exchange(x, [](int* all) { int sum = 0; for (int i = 0; i < 32; ++i) sum += all[i]; return sum; });
}
static int atomicMax(int* at, int x) {
  std::atomic_ref<int> value(*at);
  int old = value.load();
  while (old < x && !value.compare_exchange_weak(old, x)) {}
  return old;
}

template <typename Kernel, typename Params>
static void run_grid(Kernel kernel, const Params& params, int grid_x, int grid_y, int threads) {
  for (int y = 0; y < grid_y; ++y)
    for (int x = 0; x < grid_x; ++x) {
      block_barrier = std::make_unique<std::barrier<>>(threads);
      for (int warp = 0; warp < threads / 32; ++warp) warp_barriers[warp] = std::make_unique<std::barrier<>>(32);
      std::vector<std::thread> running;
      for (int thread = 0; thread < threads; ++thread)
        running.emplace_back([&, thread] {
          threadIdx = {thread, 0}, blockIdx = {x, y};
          kernel(params);
          block_barrier->arrive_and_drop();
        });
      for (std::thread& t : running) t.join();
    }
}
