#pragma once

#include <span>
#include <vector>

#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "kernels/drafts/token_pairs.h"
#include "model/heads/draft_model.h"
#include "model/parts/decoder_model.h"
#include "model/parts/decoder_pass.h"

namespace openspec {

/// Geometry of a DFlash or DSpark draft model.
struct DFlashConfig : DraftModelConfig {
  using DraftModelConfig::DraftModelConfig;

  int confidence_inputs() const { return hidden_size + (confidence_sees_token ? markov_rank : 0); }
  void validate() const;
  ForwardLimits pass_limits(ForwardLimits limits) const;
};

struct DFlashTensors : DraftTensors {
  DFlashTensors(Weights& weights, const DFlashConfig& config);

  std::vector<DecoderLayer> layers;
  PackedLinear context;  // k_proj and v_proj of all layers, once more: a context has no queries
  const void *markov_in = nullptr, *markov_out = nullptr;
  struct Convs {
    BlockConv attention, mlp;
  };
  std::vector<Convs> convs;  // of the layers, or none
  const void *selector_in = nullptr, *selector_out = nullptr;
  PackedLinear selector_hidden;              // hidden_size -> selector_rank
  const float* confidence_weight = nullptr;  // [confidence_inputs] fp32, or null
  const float* confidence_bias = nullptr;    // [1] fp32, or null
};

/// Decoder layers over a block of [last known token, mask, ...] that attends to itself and to a
/// context. The context's keys and values are projected from the target's captured states alone, by
/// the layers' own k_proj and v_proj, once for every committed position.
///
/// Source: DFlash (arXiv 2602.06036), DSpark and the checkpoints' reference code: z =
/// hidden_norm(fc(captures)); of layer l K = rope(k_norm(k_proj z)), V = v_proj z, without the
/// layer's input norm, which only block rows pass; block rows run as in the target, over the
/// context and all rows of their block; logits = head(norm(h)). With a Markov head logits of a
/// draft gain w2 w1[token before it].
///
/// A head with convolutions has one around each attention and MLP (BlockConv), for block rows only;
/// its selector adds B[c] . (A[token before it] * W_h h) to the logits of the best candidates c.
/// Source: speculators 0.9 and SGLang 0.5.23, which agree.
class DFlash : public DecoderModel<DFlashConfig, DFlashTensors> {
 public:
  using DecoderModel::DecoderModel;

  /// Writes the context's K and V of `rows` (positions and slots count) from features [num_rows,
  /// num_captures * hidden_size].
  void extend(const ExecContext& exec, const RowBatch& rows, const void* features,
              std::span<const KvLayerView> kv);
  /// One pass over blocks; out [num_rows, hidden_size], normed. Layers that slide see `sliding`,
  /// the others `whole`, but for what is causal. `embedding` [vocab_size, hidden_size] bf16 is the
  /// target's.
  void forward(const ExecContext& exec, Sight whole, Sight sliding, std::span<const KvLayerView> kv,
               const void* embedding, void* out);
  /// Logits of `count` outputs: out [count, draft_vocab_size] fp32. `head` is the target's.
  void logits(const ExecContext& exec, const LogitsHead& head, const void* outputs, int count,
              float* out) {
    scratch_.logits_of(exec, config_.has_head ? tensors_.head : head, outputs, count, out);
  }
  /// The Markov head: what each token adds to the logits after it.
  TokenPairs markov_pairs() const {
    const Weights::TokenMap& map = tensors_.token_map;
    return {tensors_.markov_in,  tensors_.markov_out, config_.draft_vocab_size,
            config_.markov_rank, map.token_of,        map.column_of};
  }
  /// The selector: what each token adds, with the factors of `weigh_pairs`.
  TokenPairs selector_pairs() const {
    return {tensors_.selector_in, tensors_.selector_out, config_.vocab_size, config_.selector_rank};
  }
  /// How `count` outputs weigh the terms of the selector's pairs: factors [count, selector_rank].
  void weigh_pairs(const ExecContext& exec, const void* outputs, int count, void* factors) {
    scratch_.linear(exec, tensors_.selector_hidden, outputs, factors, count);
  }
};

}  // namespace openspec
