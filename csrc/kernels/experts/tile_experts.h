#pragma once

/// The products of experts with many rows each, by wgmma. The same bits as by streaming.

#include "kernels/experts/sorted_pairs.cuh"
#include "kernels/linear/linear_stack.h"
#include "kernels/linear/weight_form.cuh"

namespace openspec::cuda {

/// Rows of a tile, at most. With blocks of scales an output has three sums: a segment's, a chain's
/// and all chains'. Up to 96 rows have registers for them, and of up to 160 the last is in shared
/// memory. That pays once experts have so many rows that they would take two tiles.
inline constexpr int kTileRows = 160, kBlockTileRows = 96;
inline constexpr int kMinLongRows = 104;  // of an expert on average, for tiles of 160

/// For so many pairs.
inline int tile_rows(const LinearStack& weights, int num_pairs) {
  const bool is_short = num_pairs / weights.count < kMinLongRows;
  return is_short && has_blocks(form_of(weights.first)) ? kBlockTileRows : kTileRows;
}

/// One of the two products over all rows, which lie one behind the other by their experts.
struct TileProduct {
  LinearStack weights;  // SwiGLU: gate and up
  const void* x;        // [num_places, num_inputs] bf16
  void* out;            // [num_places, outputs] bf16
  SortedPairs pairs;    // in segments of tile_rows
  int max_places;
  int tile_rows;  // of a segment, at most
};

/// Whether the device has these kernels, which are made for the matrices, and they are faster than
/// streaming for so many pairs.
bool takes_tiles(const LinearStack& gate_up, const LinearStack& down, int num_pairs);

/// Returns a cudaError_t. The kernel before the first product is a fence.
int multiply_tiles(const TileProduct& product, void* stream);

}  // namespace openspec::cuda
