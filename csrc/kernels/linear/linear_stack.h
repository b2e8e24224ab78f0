#pragma once

#include <cstddef>

#include "kernels/linear/packed_linear.h"

namespace openspec {

/// Matrices of one shape and format, as the experts of a layer have them, one behind the other.
struct LinearStack {
  PackedLinear first;
  int count = 0;
  size_t bytes = 0;  // from the numbers of one to those of the next

  PackedLinear at(int index) const {
    PackedLinear one = first;
    one.data = static_cast<const char*>(first.data) + static_cast<size_t>(index) * bytes;
    if (first.scales != nullptr) one.scales = first.scales + int64_t{index} * first.num_scales();
    return one;
  }
};

}  // namespace openspec
