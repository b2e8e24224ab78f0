#pragma once

/// In which order a row's squares are added, up to kMaxWidth: columns in chains, 32 chains by
/// halves, those sums in order. It depends on the width alone.

#include "kernels/common/packs.cuh"

namespace openspec::cuda {

inline constexpr int kMaxWidth = 8192;
inline constexpr unsigned kAllLanes = 0xffffffffu;

/// Sums of 32 chains each.
constexpr int max_warps(int chain_columns) { return chain_columns < 16 ? 10 : kMaxWidth / 16 / 32; }
constexpr int chain_columns(int width) {
  return width <= 4 * 32 * max_warps(4) ? 4 : width <= 8 * 32 * max_warps(8) ? 8 : 16;
}
constexpr int num_row_warps(int width) {
  const int columns = 32 * chain_columns(width);
  return (width + columns - 1) / columns;
}

template <int kColumns>
__device__ __forceinline__ void add(FloatPack<kColumns>& sum, const FloatPack<kColumns>& term) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sum.x[c] += term.x[c];
}

/// The sum of 32 lanes, known to each.
__device__ __forceinline__ float lane_sum(float sum) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

/// Those in order.
template <int kMaxWarps>
__device__ __forceinline__ float ordered_sum(const float (&warp_sums)[kMaxWarps], int num_warps) {
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kMaxWarps; ++warp) {
    total += warp < num_warps ? warp_sums[warp] : 0.0f;
  }
  return total;
}

}  // namespace openspec::cuda
