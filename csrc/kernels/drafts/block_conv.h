#pragma once

#include <cstdint>

#include "kernels/common/exec.h"

namespace openspec {

inline constexpr int kConvTaps = 2;

/// A convolution along the rows of each block, with coefficients that every row brings itself: with
/// g = c / group the group of a column,
///
///   out_r[c] = (base[0, c] + own_r[0, g]) * x_r[c] + (base[1, c] + own_r[1, g]) * x_p[c],
///
/// p being the row that r follows; a block's first row follows none and lacks the second product.
/// In bf16 every coefficient, both products and their sum are rounded, as in the authors' code.
/// `x` may come as partial sums of a split linear: their sum in order, rounded to `dtype`.
///
/// Source: DFlash2's reference code (z-lab, 2026), `grouped_dynamic_conv` in speculators 0.9.
struct BlockConvParams {
  const int32_t* row_parent = nullptr;  // [num_rows] as RowBatch has it; -1: none
  const void* x = nullptr;              // [num_rows, width] dtype, or null
  const float* partials = nullptr;      // [num_partials, num_rows, width], instead of x
  int num_partials = 0;
  const void* own = nullptr;    // [num_rows, kConvTaps, width / group] dtype
  int64_t own_stride = 0;       // elements from row to row of `own`
  const float* base = nullptr;  // [kConvTaps, width]
  void* out = nullptr;          // [num_rows, width] dtype; aliases nothing
  int num_rows = 0;
  int width = 0;
  int group = 0;  // columns that share a coefficient; a multiple of 8 that divides the width
  DType dtype = DType::kF32;
};

void block_conv_cpu(const ExecContext& exec, const BlockConvParams& params);
/// bf16. The CPU's result, bit for bit. Returns a cudaError_t.
int block_conv_cuda(const BlockConvParams& params, void* stream);

}  // namespace openspec
