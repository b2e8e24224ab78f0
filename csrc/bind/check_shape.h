#pragma once

#include <ATen/core/Tensor.h>

namespace openspec {

/// Raises TypeError or ValueError, which name the tensor, unless it is contiguous of this type and
/// shape.
inline void check_shape(const at::Tensor& tensor, const char* name, at::ScalarType type,
                        c10::IntArrayRef shape) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == type, name, " must be ", type, ", is ",
                   tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.sizes() == shape && tensor.is_contiguous(), name,
                    " must be contiguous of shape ", shape, ", has ", tensor.sizes());
}

}  // namespace openspec
