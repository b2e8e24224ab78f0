#pragma once

#include "model/targets/shared_tensors.h"
#include "model/weights/weights.h"

namespace openspec {

/// What every target has around its layers: embedding, final norm, LM head.
struct OuterTensors {
  /// `Config` is a LayerGeometry with a vocabulary, of which the head has the rows `vocabulary`.
  /// The embedding has `more` rows than the checkpoint.
  template <typename Config>
  void add_outer(Weights& weights, const Config& c, const Part& vocabulary,
                 Weights::MoreRows more = {}) {
    shared.norm = {weights.add_norm("model.norm.weight", c.hidden_size, c.norms_from_one),
                   c.rms_norm_eps, c.norms_from_one};
    shared.head.shards.push_back(weights.add_linear("", {"lm_head.weight"}, {vocabulary},
                                                    c.hidden_size, LinearEpilogue::kNone));
    shared.embedding =
        weights.add_table("model.embed_tokens.weight", c.vocab_size, c.hidden_size, more);
    if (c.tie_word_embeddings) weights.tie("lm_head.weight", "model.embed_tokens.weight");
  }

  SharedTensors shared;
};

}  // namespace openspec
