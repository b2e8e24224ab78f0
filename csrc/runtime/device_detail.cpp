#ifdef OPENSPEC_CUDA

// What DeviceStep tells of a step to a sequence that wants to know.

#include <algorithm>

#include "runtime/device_step.h"

namespace openspec {

SpanDetail DeviceStep::detail_of(const SpanResult& result, size_t entry) const {
  const StepOutcomeArrays& out = arrays_.outcome;
  const size_t first = entry * index(drafts_per_seq());
  SpanDetail detail;
  Draft& draft = detail.draft;
  for (size_t i = first; i < first + index(result.num_draft_tokens); ++i) {
    draft.tokens.push_back(out.drafts[i]);
    draft.parents.push_back(out.parents[i]);
    if (out.outcomes[entry].has_scores != 0) draft.scores.push_back(out.scores[i]);
  }
  detail.accepted = drafts_of_run(draft, result.token_ids);
  return detail;
}

std::optional<double> DeviceStep::draft_seconds(const StepLease& lease) const {
  if (!lease.has_proposed) return 0.0;
  // A step is one graph: its parts are told apart only by steps without a drafter.
  const std::optional<double> expected =
      expected_draft_seconds(static_cast<int>(lease.requests.size()), lease.num_rows);
  return expected ? std::optional(std::min(*expected, lease.seconds)) : std::nullopt;
}

}  // namespace openspec

#endif
