#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "kernels/drafts/draft_rows.h"
#include "kernels/drafts/token_pairs.h"
#include "model/buffer.h"
#include "model/decoder_layer.h"
#include "model/draft_model.h"
#include "model/weights.h"

namespace openspec {

/// Geometry of a DFlash or DSpark draft model.
struct DFlashConfig : DraftModelConfig {
  int num_layers = 0;
  bool is_causal = false;  // block rows do not see those behind them
  bool has_head = false;   // its own; else the target's
  int markov_rank = 0;     // 0: drafts do not depend on each other
  bool has_confidence = false;
  bool confidence_sees_token = false;  // the Markov head's state of the token before, too

  int confidence_inputs() const { return hidden_size + (confidence_sees_token ? markov_rank : 0); }
  void validate() const;
};

/// Decoder layers over a block of [last known token, mask, ...] that attends to itself and to a
/// context. The context's keys and values are projected from the target's captured states alone, by
/// the layers' own k_proj and v_proj, once for every committed position.
///
/// Source: DFlash (arXiv 2602.06036), DSpark and the checkpoints' reference code: z =
/// hidden_norm(fc(captures)); of layer l K = rope(k_norm(k_proj z)), V = v_proj z, without the
/// layer's input norm, which only block rows pass; block rows run as in Qwen3, over the context and
/// all rows of their block; logits = head(norm(h)). With a Markov head logits of a draft gain w2
/// w1[token before it].
class DFlash {
 public:
  DFlash(const DFlashConfig& config, DType dtype, Device device, const ForwardLimits& limits,
         int num_threads);

  Weights& weights() { return weights_; }

  /// Writes the context's K and V of `rows` (positions and slots count) from features [num_rows,
  /// num_captures * hidden_size].
  void extend(const ExecContext& exec, const RowBatch& rows, const void* features,
              std::span<const KvLayerView> kv);
  /// One pass over blocks; out [num_rows, hidden_size], normed. `embedding` [vocab_size,
  /// hidden_size] bf16 is the target's.
  void forward(const ExecContext& exec, const RowBatch& rows, const PageTableView& page_table,
               std::span<const KvLayerView> kv, const void* embedding, void* out);
  /// Logits of `count` outputs: out [count, draft_vocab_size] fp32. `head` is the target's.
  void logits(const ExecContext& exec, const PackedLinear& head, const void* outputs, int count,
              float* out);
  /// The Markov head: what each token adds to the logits behind it.
  TokenPairs markov_pairs() const {
    return {markov_in_, markov_out_, config_.vocab_size, config_.markov_rank};
  }
  /// Token ids of the head's columns, on the device; null: its numbers.
  const int32_t* token_of() const { return token_map_.token_of; }
  /// The other way round, see Weights::TokenMap.
  const int32_t* column_of() const { return token_map_.column_of; }
  /// [confidence_inputs] and [1] fp32, or null.
  const float* confidence_weight() const { return confidence_weight_; }
  const float* confidence_bias() const { return confidence_bias_; }

  static size_t weight_bytes(const DFlashConfig& config, Device device);
  static size_t scratch_bytes(const DFlashConfig& config, DType dtype, Device device,
                              const ForwardLimits& limits, int num_threads);

 private:
  struct Scratch {
    size_t residual, normed, kv, cos_sin, total;
  };
  static Scratch plan_scratch(const DFlashConfig& config, DType dtype, const ForwardLimits& limits);

  DFlashConfig config_;
  DType dtype_;
  Weights weights_;
  PackedLinear fc_, head_;
  PackedLinear context_;  // k_proj and v_proj of all layers, once more: a context has no queries
  std::vector<DecoderLayer> layers_;
  const float *hidden_norm_ = nullptr, *final_norm_ = nullptr;
  const float *confidence_weight_ = nullptr, *confidence_bias_ = nullptr;
  const void *embedding_ = nullptr, *markov_in_ = nullptr, *markov_out_ = nullptr;
  Weights::TokenMap token_map_;
  Buffer inv_freq_;
  Scratch at_;
  Buffer scratch_;
  DecoderScratch pass_scratch_;
};

}  // namespace openspec
