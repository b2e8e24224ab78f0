#pragma once

#include <span>
#include <vector>

#include "kernels/linear/packed_linear.h"
#include "model/weights/part.h"
#include "model/weights/tensor_scale.h"

namespace openspec {

inline ScaleKind scale_kind(TensorScale::Form form) {
  return form == TensorScale::Form::kBlock ? ScaleKind::kBlock : ScaleKind::kOutput;
}

/// Writes into a matrix's `table` (of `matrix.num_scales()`) the scales of outputs [first_output,
/// first_output + part.count), which are `part` of a checkpoint tensor's; `values` has all of that.
void fill_scales(const PackedLinear& matrix, TensorScale::Form form,
                 const std::vector<float>& values, Part part, int first_output,
                 std::span<float> table);

/// Whether one of the codes is a NaN: 0x7F or 0xFF.
bool has_nan_code(const void* codes, size_t count);

}  // namespace openspec
