#pragma once

#include <cstddef>

#include "kernels/delta_net/delta_net.h"

namespace openspec::gated_delta {

/// Columns of a tile of the state; on the CPU a tile is [128 keys][kTileColumns].
inline constexpr int kTileColumns = 16;
inline constexpr int kNumTiles = kDeltaHeadDim / kTileColumns;  // of a value head
/// Blocks of records that a head's window holds, block b at b % kWindowBlocks.
inline constexpr int kWindowBlocks = 4;

/// What one value head of one span needs while it runs, a thread's own.
struct alignas(64) HeadScratch {
  float z[kNumTiles][kDeltaHeadDim * kTileColumns];  // where a fold is not due in memory
  float k[kWindowBlocks][kDeltaBlock][kDeltaHeadDim];
  float delta[kWindowBlocks][kDeltaBlock][kDeltaHeadDim];
  float sum[kWindowBlocks][kDeltaBlock];   // of g since the block began
  float norm[kWindowBlocks][kDeltaBlock];  // 1 / |k|
  // Of the rows of one block.
  float q[kDeltaBlock][kDeltaHeadDim];
  float v[kDeltaBlock][kDeltaHeadDim];
  float state_k[kDeltaBlock][kDeltaHeadDim];  // Z'k
  float out[kDeltaBlock][kDeltaHeadDim];      // Z'q, then o
  float beta[kDeltaBlock];
  float factor_k[kDeltaBlock], factor_q[kDeltaBlock];  // of Z'k and Z'q
  // Of delta, [row][position]: the block before, then the row's own.
  float before_k[kDeltaBlock][kDeltaBlock], before_q[kDeltaBlock][kDeltaBlock];
  float own_k[kDeltaBlock][kDeltaBlock], own_q[kDeltaBlock][kDeltaBlock];
  float folded_k[kDeltaHeadDim][kDeltaBlock];  // the keys of a fold with their weights
};

/// What phases hand on, as fp32: rows after the convolution, then beta and g of every value head.
inline size_t row_floats(const DeltaShape& shape, int num_rows) {
  const size_t floats = static_cast<size_t>(shape.conv_width() + 2 * shape.num_v_heads);
  return (static_cast<size_t>(num_rows) * floats + 15) / 16 * 16;
}

}  // namespace openspec::gated_delta
