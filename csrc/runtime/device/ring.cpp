#ifdef OPENSPEC_CUDA

#include "runtime/device/ring.h"

namespace openspec {

int StepRing::take() {
  const int entry = next_;
  next_ = (next_ + 1) % StepInputs::kRing;
  await(entry);
  return entry;
}

void StepRing::await_before(int entry) const {
  await((entry + StepInputs::kRing - 1) % StepInputs::kRing);
}

std::span<const int32_t> StepRing::tokens(int entry, size_t span) const {
  const int32_t* first = out_.tokens + place(entry, span) * (1 + most_drafts(config_));
  return {first, as_index(outcome(entry, span).num_tokens)};
}

SpanResult StepRing::result(const StepLease& lease, size_t span) const {
  const int entry = lease.ring_index;
  const StepOutcome& outcome = this->outcome(entry, span);
  SpanResult result;
  result.slot = lease.requests[span].slot;
  // Another sequence may have the slot by now; nobody wants to know then.
  if (!table_.is_held_by(result.slot, lease.serials[span])) return result;
  const std::span<const int32_t> chosen = tokens(entry, span);
  result.token_ids.assign(chosen.begin(), chosen.end());
  result.finish = static_cast<FinishReason>(outcome.finish);
  result.num_computed = outcome.num_computed;
  MergedDraft offers = lease.offers[span];
  if (outcome.is_copied != 0) {
    offers.num_offered[kCopiedDrafts] = outcome.num_offered - offers.num_offered[kGrammarDrafts];
  }
  result.count_drafts(offers.deal({.num_offered = outcome.num_offered,
                                   .num_drafts = outcome.num_drafts,
                                   .num_accepted = outcome.num_accepted,
                                   .num_judged = outcome.num_judged,
                                   .num_right = outcome.num_right}));
  result.copied = {outcome.copy_class, outcome.num_copied_judged, outcome.num_copied_right};

  const SequenceParams& params = table_.params(result.slot);
  if (params.reports_steps && outcome.num_tokens > 0) {
    result.detail = detail(result, place(entry, span));
  }
  if (params.num_prompt_logprobs >= 0) {
    const int end = outcome.first_choice >= 0 ? outcome.first_choice : outcome.sample_end;
    for (int sample = outcome.sample_begin; sample < end; ++sample) {
      result.prompt_logprobs.push_back(logprobs(entry, sample, params.num_prompt_logprobs));
    }
  }
  if (params.num_logprobs >= 0) {
    const int32_t* samples = out_.samples + place(entry, span) * (1 + most_drafts(config_));
    for (int i = 0; i < outcome.num_tokens; ++i) {
      result.logprobs.push_back(logprobs(entry, samples[i], params.num_logprobs));
    }
  }
  return result;
}

SpanDetail StepRing::detail(const SpanResult& result, size_t place) const {
  const float* scores = out_.outcomes[place].has_scores != 0 ? out_.scores : nullptr;
  SpanDetail detail;
  detail.draft.append(out_.drafts, out_.parents, scores, place * most_drafts(config_),
                      result.num_draft_tokens);
  detail.accepted = drafts_of_run(detail.draft, result.token_ids);
  return detail;
}

TokenLogprobs StepRing::logprobs(int entry, int sample, int num_best) const {
  const size_t i = as_index(entry) * as_index(config_.max_num_batched_tokens) + as_index(sample);
  const int32_t* ids = out_.logprob_ids + i * (1 + kMaxLogprobs);
  const float* values = out_.logprobs + i * (1 + kMaxLogprobs);
  const auto count = as_index(1 + num_best);
  return {{ids, ids + count}, {values, values + count}, out_.ranks[i]};
}

}  // namespace openspec

#endif
