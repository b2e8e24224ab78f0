#pragma once

#include "model/buffer.h"
#include "model/decoder_layer.h"

namespace openspec {

/// What the geometries of draft models that read captured states of the target have in common.
/// Source: config.json and tensors.
struct DraftModelConfig {
  int hidden_size = 0;  // of the target and of the draft model
  int num_captures = 0;
  int num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
  int intermediate_size = 0;
  int vocab_size = 0;        // of the target
  int draft_vocab_size = 0;  // of the head
  float rms_norm_eps = 1e-6f;
  double rope_theta = 1e4;
  bool has_embedding = false;  // its own; else the target's
  bool has_token_map = false;  // d2t

  LayerGeometry layer() const;
  /// With room for the linear over captured states.
  ForwardLimits pass_limits(ForwardLimits limits) const {
    limits.max_inputs = num_captures * hidden_size;
    return limits;
  }
  /// Throws ArgumentError naming the field that cannot be.
  void validate() const;
  /// [head_dim / 2] fp32.
  Buffer inv_freq(Device device) const;
};

}  // namespace openspec
