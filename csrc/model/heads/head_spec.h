#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "model/parts/layer_spec.h"
#include "model/targets/target_spec.h"

namespace openspec {

/// What captured states pass on their way to fc.
enum class CaptureNorm : uint8_t {
  kNone,
  kSlices,  // a norm of each layer's state: fc_norm
  kWhole,   // one norm of them side by side: input_norm
};

/// A draft head as its checkpoint describes it. Its hidden_size and vocabulary are the target's,
/// unless it is a model of its own.
/// Each method reads the fields that its heads have. Source: config.json and tensors, as
/// python/openspec/specs describes them.
struct HeadSpec {
  std::vector<LayerSpec> layers;
  float rms_norm_eps = 1e-6f;
  std::vector<int> capture_layers;  // of the target, from 0, rising: their outputs are read
  bool captures_normed = false;     // the last captured state has passed the target's final norm
  int draft_vocab_size = 0;
  bool has_embedding = false;    // its own; else the target's
  bool has_head = true;          // its own; else the target's
  bool has_token_map = false;    // d2t
  std::vector<int> kept_tokens;  // of a part of the target's vocabulary, always in it
  QuantizedTensors quantized;    // those that come as codes
  int mask_token = -1;           // stands at positions whose token is not known; -1: none does

  // Of drafters that are a whole language model, whose layers and numbers these are.
  std::optional<TargetSpec> model;
  int unknown_token = 0;             // what stands for tokens beyond its table
  bool has_projection_bias = false;  // of what takes captured states in

  // Of heads that feed their output back.
  CaptureNorm capture_norm = CaptureNorm::kNone;
  bool norm_before_residual = false;  // the stream begins with the normed feature
  bool norm_output = false;           // a row's feature is the normed output of the one before

  // Of heads that draft a block.
  int block_size = 0;                // rows, as trained
  bool anchor_drafts = false;        // the row of the last known token drafts, too
  bool is_causal = false;            // block rows do not see those after them
  bool sliding_is_causal = false;    // nor do they in layers that have a window
  bool window_follows_rows = false;  // a causal layer's window ends with each row
  int markov_rank = 0;               // 0: no Markov head
  int conv_group = 0;                // columns that share a coefficient; 0: no convolutions
  int selector_rank = 0;             // 0: no selector of candidates
  int selector_top_k = 0;            // its candidates of a position
  bool has_confidence = false;
  bool confidence_sees_token = false;  // the Markov head's state of the token before, too
};

}  // namespace openspec
