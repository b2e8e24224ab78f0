#pragma once

#include "model/parts/decoder_layer.h"

namespace openspec {

/// The norm between the last layer and the head.
struct FinalNorm {
  const float* weight = nullptr;  // [hidden_size]
  float eps = 1e-6f;
  bool rounds_once = false;
};

/// What heads may share with their target.
struct SharedTensors {
  const void* embedding = nullptr;  // [vocab_size, hidden_size] bf16
  FinalNorm norm;
  LogitsHead head;  // of hidden states, normed
};

}  // namespace openspec
