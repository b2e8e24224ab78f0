#pragma once

/// The products of experts with many rows each, by wgmma. The same bits as by streaming.

#include "kernels/experts/sorted_pairs.cuh"
#include "kernels/linear/linear_stack.h"

namespace openspec::cuda {

/// One of the two products over all rows, which lie one behind the other by their experts.
struct TileProduct {
  LinearStack weights;  // SwiGLU: gate and up
  const void* x;        // [num_places, num_inputs] bf16
  void* out;            // [num_places, outputs] bf16
  SortedPairs pairs;    // in segments of tile_rows
  int max_places;
};

/// Rows of a tile of both products of a layer where this is faster than streaming: by how many rows
/// an expert gets on average; 0: it is not, or the device or the matrices do not allow it.
int expert_tile_rows(const LinearStack& gate_up, const LinearStack& down, int num_pairs);

/// Returns a cudaError_t. The kernel before the first product is a fence.
int multiply_tiles(const TileProduct& product, int tile_rows, void* stream);

}  // namespace openspec::cuda
