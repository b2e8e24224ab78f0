#pragma once

#include <variant>
#include <vector>

namespace openspec {

/// Attention of one layer. Source: config.json, as python/openspec/specs reads it.
struct AttentionSpec {
  int num_q_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  bool has_qk_norm = true;    // norms of each q and k head
  bool has_qkv_bias = false;  // of q_proj, k_proj and v_proj
  bool has_gate = false;      // q_proj holds of each head the query, then a gate of its output
  // Of RoPE, scaling applied: [head_dim / 2], or fewer, and the rest of a head does not turn.
  std::vector<float> inv_freq;
  float rope_scale = 1.0f;  // multiplies cos and sin
  int window = 0;           // tokens that a row sees, the last ones; 0: all

  bool operator==(const AttentionSpec&) const = default;
};

/// Gated DeltaNet, a linear attention with a running state (kernels/delta_net). Heads of 128, a
/// convolution of four taps.
struct DeltaNetSpec {
  int num_key_heads = 0;
  int num_value_heads = 0;

  bool operator==(const DeltaNetSpec&) const = default;
};

/// A SwiGLU MLP.
struct DenseMlpSpec {
  int intermediate_size = 0;

  bool operator==(const DenseMlpSpec&) const = default;
};

/// One layer: what mixes positions, then what works on each of them. Another kind of either is one
/// more alternative here.
struct LayerSpec {
  std::variant<AttentionSpec, DeltaNetSpec> mixer;
  std::variant<DenseMlpSpec> mlp;

  bool operator==(const LayerSpec&) const = default;
};

}  // namespace openspec
