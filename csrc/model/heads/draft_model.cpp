#include "model/heads/draft_model.h"

#include "core/check.h"

namespace openspec {

void check_captures(const std::vector<int>& layers, const TargetSpec& target) {
  int last = -1;
  for (const int layer : layers) {
    OPENSPEC_CHECK_ARG(layer > last && layer < target.num_layers(),
                       "capture_layers must rise and be of the target's ", target.num_layers(),
                       " layers, got ", layer);
    last = layer;
  }
}

DraftModelConfig::DraftModelConfig(const HeadSpec& head, const TargetSpec& target)
    : HeadSpec(head),
      LayerGeometry(geometry_of(head.layers, target.hidden_size, head.rms_norm_eps)),
      num_layers(static_cast<int>(head.layers.size())),
      num_captures(static_cast<int>(head.capture_layers.size())),
      vocab_size(target.vocab_size) {
  check_captures(capture_layers, target);
}

void DraftModelConfig::validate() const {
  LayerGeometry::validate();
  check_size("number of capture_layers", num_captures);
  check_size("draft_vocab_size", draft_vocab_size);
  OPENSPEC_CHECK_ARG(draft_vocab_size <= vocab_size, "draft_vocab_size (", draft_vocab_size,
                     ") exceeds the target's vocabulary of ", vocab_size);
  OPENSPEC_CHECK_ARG(has_token_map || draft_vocab_size == vocab_size, "a head of ",
                     draft_vocab_size, " columns needs a token map, the target has ", vocab_size);
  OPENSPEC_CHECK_ARG(has_head || draft_vocab_size == vocab_size, "a head of ", draft_vocab_size,
                     " columns needs weights of its own, the target has ", vocab_size);
}

DraftTensors::DraftTensors(Weights& weights, const DraftModelConfig& c,
                           const std::string& hidden_norm_name)
    : fc(weights.add_linear("", {"fc.weight"}, {c.hidden_size}, c.num_captures * c.hidden_size,
                            LinearEpilogue::kNone, /*may_split=*/true)),
      hidden_norm(weights.add_norm(hidden_norm_name, c.hidden_size)),
      final_norm(weights.add_norm("norm.weight", c.hidden_size)) {
  if (c.has_head) {
    head.shards.push_back(weights.add_linear("", {"lm_head.weight"}, {c.draft_vocab_size},
                                             c.hidden_size, LinearEpilogue::kNone));
  }
  if (c.has_embedding) {
    embedding = weights.add_table("embed_tokens.weight", c.vocab_size, c.hidden_size);
  }
  if (c.has_token_map) token_map = weights.add_token_map("d2t", c.draft_vocab_size, c.vocab_size);
}

}  // namespace openspec
