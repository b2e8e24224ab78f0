#pragma once

// How a linear's sums become its output, for every way of making the sums.

#include <cstring>

#include "kernels/common/simd_cpu.h"
#include "kernels/linear/linear.h"

namespace openspec::OPENSPEC_ISA {

// Where outputs go, of all splits together, or of one where they stay apart.
struct OutputRows {
  void* data;
  DType dtype;
};

OPENSPEC_INLINE OutputRows output_rows(const LinearParams& params, int split) {
  if (params.partials == nullptr) return {params.out, params.out_dtype};
  return {params.partials + linear_width(params.weight) * params.num_rows * split, DType::kF32};
}

// The epilogue: from the sums of panels [first_panel, last_panel) to the output.
inline void write_outputs(const LinearParams& params, int split, const float* sums,
                          int64_t sums_stride, int first_row, int last_row, int first_panel,
                          int last_panel) {
  const bool is_swiglu = params.weight.epilogue == LinearEpilogue::kSwiGlu;
  const OutputRows out = output_rows(params, split);
  const int64_t width = linear_width(params.weight), stride = linear_row_stride(params);
  const int panels_per_output = is_swiglu ? 2 : 1;
  for (int row = first_row; row < last_row; ++row) {
    const float* from = sums + (row - first_row) * sums_stride;
    for (int panel = first_panel; panel < last_panel; panel += panels_per_output) {
      const int64_t column = static_cast<int64_t>(panel / panels_per_output) * kLinearPanel;
      float values[kLinearPanel];
      for (int i = 0; i < kLinearPanel; i += kLanes) {
        const Vf value = load(from + i);
        store(values + i, is_swiglu ? silu(value) * load(from + kLinearPanel + i) : value);
      }
      from += panels_per_output * kLinearPanel;
      const int64_t count = min_of<int64_t>(kLinearPanel, width - column);
      if (params.weight.bias != nullptr) {
        for (int64_t i = 0; i < count; ++i) values[i] += params.weight.bias[column + i];
      }
      const int64_t offset = row * stride + column;
      if (out.dtype == DType::kBF16) {
        float_to_bf16(values, static_cast<uint16_t*>(out.data) + offset, count);
      } else if (count == kLinearPanel) {
        std::memcpy(static_cast<float*>(out.data) + offset, values, sizeof values);
      } else {
        std::memcpy(static_cast<float*>(out.data) + offset, values, count * sizeof(float));
      }
    }
  }
}

}  // namespace openspec::OPENSPEC_ISA
