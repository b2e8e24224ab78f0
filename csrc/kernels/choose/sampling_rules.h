#pragma once

#include <cstdint>

#include "kernels/choose/choose.h"

/// What the parameters of a sequence ask of a row, for both engines. As with sample_math.h, nothing
/// here may be contracted.
namespace openspec {

OPENSPEC_HD bool has_top_k(const SamplingParams& sampling, int64_t vocab_size) {
  return sampling.top_k > 0 && sampling.top_k < vocab_size;
}
OPENSPEC_HD bool has_filters(const SamplingParams& sampling, int64_t vocab_size) {
  return sampling.min_p > 0.0f || sampling.top_p < 1.0f || has_top_k(sampling, vocab_size);
}
OPENSPEC_HD bool has_penalties(const SamplingParams& sampling) {
  return sampling.repetition_penalty != 1.0f || sampling.frequency_penalty != 0.0f ||
         sampling.presence_penalty != 0.0f;
}
OPENSPEC_HD bool masks_stop_ids(const SamplingParams& sampling, int position, int prompt_len) {
  return sampling.num_stop_ids > 0 && position + 1 - prompt_len < sampling.min_tokens;
}

/// The mask of a sample's row; null: none. Drafts have none.
OPENSPEC_HD const int32_t* row_mask_of(const ChooseParams& params, int64_t sample) {
  if (params.sample_mask == nullptr || params.is_draft) return nullptr;
  const int32_t mask = params.sample_mask[sample];
  const int64_t num_words = (int64_t{params.vocab_size} + 31) / 32;
  return mask < 0 ? nullptr : params.row_masks + mask * num_words;
}
/// Whether nothing is chosen for a sample.
OPENSPEC_HD bool is_held(const ChooseParams& params, int64_t sample) {
  const bool is_scored = params.score_token != nullptr && params.score_token[sample] >= 0;
  return params.sample_mask != nullptr && !params.is_draft && !is_scored &&
         params.sample_mask[sample] == kHeldMask;
}
OPENSPEC_HD bool is_allowed_by(const int32_t* mask, int64_t id) {
  return (static_cast<uint32_t>(mask[id / 32]) >> (id % 32) & 1) != 0;
}
/// The lowest token that a mask, which is not empty, allows.
OPENSPEC_HD int32_t lowest_allowed_by(const int32_t* mask) {
  int32_t id = 0;
  while (!is_allowed_by(mask, id)) ++id;
  return id;
}

/// The logit of a token that was seen before, `num_out` times in the output.
OPENSPEC_HD float penalised(const SamplingParams& sampling, float logit, int32_t num_out) {
  if (sampling.repetition_penalty != 1.0f) {
    logit =
        logit > 0.0f ? logit / sampling.repetition_penalty : logit * sampling.repetition_penalty;
  }
  if (num_out > 0) {
    logit -= sampling.frequency_penalty * static_cast<float>(num_out);
    logit -= sampling.presence_penalty;
  }
  return logit;
}

/// The id that bad word `index` of the slot's parameters takes from a row: the word's last, if the
/// tokens up to the row, committed ones and then its own draft ancestors, end in those before it;
/// else -1.
OPENSPEC_HD int32_t id_of_bad_word(const ChooseParams& params, int row, int slot, int index) {
  const SamplingParams& sampling = params.sampling[slot];
  const int32_t* word = sampling.bad_words;
  const int first = index == 0 ? sampling.num_bad_words : word[index - 1];
  const int last = word[index] - 1;
  const int32_t* known = params.tokens + slot * params.tokens_stride;
  int position = params.rows.row_position[row];
  for (int i = last - 1; i >= first; --i, --position) {
    if (position < 0) return -1;
    int32_t token;
    if (position >= params.num_tokens[slot]) {
      token = params.rows.row_token[row];
      row = params.rows.row_parent[row];
    } else {
      token = known[position];
    }
    if (token != word[i]) return -1;
  }
  return word[last];
}

}  // namespace openspec
