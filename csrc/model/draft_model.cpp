#include "model/draft_model.h"

#include <cmath>
#include <vector>

#include "core/check.h"

namespace openspec {

LayerGeometry DraftModelConfig::layer() const {
  return {.hidden_size = hidden_size,
          .attention_inputs = hidden_size,
          .num_q_heads = num_q_heads,
          .num_kv_heads = num_kv_heads,
          .head_dim = head_dim,
          .intermediate_size = intermediate_size,
          .has_qk_norm = true,
          .rms_norm_eps = rms_norm_eps};
}

void DraftModelConfig::validate() const {
  layer().validate();
  check_size("number of capture_layers", num_captures);
  check_size("draft_vocab_size", draft_vocab_size);
  OPENSPEC_CHECK_ARG(draft_vocab_size <= vocab_size, "draft_vocab_size (", draft_vocab_size,
                     ") exceeds the target's vocabulary of ", vocab_size);
  OPENSPEC_CHECK_ARG(has_token_map || draft_vocab_size == vocab_size, "a head of ",
                     draft_vocab_size, " columns needs a token map, the target has ", vocab_size);
  OPENSPEC_CHECK_ARG(rope_theta > 0.0, "rope_theta must be positive, got ", rope_theta);
}

Buffer DraftModelConfig::inv_freq(Device device) const {
  std::vector<float> values;
  for (int i = 0; i < head_dim / 2; ++i) {
    values.push_back(static_cast<float>(std::pow(rope_theta, -2.0 * i / head_dim)));
  }
  return copy_for(device, values);
}

}  // namespace openspec
