#pragma once

/// Step 4 of `choose` (choose.h) on a row whose distribution is known.

#include "kernels/choose.h"
#include "kernels/rejection.h"
#include "kernels/vocab_cpu.h"

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
  int32_t count;
  uint64_t total;  // fixed-point sum of the weights
};

/// The token chosen where step 3 would have drawn `drawn`. `work`: a float for each of the draft's
/// columns.
inline int32_t choose_by_rejection(const DrawnDraft& draft, const DraftLogits& from,
                                   const SamplingParams& sampling, int32_t position,
                                   const Candidates& target, int32_t drawn, float* work) {
  const Logits logits = {draft.logits, from.vocab_size, 1.0f / sampling.temperature};
  const uint64_t total = exponentiate(logits, max_logit(logits), work);
  const int32_t column = sm::column_of_token(from.token_of, from.vocab_size, draft.token);
  if (target.total == 0 || total == 0 || column < 0) return drawn;
  const float p_scale = sm::inverse_of_mass(target.total);
  const float q_scale = sm::inverse_of_mass(total);
  const float q_draft = work[column] * q_scale;
  if (!(q_draft > 0.0f)) return drawn;
  const int32_t at = sm::column_of_token(target.ids, target.count, draft.token);
  const float p_draft = at >= 0 ? target.weights[at] * p_scale : 0.0f;
  if (sm::accepts_draft(p_draft, q_draft, sampling.seed, position)) {
    return draft.token;
  }
  float best = kMinusInfinity;
  int32_t next = 0;  // column, as both lists of tokens rise
  const auto token_of = [&](int32_t i) { return from.token_of == nullptr ? i : from.token_of[i]; };
  for (int32_t i = 0; i < target.count; ++i) {
    const int32_t id = target.ids[i];
    while (next < from.vocab_size && token_of(next) < id) ++next;
    const bool is_known = next < from.vocab_size && token_of(next) == id;
    const float q = is_known ? work[next] * q_scale : 0.0f;
    const float score =
        sm::residual_score(target.weights[i] * p_scale, q, sampling.seed, position, id);
    if (score > best) {
      best = score;
      drawn = id;
    }
  }
  return drawn;
}

}  // namespace openspec::OPENSPEC_ISA
