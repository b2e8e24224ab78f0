#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace openspec {

/// What ops expect of their arguments; raise TypeError or ValueError.

inline void check_int32(const at::Tensor& tensor, const char* name, int64_t num_dims) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt, name, " must be int32, is ",
                   tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.dim() == num_dims, name, " must have ", num_dims, " dimensions, has ",
                    tensor.dim());
}

inline void check_range(int64_t value, const char* name, int64_t low, int64_t high) {
  TORCH_CHECK_VALUE(value >= low && value <= high, name, " must be in [", low, ", ", high, "], is ",
                    value);
}

}  // namespace openspec
