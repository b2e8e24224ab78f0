#pragma once

#include "kernels/exec.h"
#include "kernels/rows.h"

namespace openspec {

/// Copies K and V of single tokens to other token indices of their sequences, in every layer. The
/// accepted path of a tree comes to lie contiguously by it: moves of one sequence follow each other
/// in rising `to`, none beyond `from`, so that taken in order none overwrites what a later one
/// reads.
struct MoveKvParams {
  const KvLayerView* layers = nullptr;  // [num_layers], all of one page size
  int num_layers = 0;
  PageTableView page_table;
  const int32_t* seq = nullptr;  // [num_moves] slots
  const int32_t* from = nullptr;
  const int32_t* to = nullptr;
  int num_moves = 0;
  DType dtype = DType::kF32;
};

void move_kv_cpu(const ExecContext& exec, const MoveKvParams& params);

}  // namespace openspec
