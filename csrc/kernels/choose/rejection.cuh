#pragma once

/// Step 4 of `choose` (choose.h) on a row whose filters are known.

#include <cstdint>

#include "kernels/choose/rejection.h"
#include "kernels/choose/team.cuh"

namespace openspec::choosing {

/// The draft after a row, and the distribution that it was drawn from.
struct DraftRow {
  View view{nullptr, 0, 0.0f};
  const int32_t* column_of = nullptr;
  float maximum = 0.0f;  // of the logits, as the sampler reads them
  float scale = 0.0f;    // from weights to probabilities
  int32_t token = -1;
  float q = 0.0f;  // of the token; 0: there is no draft, or it cannot have been drawn

  __device__ __forceinline__ bool is_known() const { return q > 0.0f; }
  __device__ __forceinline__ float weight(float value) const {
    return sm::exp_f32(view.at(value) - maximum);
  }
  __device__ __forceinline__ float probability(int32_t id) const {
    const int32_t column = sm::column_of_token(column_of, view.size, id);
    return column >= 0 ? weight(view.values[column]) * scale : 0.0f;
  }
};

/// By all CTAs of the row, for a row that has a draft.
__device__ inline DraftRow read_draft(const ChooseParams& params, const RowPlan& plan,
                                      Cluster& cluster) {
  const DrawnDrafts& drafts = params.drafts;
  const int32_t span = params.rows.row_span[plan.row];
  const int depth = plan.position + 1 - params.num_tokens[plan.slot];
  DraftRow draft;
  draft.view = {drafts.logits.values + drafts.logits.row[span] * drafts.logits.row_stride +
                    depth * drafts.logits.depth_stride,
                drafts.logits.vocab_size, 1.0f / params.sampling[plan.slot].temperature};
  draft.column_of = drafts.logits.column_of;
  draft.token = drafts.tokens[static_cast<int64_t>(span) * drafts.max_drafts + depth];
  const RowSource row(cluster, draft.view.values, draft.view.size);
  float largest = minus_infinity();
  row.for_each([&](int32_t, float value) { largest = fmaxf(largest, draft.view.at(value)); });
  draft.maximum = float_of_ordered(static_cast<uint32_t>(cluster.max(ordered_bits(largest))));
  uint64_t total = 0;
  row.for_each([&](int32_t, float value) { total += sm::fixed_mass(draft.weight(value)); });
  total = cluster.sum(total);
  const bool is_token = draft.token >= 0 && draft.token < params.vocab_size;
  if (total == 0 || !is_token) return draft;
  draft.scale = sm::inverse_of_mass(total);
  draft.q = draft.probability(draft.token);
  return draft;
}

/// The candidate key of the token chosen, where step 3 would have drawn `drawn`. `source` holds all
/// that the filters keep.
template <typename Source, typename Filters>
__device__ uint64_t choose_by_rejection(Source& source, const Filters& filters,
                                        const DraftRow& draft, const SamplingParams& sampling,
                                        int32_t position, uint64_t drawn) {
  uint64_t total = 0;
  source.for_each([&](int32_t, float value) {
    if (filters.keeps(value)) total += sm::fixed_mass(filters.weight(value));
  });
  total = source.sum(total);
  if (total == 0) return drawn;
  const float scale = sm::inverse_of_mass(total);
  const auto probability = [&](float value) {
    return filters.keeps(value) ? filters.weight(value) * scale : 0.0f;
  };
  // Another CTA may have edited this logit: past the L1 cache.
  const float p = probability(__ldcg(filters.view.values + draft.token));
  if (sm::accepts_draft(p, draft.q, sampling.seed, position)) {
    return candidate_key(0.0f, draft.token);
  }
  uint64_t best = 0;
  source.for_each([&](int32_t id, float value) {
    if (!filters.keeps(value)) return;
    const float score = sm::residual_score(filters.weight(value) * scale, draft.probability(id),
                                           sampling.seed, position, id);
    best = max_key(best, candidate_key(score, id));
  });
  best = source.max(best);
  return best == 0 ? drawn : best;
}

}  // namespace openspec::choosing
