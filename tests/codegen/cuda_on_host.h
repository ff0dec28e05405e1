// As much of CUDA as the preparation kernel uses, on threads of the CPU: one block after the other.
#include <algorithm>
#include <barrier>
#include <memory>
#include <thread>
#include <vector>

using std::max;
using std::min;

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

struct Index { int x; };
static thread_local Index threadIdx, blockIdx;

static std::unique_ptr<std::barrier<>> block_barrier, warp_barriers[32];
static int lanes[32][32];

static void __syncthreads() { block_barrier->arrive_and_wait(); }

template <typename Combine>
static int reduce(int value, Combine combine) {
  const int warp = threadIdx.x / 32;
  lanes[warp][threadIdx.x % 32] = value;
  warp_barriers[warp]->arrive_and_wait();
  for (int other : lanes[warp]) value = combine(value, other);
  warp_barriers[warp]->arrive_and_wait();
  return value;
}
static int __reduce_min_sync(unsigned, int value) { return reduce(value, [](int a, int b) { return min(a, b); }); }
static int __reduce_max_sync(unsigned, int value) { return reduce(value, [](int a, int b) { return max(a, b); }); }

template <typename Kernel, typename Args>
static void run_blocks(Kernel kernel, const Args& args, int blocks, int threads) {
  for (int block = 0; block < blocks; ++block) {
    block_barrier = std::make_unique<std::barrier<>>(threads);
    for (int warp = 0; warp < threads / 32; ++warp) warp_barriers[warp] = std::make_unique<std::barrier<>>(32);
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; ++thread)
      running.emplace_back([&, thread] { threadIdx.x = thread, blockIdx.x = block; kernel(args); });
    for (std::thread& t : running) t.join();
  }
}
