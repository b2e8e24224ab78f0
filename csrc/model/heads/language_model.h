#pragma once

#include <span>

#include "kernels/common/exec.h"
#include "model/heads/head_spec.h"
#include "model/parts/decoder_model.h"
#include "model/parts/decoder_pass.h"
#include "model/targets/dense_layers.h"

namespace openspec {

/// Geometry of a whole language model that drafts for another one.
struct LanguageModelConfig : HeadSpec, DenseConfig {
  /// Throws ArgumentError if the head describes none.
  LanguageModelConfig(const HeadSpec& head, const TargetSpec& target);

  using DenseConfig::rms_norm_eps;
  /// Throws ArgumentError naming the field that cannot be.
  void validate() const;
  /// Of captured states of a position; 0: it reads tokens alone.
  int states_width() const { return num_captures * target_hidden_size; }
  ForwardLimits pass_limits(ForwardLimits limits) const {
    limits.max_inputs = states_width();
    return limits;
  }

  int target_vocab_size, target_hidden_size, num_captures;
};

/// Its logits are for the tokens that the target has, too.
struct LanguageModelTensors : DenseTensors {
  LanguageModelTensors(Weights& weights, const LanguageModelConfig& config);

  PackedLinear projection;      // states_width -> hidden_size, if it reads states
  Weights::TokenMap token_map;  // null: columns are token ids
};

/// A decoder with an embedding and a head of its own. A token beyond its table is read as its
/// unknown token. Captured states of the target, of models that read them, are projected and added
/// to the embeddings.
class LanguageModel : public DecoderModel<LanguageModelConfig, LanguageModelTensors> {
 public:
  using DecoderModel::DecoderModel;

  /// All layers over the rows; `outputs` are theirs then. `states` [num_rows, states_width].
  void forward(const ExecContext& exec, const Sight& sight, std::span<const KvLayerView> kv,
               const void* states = nullptr);
  /// [max_rows, hidden_size], normed, of which logits are made: until the next pass.
  void* outputs() { return scratch_.normed(); }
  /// Logits of rows of `outputs`: out [count, draft_vocab_size] fp32; row [count], of -1 comes
  /// anything; null: the first ones.
  void logits(const ExecContext& exec, const int32_t* row, int count, float* out) {
    scratch_.logits(exec, tensors_.shared.head, row, count, out);
  }
};

}  // namespace openspec
