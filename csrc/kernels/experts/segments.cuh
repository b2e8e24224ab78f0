#pragma once

/// What the blocks of a product of experts work on. A segment is up to so many rows of one expert.
/// The units of all segments make one sequence, of which every block has as large a share; an item
/// is what of a share is of one segment. Rows of a segment have *places*, one behind the other,
/// where what comes between the two products lies.
///
/// Of up to eight rows every block sorts for itself: a segment then has all rows of the step, each
/// at its number, those included that do not go to its expert. So all experts multiply the same
/// activations. More rows have been sorted by a kernel before.

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/experts/sorted_pairs.cuh"

namespace openspec::cuda {

inline constexpr int kFewRows = 8;

/// In shared memory, of up to kFewRows rows.
struct FewRowsTable {
  static constexpr int kSegments = kFewRows * kMaxTopExperts;
  int16_t expert[kSegments];
  int16_t pair[kSegments][kFewRows];  // -1: the row does not go there
  int32_t num_segments;
};

/// Units [first_unit, last_unit) of `num_rows` rows from place `first_place` on.
struct ExpertItem {
  int expert;
  int first_place, num_rows;
  int first_unit, last_unit;
  bool is_read_once = true;  // the expert's weights

  __device__ __forceinline__ int num_units() const { return last_unit - first_unit; }
};

class Segments {
 public:
  __device__ __forceinline__ Segments(const SortedPairs& pairs, const FewRowsTable& few,
                                      int num_rows, int segment_rows, int num_units)
      : pairs_(pairs),
        few_(few),
        num_rows_(num_rows),
        segment_rows_(segment_rows),
        num_units_(num_units) {
    const int num_segments = has_few_rows() ? few.num_segments : __ldcg(pairs.num_segments);
    const int64_t all_units = int64_t{num_segments} * num_units;
    begin_ = static_cast<int>(all_units * blockIdx.x / gridDim.x);
    end_ = static_cast<int>(all_units * (blockIdx.x + 1) / gridDim.x);
  }

  __device__ __forceinline__ bool has_few_rows() const { return num_rows_ <= kFewRows; }
  /// The block's share of the sequence.
  __device__ __forceinline__ int begin() const { return begin_; }
  __device__ __forceinline__ int end() const { return end_; }

  /// The item that begins at a place of the share.
  __device__ __forceinline__ ExpertItem item(int at) const {
    const int segment = at / num_units_;
    ExpertItem item;
    if (has_few_rows()) {
      item = {few_.expert[segment], segment * kFewRows, num_rows_};
    } else {
      const int4 words = __ldcg(reinterpret_cast<const int4*>(pairs_.segment + segment));
      const ExpertRange range = {words.x, words.y, words.z, words.w};
      item.expert = range.expert;
      item.first_place = range.first_pair + (segment - range.first_segment) * segment_rows_;
      item.num_rows = min(segment_rows_, range.last_pair - item.first_place);
      item.is_read_once = range.last_pair - range.first_pair <= segment_rows_;
    }
    item.first_unit = at - segment * num_units_;
    item.last_unit = min(num_units_, item.first_unit + end_ - at);
    return item;
  }

  /// The pair at a place; -1: none.
  __device__ __forceinline__ int pair(int place) const {
    return has_few_rows() ? few_.pair[place / kFewRows][place % kFewRows]
                          : __ldcg(pairs_.pair + place);
  }

 private:
  const SortedPairs& pairs_;
  const FewRowsTable& few_;
  int num_rows_, segment_rows_, num_units_, begin_, end_;
};

/// Before the first block reads it; every thread calls it.
__device__ __forceinline__ void clear_few_rows(FewRowsTable& table) {
  auto* const words = reinterpret_cast<uint32_t*>(table.pair);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof table.pair / 4); i += blockDim.x) {
    words[i] = 0xffffffffu;
  }
}

/// Sorts the pairs of up to kFewRows rows by their experts, in one warp.
__device__ __forceinline__ void sort_few_rows(FewRowsTable& table, const int32_t* expert,
                                              int num_rows, int top_k, int num_experts, int lane) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  constexpr int kEach = FewRowsTable::kSegments / 32;
  static_assert(kMaxExperts <= 32 * 32, "a lane for each word of experts");
  const int num_pairs = num_rows * top_k;
  int of[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int pair = i * 32 + lane;
    of[i] = pair < num_pairs ? __ldcg(expert + pair) : -1;
  }
  uint32_t own = 0;  // lane w: which of experts 32 w to 32 w + 31 have rows
  for (int word = 0; word * 32 < num_experts; ++word) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (of[i] >= 0 && of[i] / 32 == word) bits |= 1u << of[i] % 32;
    }
    bits = __reduce_or_sync(kAllLanes, bits);
    if (lane == word) own = bits;
  }
  int before = __popc(own);
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(kAllLanes, before, d);
    if (lane >= d) before += other;
  }
  if (lane == 31) table.num_segments = before;
  before -= __popc(own);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int word = max(of[i], 0) / 32;
    const uint32_t lower = __shfl_sync(kAllLanes, own, word) & ((1u << max(of[i], 0) % 32) - 1);
    const int segment = __shfl_sync(kAllLanes, before, word) + __popc(lower);
    if (of[i] < 0) continue;
    const int pair = i * 32 + lane;
    table.expert[segment] = static_cast<int16_t>(of[i]);
    table.pair[segment][pair / top_k] = static_cast<int16_t>(pair);
  }
}

/// Counts what sort_few_rows found, in one warp of one block.
__device__ __forceinline__ void count_few_rows(ExpertCounts* counts, const FewRowsTable& table,
                                               const int32_t* expert, int num_pairs, int lane) {
  int num_rows = 0;
  for (int pair = lane; pair < num_pairs; pair += 32) num_rows += __ldcg(expert + pair) >= 0;
  num_rows = __reduce_add_sync(0xffffffffu, num_rows);
  if (lane == 0) add_counts(counts, 1, table.num_segments, num_rows);
}

}  // namespace openspec::cuda
