#pragma once

#include "kernels/exec.h"

namespace openspec {

/// residual += delta (where delta is given); out = residual * rsqrt(mean(residual^2) + eps) *
/// weight.
///
/// Statistics in fp32; the normalised value is rounded to `dtype` before the multiplication with
/// the weight, as in the Hugging Face reference. One row's sum is always taken in the same order.
struct RmsNormParams {
  void* residual = nullptr;       // [num_rows, width] dtype, updated in place when delta is given
  const void* delta = nullptr;    // [num_rows, width] dtype, or null
  const float* weight = nullptr;  // [width]
  void* out = nullptr;            // [num_rows, width] dtype; may not alias residual
  int num_rows = 0;
  int width = 0;
  float eps = 1e-6f;
  DType dtype = DType::kF32;
};

void rms_norm_cpu(const ExecContext& exec, const RmsNormParams& params);

}  // namespace openspec
