#include "model/weights/scales.h"

#include <algorithm>

namespace openspec {

void fill_scales(const PackedLinear& matrix, TensorScale::Form form,
                 const std::vector<float>& values, Part part, int first_output,
                 std::span<float> table) {
  const bool has_blocks = matrix.scale_kind == ScaleKind::kBlock;
  const int num_blocks = has_blocks ? matrix.num_scale_blocks() : 1;
  const int whole_blocks = (matrix.whole_inputs() + kScaleInputs - 1) / kScaleInputs;
  for (int i = 0; i < part.count; ++i) {
    const int row = part.first + i;
    for (int block = 0; block < num_blocks; ++block) {
      const int at = form == TensorScale::Form::kTensor ? 0
                     : form == TensorScale::Form::kChannel
                         ? row
                         : row / kScaleOutputs * whole_blocks + matrix.scale_block(0) + block;
      table[static_cast<size_t>(matrix.scale_at(first_output + i, block))] =
          values[static_cast<size_t>(at)];
    }
  }
}

bool has_nan_code(const void* codes, size_t count) {
  constexpr size_t kAtOnce = 4096;
  const auto* code = static_cast<const uint8_t*>(codes);
  for (size_t begin = 0; begin < count; begin += kAtOnce) {
    uint8_t found = 0;
    for (size_t i = begin; i < std::min(count, begin + kAtOnce); ++i) {
      found = static_cast<uint8_t>(found | ((code[i] & 0x7f) == 0x7f));
    }
    if (found != 0) return true;
  }
  return false;
}

}  // namespace openspec
