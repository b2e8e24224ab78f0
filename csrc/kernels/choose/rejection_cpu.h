#pragma once

/// Step 4 of `choose` (choose.h) on a row whose distribution is known.

#include "kernels/choose/choose.h"
#include "kernels/choose/rejection.h"
#include "kernels/choose/vocab_cpu.h"

namespace openspec::OPENSPEC_ISA {

/// A draft and the logits that it was drawn from; logits null: there is none.
struct DrawnDraft {
  int32_t token = -1;
  const float* logits = nullptr;
};

inline DrawnDraft draft_behind(const ChooseParams& params, int span, int position, int num_tokens) {
  const DrawnDrafts& drafts = params.drafts;
  const int depth = position + 1 - num_tokens;
  if (drafts.logits.values == nullptr || depth < 0 || depth >= drafts.counts[span]) return {};
  return {drafts.tokens[int64_t{span} * drafts.max_drafts + depth],
          drafts.logits.values + drafts.logits.row[span] * drafts.logits.row_stride +
              depth * drafts.logits.depth_stride};
}

/// The target's distribution.
struct Candidates {
  const int32_t* ids;    // [count], rising
  const float* weights;  // [count] e^(logit - maximum)
  int64_t count;
  uint64_t total;  // fixed-point sum of the weights
};

/// The token chosen where step 3 would have drawn `drawn`. `work`: a float for each of the draft's
/// columns.
inline int32_t choose_by_rejection(const ChooseParams& params, const DrawnDraft& draft,
                                   const SamplingParams& sampling, int32_t position,
                                   const Candidates& target, int32_t drawn, float* work) {
  if (draft.token < 0 || draft.token >= params.vocab_size) return drawn;
  const DraftLogits& from = params.drafts.logits;
  const Logits logits = {draft.logits, from.vocab_size, 1.0f / sampling.temperature};
  const uint64_t total = exponentiate(logits, max_logit(logits), work);
  if (target.total == 0 || total == 0) return drawn;
  const float p_scale = sm::inverse_of_mass(target.total);
  const float q_scale = sm::inverse_of_mass(total);
  const auto probability = [&](int32_t id) {
    const int32_t column = sm::column_of_token(from.column_of, from.vocab_size, id);
    return column >= 0 ? work[column] * q_scale : 0.0f;
  };
  const float q_draft = probability(draft.token);
  if (!(q_draft > 0.0f)) return drawn;
  float p_draft = 0.0f;
  for (int64_t i = 0; i < target.count; ++i) {
    if (target.ids[i] == draft.token) p_draft = target.weights[i] * p_scale;
  }
  if (sm::accepts_draft(p_draft, q_draft, sampling.seed, position)) return draft.token;
  float best = kMinusInfinity;
  for (int64_t i = 0; i < target.count; ++i) {
    const int32_t id = target.ids[i];
    const float score = sm::residual_score(target.weights[i] * p_scale, probability(id),
                                           sampling.seed, position, id);
    if (score > best) {
      best = score;
      drawn = id;
    }
  }
  return drawn;
}

}  // namespace openspec::OPENSPEC_ISA
