#pragma once

#include <vector>

#include "kernels/linear/packed_linear.h"

namespace openspec {

/// What heads may share with their target.
struct SharedTensors {
  const void* embedding = nullptr;  // [vocab_size, hidden_size] bf16
  std::vector<PackedLinear> head;   // hidden states, normed, to logits: the whole in shards
};

}  // namespace openspec
