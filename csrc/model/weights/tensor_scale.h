#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

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
};

/// By the name of the tensor of codes. All other matrices are bf16.
using QuantizedTensors = std::map<std::string, TensorScale>;

}  // namespace openspec
