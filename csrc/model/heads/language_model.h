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

  int target_vocab_size;
};

/// Its logits are for the tokens that the target has, too.
struct LanguageModelTensors : DenseTensors {
  LanguageModelTensors(Weights& weights, const LanguageModelConfig& config);

  Weights::TokenMap token_map;  // null: columns are token ids
};

/// A decoder with an embedding and a head of its own, which reads tokens alone. A token beyond its
/// table is read as its unknown token.
class LanguageModel : public DecoderModel<LanguageModelConfig, LanguageModelTensors> {
 public:
  using DecoderModel::DecoderModel;

  /// All layers over the rows; `outputs` are theirs then.
  void forward(const ExecContext& exec, const Sight& sight, std::span<const KvLayerView> kv);
  /// [max_rows, hidden_size], normed, of which logits are made: until the next pass.
  void* outputs() { return scratch_.normed(); }
  /// Logits of rows of `outputs`: out [count, draft_vocab_size] fp32; row [count], of -1 comes
  /// anything; null: the first ones.
  void logits(const ExecContext& exec, const int32_t* row, int count, float* out) {
    scratch_.logits(exec, tensors_.shared.head, row, count, out);
  }
};

}  // namespace openspec
