#pragma once

/// The pairs of a step, row * top_k + slot, by their experts. An expert's pairs are cut into
/// segments of rows that a block multiplies at once.

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/experts/experts.h"

namespace openspec::cuda {

/// Of the segments of one expert, as each of them says it.
struct ExpertRange {
  int expert;
  int first_segment;
  int first_pair, last_pair;  // places in SortedPairs::pair
};

struct SortedPairs {
  int32_t* num_segments;
  int32_t* num_places;   // pairs that go to an expert
  ExpertRange* segment;  // [num_segments]
  int32_t* pair;         // [num_places] by expert
  int32_t* place;        // [num_pairs] where a pair that goes to an expert is among these
  ExpertCounts* counts;  // what was done is added; null: nobody asks
};

/// Adds to what was done, without waiting.
__device__ __forceinline__ void add_counts(ExpertCounts* counts, int num_layers, int num_experts,
                                           int num_rows) {
  const auto add = [](uint64_t& to, int count) {
    if (count > 0) atomicAdd(reinterpret_cast<unsigned long long*>(&to), count);
  };
  add(counts->num_layers, num_layers);
  add(counts->num_experts, num_experts);
  add(counts->num_rows, num_rows);
}

inline constexpr int kSortThreads = 256;
inline constexpr int kSortAtOnce = 8;  // pairs that a thread reads together

/// The experts of pairs [first, end), as far as they are read together; -1 from there on. `first`
/// is a multiple of kSortAtOnce.
__device__ __forceinline__ void read_experts(int (&found)[kSortAtOnce], const int32_t* expert,
                                             int first, int end) {
  if (first + kSortAtOnce <= end) {
#pragma unroll
    for (int k = 0; k < kSortAtOnce; k += 4) {
      const int4 four = __ldcg(reinterpret_cast<const int4*>(expert + first + k));
      found[k] = four.x;
      found[k + 1] = four.y;
      found[k + 2] = four.z;
      found[k + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kSortAtOnce; ++k) {
      found[k] = first + k < end ? __ldcg(expert + first + k) : -1;
    }
  }
}

/// The sum over the block's threads; `shared`: a number for each warp. All threads call it.
__device__ __forceinline__ int add_in_block(int value, int* shared) {
  value = __reduce_add_sync(0xffffffffu, value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  int sum = 0;
#pragma unroll
  for (int w = 0; w < kSortThreads / 32; ++w) sum += shared[w];
  return sum;
}

/// A block for each expert: counts all experts' pairs, then lists its own, which keep their order.
/// Pairs of expert -1 are left out.
static __global__ void __launch_bounds__(kSortThreads)
    sort_pairs_kernel(const int32_t* expert, int num_pairs, int segment_rows, SortedPairs to) {
  allow_next_kernel();
  __shared__ int counts[kMaxExperts], shared[kSortThreads / 32];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int of = blockIdx.x, num_experts = gridDim.x;
  for (int e = thread; e < num_experts; e += kSortThreads) counts[e] = 0;
  constexpr int kStride = kSortThreads * kSortAtOnce;
  const int share = (num_pairs + kStride - 1) / kStride * kSortAtOnce;
  const int begin = min(thread * share, num_pairs), end = min(begin + share, num_pairs);
  __syncthreads();
  wait_for_previous_kernel();
  int own = 0;
  for (int i = begin; i < end; i += kSortAtOnce) {
    int found[kSortAtOnce];
    read_experts(found, expert, i, end);
#pragma unroll
    for (int k = 0; k < kSortAtOnce; ++k) {
      if (found[k] >= 0) atomicAdd(&counts[found[k]], 1);
      own += found[k] == of;
    }
  }
  __syncthreads();
  int pairs_before = 0, segments_before = 0, all_segments = 0, all_pairs = 0;
  for (int e = thread; e < num_experts; e += kSortThreads) {
    const int segments = (counts[e] + segment_rows - 1) / segment_rows;
    pairs_before += e < of ? counts[e] : 0;
    segments_before += e < of ? segments : 0;
    all_segments += segments;
    all_pairs += counts[e];
  }
  pairs_before = add_in_block(pairs_before, shared);
  segments_before = add_in_block(segments_before, shared);
  all_segments = add_in_block(all_segments, shared);
  all_pairs = add_in_block(all_pairs, shared);
  if (of == 0 && thread == 0) {
    *to.num_segments = all_segments;
    *to.num_places = all_pairs;
  }
  if (thread == 0 && to.counts != nullptr) {
    add_counts(to.counts, of == 0, counts[of] > 0, counts[of]);
  }
  const ExpertRange range = {of, segments_before, pairs_before, pairs_before + counts[of]};
  for (int i = thread; i * segment_rows < counts[of]; i += kSortThreads) {
    to.segment[segments_before + i] = range;
  }

  int at = own;  // with those of lower lanes, then of lower warps
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, at, d);
    if (lane >= d) at += other;
  }
  __syncthreads();
  if (lane == 31) shared[warp] = at;
  __syncthreads();
  at += pairs_before - own;
  for (int w = 0; w < warp; ++w) at += shared[w];
  for (int i = begin; i < end && own > 0; i += kSortAtOnce) {
    int found[kSortAtOnce];
    read_experts(found, expert, i, end);
#pragma unroll
    for (int k = 0; k < kSortAtOnce; ++k) {
      if (found[k] != of) continue;
      to.pair[at] = i + k;
      to.place[i + k] = at++;
    }
  }
}

}  // namespace openspec::cuda
