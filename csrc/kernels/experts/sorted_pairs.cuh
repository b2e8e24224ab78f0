#pragma once

/// The (row, slot) pairs of a step by their experts: row * top_k + slot, rows rising.

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/launch.cuh"

namespace openspec::cuda {

struct SortedPairs {
  int32_t* first;  // [num_experts + 1] of an expert's pairs
  int32_t* pair;   // [num_pairs]
};

inline constexpr int kSortThreads = 256;

/// A block for each expert. Pairs of expert -1 are left out.
static __global__ void __launch_bounds__(kSortThreads)
    sort_pairs_kernel(const int32_t* expert, int num_pairs, SortedPairs to) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  constexpr int kWarps = kSortThreads / 32;
  allow_next_kernel();
  __shared__ int lower_of[kWarps], own_of[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, of = blockIdx.x;
  const int share = (num_pairs + kSortThreads - 1) / kSortThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * share, num_pairs);
  const int end = min(begin + share, num_pairs);
  wait_for_previous_kernel();
  int lower = 0, own = 0;
  for (int i = begin; i < end; ++i) {
    const int found = __ldcg(expert + i);
    lower += found >= 0 && found < of;
    own += found == of;
  }
  int before = own;  // with those of lower threads
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(kAllLanes, before, d);
    if (lane >= d) before += other;
  }
  lower = __reduce_add_sync(kAllLanes, lower);
  if (lane == 31) {
    own_of[warp] = before;
    lower_of[warp] = lower;
  }
  __syncthreads();
  int first = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    first += lower_of[w];
    if (w < warp) before += own_of[w];
    all += own_of[w];
  }
  if (threadIdx.x == 0) {
    to.first[of] = first;
    if (of + 1 == gridDim.x) to.first[of + 1] = first + all;
  }
  int at = first + before - own;
  for (int i = begin; i < end && own > 0; ++i) {
    if (__ldcg(expert + i) == of) to.pair[at++] = i;
  }
}

}  // namespace openspec::cuda
