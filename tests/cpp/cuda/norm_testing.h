#pragma once

/// What RMS norms in bf16 may give, for the tests of the ops that hold one.

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/kernel_testing.h"

namespace openspec::testing {

/// 1 / sqrt(mean of squares + eps) of bf16 values, in double.
inline double exact_scale(const uint16_t* values, size_t count, double eps) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const double x = static_cast<double>(from_bf16(values[i]));
    sum += x * x;
  }
  return 1 / std::sqrt(sum / static_cast<double>(count) + eps);
}

/// bf16(bf16(x * scale) * weight) where the scale may be wrong by what fp32 sums in another order
/// are: at most 40 additions deep 1.2e-6 after the root, the reciprocal root and the product
/// 0.3e-6. The two values are equal unless that tips the first rounding; everything after it is
/// exact.
inline std::array<float, 2> normed(uint16_t x, double scale, float weight) {
  std::array<float, 2> values;
  for (size_t i = 0; i < 2; ++i) {
    const double product =
        static_cast<double>(from_bf16(x)) * scale * (i == 0 ? 1 - 2e-6 : 1 + 2e-6);
    const float rounded = from_bf16(to_bf16(static_cast<float>(product)));
    const double weighted = static_cast<double>(rounded) * static_cast<double>(weight);
    values[i] = from_bf16(to_bf16(static_cast<float>(weighted)));
  }
  return values;
}

/// bf16(x * scale * weight), likewise.
inline std::array<float, 2> normed_once(uint16_t x, double scale, float weight) {
  std::array<float, 2> values;
  for (size_t i = 0; i < 2; ++i) {
    const double product = static_cast<double>(from_bf16(x)) * scale * static_cast<double>(weight) *
                           (i == 0 ? 1 - 2e-6 : 1 + 2e-6);
    values[i] = from_bf16(to_bf16(static_cast<float>(product)));
  }
  return values;
}

}  // namespace openspec::testing
