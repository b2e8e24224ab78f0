#pragma once

#include <string>
#include <vector>

#include "model/heads/head_spec.h"
#include "model/parts/decoder_layer.h"
#include "model/targets/target_spec.h"

namespace openspec {

/// Throws ArgumentError unless the layers rise and are the target's.
void check_captures(const std::vector<int>& layers, const TargetSpec& target);

/// A draft head that reads captured states of a target: what its checkpoint says, and the geometry
/// that all its layers have.
struct DraftModelConfig : HeadSpec, LayerGeometry {
  /// Throws ArgumentError for layers that differ in more than their window.
  DraftModelConfig(const HeadSpec& head, const TargetSpec& target);

  using LayerGeometry::rms_norm_eps;
  int num_layers = 0;
  int num_captures = 0;
  int vocab_size = 0;  // of the target

  /// Whether the layer sees the last tokens of the context only.
  bool slides_at(size_t layer) const { return std::get<AttentionSpec>(layers[layer].mixer).window; }
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
  DraftTensors(Weights& weights, const DraftModelConfig& config, const std::string& hidden_norm);

  PackedLinear fc;
  LogitsHead head;  // if it is its own
  const float *hidden_norm = nullptr, *final_norm = nullptr;
  const void* embedding = nullptr;  // [vocab_size, hidden_size] bf16, if it is its own
  Weights::TokenMap token_map;      // null: columns of the head are token ids
};

}  // namespace openspec
