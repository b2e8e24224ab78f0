#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/linear/packed_linear.h"
#include "model/weights/part.h"

namespace openspec {

/// The tensor of scales that a checkpoint's e4m3 tensor has, [N, K] of codes.
struct TensorScale {
  enum class Form : uint8_t {
    kTensor,   // one number
    kChannel,  // [N], of each output
    kBlock,    // [ceil(N / 128), ceil(K / 128)]
  };

  std::string name;
  std::vector<int64_t> shape;  // as the file has it: with ones beside
  Form form = Form::kTensor;

  ScaleKind kind() const { return form == Form::kBlock ? ScaleKind::kBlock : ScaleKind::kOutput; }
};

/// By the name of the tensor of codes. All other matrices are bf16.
using QuantizedTensors = std::map<std::string, TensorScale>;

/// Writes into a matrix's `table` (of `matrix.num_scales()`) the scales of outputs [first_output,
/// first_output + part.count), which are `part` of a checkpoint tensor's; `values` has all of that.
void fill_scales(const PackedLinear& matrix, TensorScale::Form form,
                 const std::vector<float>& values, Part part, int first_output,
                 std::vector<float>& table);

/// Whether one of the codes is a NaN: 0x7F or 0xFF.
bool has_nan_code(const void* codes, size_t count);

}  // namespace openspec
