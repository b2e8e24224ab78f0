#pragma once

#include <cstdint>

#include "kernels/common/exec.h"
#include "model/weights/tensor_scale.h"

namespace openspec {

/// A matrix [num_rows, width] of bf16 or fp32, row by row.
struct WideMatrix {
  const void* data = nullptr;
  DType dtype = DType::kBF16;
  int64_t num_rows = 0, width = 0;
};

/// How many scales of that form a matrix has.
int64_t num_scales_of(const WideMatrix& matrix, TensorScale::Form form);

/// Writes e4m3 `codes` [num_rows, width] and their `scales`, as TensorScale shapes them. A scale is
/// the largest size of its weights / 448 (1 where all are zero). A code is the nearest to
/// weight / scale, of two as near the even one. All of it is fp32: the same bits on every machine
/// and for any number of threads. Throws ArgumentError if a weight is NaN or infinite.
void quantize(const WideMatrix& matrix, TensorScale::Form form, int num_threads, uint8_t* codes,
              float* scales);

}  // namespace openspec
