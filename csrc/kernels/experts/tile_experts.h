#pragma once

/// The products of experts with many rows each, by wgmma. The same bits as by streaming.

#include "kernels/experts/sorted_pairs.cuh"
#include "kernels/linear/linear_stack.h"
#include "kernels/linear/weight_form.cuh"

namespace openspec::cuda {

/// Rows of a tile, at most: as many as have registers for all sums. Of blocks of scales those are
/// three of an output: a segment's, a chain's and all chains'.
OPENSPEC_HD constexpr int tile_rows(WeightForm form) { return has_blocks(form) ? 96 : 160; }

/// One of the two products over all rows, which lie one behind the other by their experts.
struct TileProduct {
  LinearStack weights;  // SwiGLU: gate and up
  const void* x;        // [num_places, num_inputs] bf16
  void* out;            // [num_places, outputs] bf16
  SortedPairs pairs;    // in segments of tile_rows()
  int max_places;
};

/// Whether the device has these kernels, which are made for the matrices, and they are faster than
/// streaming for so many pairs.
bool takes_tiles(const LinearStack& gate_up, const LinearStack& down, int num_pairs);

/// Returns a cudaError_t. The kernel before the first product is a fence.
int multiply_tiles(const TileProduct& product, void* stream);

}  // namespace openspec::cuda
