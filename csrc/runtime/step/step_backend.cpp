#include "runtime/step/step_backend.h"

#include <algorithm>
#include <utility>

#include "kernels/drafts/kept_rows.h"

namespace openspec {

namespace {

int num_known_rows(const StepLease& lease) {
  int count = 0;
  for (const SpanRequest& request : lease.requests) count += request.num_new_tokens;
  return count;
}

bool has_prompt(const StepLease& lease) {
  return std::any_of(lease.requests.begin(), lease.requests.end(),
                     [](const SpanRequest& request) { return request.num_new_tokens > 1; });
}

int num_sampled(const StepLease& lease) {
  return static_cast<int>(std::count(lease.is_sampled.begin(), lease.is_sampled.end(), true));
}

}  // namespace

bool StepBackend::may_keep_rows(const StepContext& context, const StepLease& lease) {
  if (!context.drafter.needs().is_costly || !context.drafter.works_on_arrays()) return false;
  return std::all_of(lease.requests.begin(), lease.requests.end(),
                     [](const SpanRequest& request) { return request.num_new_tokens == 1; });
}

int StepBackend::most_kept_steps(const RunnerConfig& config) {
  return std::min(kMaxKeptRows, config.max_num_batched_tokens);
}

int StepBackend::expected_depths(const StepContext& context) {
  const RunnerConfig& config = context.config;
  // The best drafts of a tree that may be as deep as it has drafts stand about two to a level.
  const int most =
      context.drafter.needs().makes_trees ? (config.max_draft_tokens + 1) / 2 : config.num_depths();
  return std::min(config.num_depths(), most);
}

RowBudget StepBackend::plan_drafts(StepLease& lease, std::span<const DraftOffer> offers,
                                   bool proposes, int max_rows, double host_seconds) {
  proposes = proposes && !proposing_times_.empty();
  const int num_seqs = static_cast<int>(lease.requests.size());
  const int num_rows = num_known_rows(lease), num_samples = num_sampled(lease);
  const StepTimes plain = plain_times_.of(num_seqs);
  // A prompt takes its time whatever is drafted beside it. Were that part of the rate, drafts would
  // seem to pay that take more time than the same tokens do in the steps after it.
  const double prompt_seconds = plain.seconds(num_rows) - plain.seconds(num_samples);
  RowBudget budget = spend_row_budget(offers, num_rows, num_samples, max_rows,
                                      proposes ? proposing_times_.of(num_seqs) : plain,
                                      host_seconds - prompt_seconds, yield_);
  lease.plan = {proposes, budget.num_drafts, budget.tokens, budget.seconds};
  return budget;
}

bool StepBackend::drafts_pay(StepLease& lease, std::span<const DraftOffer> offers,
                             std::span<const DraftOffer> otherwise, int max_rows,
                             double host_seconds) {
  const RowBudget with = plan_drafts(lease, offers, /*proposes=*/true, max_rows, host_seconds);
  const RowBudget without =
      plan_drafts(lease, otherwise, /*proposes=*/false, max_rows, host_seconds);
  const double rate = with.num_drafts > 0 ? with.tokens_per_second : 0.0;
  // Nothing is learned of steps with prompts: no trials there.
  if (has_prompt(lease)) return rate > without.tokens_per_second;
  return gates_.of(num_sampled(lease))
      .opens(rate, without.tokens_per_second, with.seconds / without.seconds);
}

std::optional<double> StepBackend::expected_draft_seconds(int num_seqs, int num_rows) const {
  if (plain_times_.empty() || proposing_times_.empty()) return std::nullopt;
  const double proposing = proposing_times_.of(num_seqs).seconds(num_rows);
  return std::max(0.0, proposing - plain_times_.of(num_seqs).seconds(num_rows));
}

void StepBackend::observe_time(const StepLease& lease, double seconds) {
  if (lease.plan.seconds <= 0.0) return;
  double num_tokens = 0.0;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    // Only steps of decoding alone: before another one the engine may have waited for work. And of
    // sequences that were still there.
    const SpanRequest& request = lease.requests[i];
    if (request.num_new_tokens > 1 || !lease.is_sampled[i]) return;
    if (lease.results[i].num_computed == 0) return;
    num_tokens += static_cast<double>(lease.results[i].token_ids.size());
  }
  // A step of another kind leaves caches and clocks that suit it.
  if (std::exchange(last_proposed_, lease.plan.proposes) != lease.plan.proposes) num_same_ = 0;
  if (++num_same_ < kFirstLearned) return;
  yield_.observe(num_sampled(lease), lease.plan.num_drafts, lease.plan.tokens, lease.plan.seconds,
                 num_tokens, seconds);
}

}  // namespace openspec
