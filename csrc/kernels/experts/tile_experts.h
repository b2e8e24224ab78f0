#pragma once

/// The products of experts with many rows each, by wgmma. The same bits as by streaming.

#include "kernels/experts/sorted_pairs.cuh"
#include "kernels/linear/linear_stack.h"

namespace openspec::cuda {

inline constexpr int kTileRows = 160;  // of a tile, at most

/// One of the two products over all rows, which lie one behind the other by their experts.
struct TileProduct {
  LinearStack weights;  // SwiGLU: gate and up
  const void* x;        // [num_places, num_inputs] bf16
  void* out;            // [num_places, outputs] bf16
  SortedPairs pairs;    // in segments of kTileRows
  int max_places;
};

/// Whether the device has these kernels, which are made for the matrices, and they are faster than
/// streaming for so many pairs.
bool takes_tiles(const LinearStack& gate_up, const LinearStack& down, int num_pairs);

/// Returns a cudaError_t. The kernel before the first product is a fence.
int multiply_tiles(const TileProduct& product, void* stream);

}  // namespace openspec::cuda
