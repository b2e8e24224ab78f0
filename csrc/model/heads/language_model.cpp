#include "model/heads/language_model.h"

#include <algorithm>

#include "core/check.h"
#include "kernels/ops.h"
#include "model/heads/draft_model.h"

namespace openspec {

namespace {

const TargetSpec& model_of(const HeadSpec& head) {
  OPENSPEC_CHECK_ARG(head.model.has_value(), "a drafter of this kind needs a language model");
  return *head.model;
}

}  // namespace

LanguageModelConfig::LanguageModelConfig(const HeadSpec& head, const TargetSpec& target)
    : HeadSpec(head),
      DenseConfig(model_of(head)),
      target_vocab_size(target.vocab_size),
      target_hidden_size(target.hidden_size),
      num_captures(static_cast<int>(capture_layers.size())) {
  check_captures(capture_layers, target);
}

void LanguageModelConfig::validate() const {
  DenseConfig::validate();
  OPENSPEC_CHECK_ARG(layers == model->layers, "the head's layers must be its model's");
  OPENSPEC_CHECK_ARG(draft_vocab_size == std::min(vocab_size, target_vocab_size),
                     "draft_vocab_size must be ", std::min(vocab_size, target_vocab_size),
                     ", the tokens of both models, got ", draft_vocab_size);
  OPENSPEC_CHECK_ARG(unknown_token >= 0 && unknown_token < vocab_size,
                     "unknown_token must be in [0, ", vocab_size, "), got ", unknown_token);
}

LanguageModelTensors::LanguageModelTensors(Weights& weights, const LanguageModelConfig& c)
    : DenseTensors(
          weights, c, Part(0, c.draft_vocab_size, c.vocab_size),
          {.count = std::max(c.target_vocab_size - c.vocab_size, 0), .like = c.unknown_token}) {
  // The columns that are left out have no place among the logits.
  shared.head.shards.front().shard.whole_outputs = c.draft_vocab_size;
  if (c.num_captures > 0) {
    projection = weights.add_linear("", {"target_proj.weight"}, {c.hidden_size}, c.states_width(),
                                    LinearEpilogue::kNone, /*may_split=*/!c.has_projection_bias,
                                    c.has_projection_bias);
  }
}

void LanguageModel::forward(const ExecContext& exec, const Sight& sight,
                            std::span<const KvLayerView> kv, const void* states) {
  static const std::vector<int> kNoLayers;
  const RowBatch& rows = sight.rows;
  OPENSPEC_CHECK(rows.num_rows >= 1 && rows.num_rows <= limits_.max_rows, "a pass of ",
                 rows.num_rows, " rows, at most ", limits_.max_rows);
  DecoderPass pass(exec, scratch_, rows, sight.pages, kv.front(), inv_freq_.floats(),
                   /*first_token=*/0, /*is_fenced=*/true);
  ops::embedding(exec, {.token = rows.row_token,
                        .table = tensors_.shared.embedding,
                        .out = scratch_.residual(),
                        .num_rows = rows.num_rows,
                        .width = config_.hidden_size,
                        .dtype = dtype_});
  if (states != nullptr) pass.add_product(tensors_.projection, states);
  run_dense_layers(pass, tensors_, kv, {.layers = kNoLayers}, scratch_.residual(), outputs());
}

}  // namespace openspec
