// One CTA per (batch item b, mask head h, KV block): each thread evaluates some columns of the block, writes their
// vectors and takes part in the minimum and maximum of each vector over the block.
#include "device/columns.cuh"

struct MaskInputs {
  int nq, nk;
  Segments doc_;
  Vector prefix_;
};

MASKC_FN Bounds mask_column(const MaskInputs& in, int b, int h, int key) {
  const idx nq = in.nq, k = key;
  const Found doc_at_k = find(in.doc_, b, k);
  if (doc_at_k.i >= 0) {
    const Read prefix_at_k = read(in.prefix_, b, h, doc_at_k.i);
    if (prefix_at_k.ok && k < doc_at_k.start + prefix_at_k.value) {
      return bounds(nq, doc_at_k.end, nq, 0, doc_at_k.start);
    }
    return bounds(nq, doc_at_k.end, nq, 0, k);
  }
  return bounds(nq, 0, nq, 0, nq);
}

struct PrepArgs {
  MaskInputs in;
  int heads, block_kv, blocks;  // blocks = ceil(nk / block_kv)
  int* lts;  // [batch, heads, nk]
  int *lts_low, *lts_high;  // [batch, heads, blocks]
  int* ute;  // [batch, heads, nk]
  int *ute_low, *ute_high;  // [batch, heads, blocks]
};
static_assert(sizeof(PrepArgs) == 136, "the launcher packs the arguments by the same rules");

extern "C" __global__ void __launch_bounds__(128) prep(const __grid_constant__ PrepArgs args) {
  const int block = blockIdx.x % args.blocks;
  const int item = blockIdx.x / args.blocks;  // b * heads + h
  const int b = item / args.heads, h = item % args.heads;
  const long long row = (long long)item * args.in.nk;
  const int first = block * args.block_kv, last = min(first + args.block_kv, args.in.nk);

  int lts_low = 0x7fffffff, lts_high = -1;
  int ute_low = 0x7fffffff, ute_high = -1;
  for (int k = first + threadIdx.x; k < last; k += 128) {
    const Bounds column = mask_column(args.in, b, h, k);
    args.lts[row + k] = column.lts;
    lts_low = min(lts_low, column.lts), lts_high = max(lts_high, column.lts);
    args.ute[row + k] = column.ute;
    ute_low = min(ute_low, column.ute), ute_high = max(ute_high, column.ute);
  }

  __shared__ int low[2][4], high[2][4];
  const int warp = threadIdx.x / 32;
  lts_low = __reduce_min_sync(~0u, lts_low), lts_high = __reduce_max_sync(~0u, lts_high);
  if (threadIdx.x % 32 == 0) low[0][warp] = lts_low, high[0][warp] = lts_high;
  ute_low = __reduce_min_sync(~0u, ute_low), ute_high = __reduce_max_sync(~0u, ute_high);
  if (threadIdx.x % 32 == 0) low[1][warp] = ute_low, high[1][warp] = ute_high;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < 4; ++w) {
    lts_low = min(lts_low, low[0][w]), lts_high = max(lts_high, high[0][w]);
  }
  args.lts_low[blockIdx.x] = lts_low, args.lts_high[blockIdx.x] = lts_high;
  for (int w = 1; w < 4; ++w) {
    ute_low = min(ute_low, low[1][w]), ute_high = max(ute_high, high[1][w]);
  }
  args.ute_low[blockIdx.x] = ute_low, args.ute_high[blockIdx.x] = ute_high;
}
