#pragma once

#include "model/parts/decoder_layer.h"

namespace openspec {

/// What heads may share with their target.
struct SharedTensors {
  const void* embedding = nullptr;  // [vocab_size, hidden_size] bf16
  LogitsHead head;                  // of hidden states, normed
};

}  // namespace openspec
