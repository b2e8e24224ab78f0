#pragma once

#include <string>

#include "model/parts/decoder_layer.h"

namespace openspec {

/// What the geometries of draft models that read captured states of the target have in common.
/// hidden_size is the target's too. Source: config.json and tensors.
struct DraftModelConfig : LayerGeometry {
  int num_captures = 0;
  int vocab_size = 0;          // of the target
  int draft_vocab_size = 0;    // of the head
  bool has_embedding = false;  // its own; else the target's
  bool has_token_map = false;  // d2t

  /// Throws ArgumentError naming the field that cannot be.
  void validate() const;
  /// With room for the linear over captured states.
  ForwardLimits pass_limits(ForwardLimits limits) const {
    limits.max_inputs = num_captures * hidden_size;
    return limits;
  }
};

/// The tensors that these models have in common.
struct DraftTensors {
  DraftTensors(Weights& weights, const DraftModelConfig& config, const std::string& hidden_norm,
               bool has_head);

  PackedLinear fc, head;
  const float *hidden_norm = nullptr, *final_norm = nullptr;
  const void* embedding = nullptr;  // [vocab_size, hidden_size] bf16, if it is its own
  Weights::TokenMap token_map;      // null: columns of the head are token ids
};

}  // namespace openspec
