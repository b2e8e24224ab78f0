#include "runtime/step/draft_planner.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <variant>

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

/// Scores of the drafts that a sequence gets, by place: a copy's, in its share of steps and where
/// it is as likely as the drafter's, and else the drafter's.
std::vector<float> scores_of_either(const DraftOffer& copy, const DraftOffer& drafter) {
  std::vector<double> survivals = survivals_of(drafter);
  survivals.resize(static_cast<size_t>(std::max(copy.num_drafts, drafter.num_drafts)));
  double of_copy = 1.0;  // one that comes at all begins rightly
  for (int i = 0; i < copy.num_drafts; ++i, of_copy *= copy.ratio) {
    double& survival = survivals[static_cast<size_t>(i)];
    survival += copy.availability * std::max(0.0, of_copy - survival);
  }
  std::vector<float> scores;
  for (const double survival : survivals) scores.push_back(static_cast<float>(std::log(survival)));
  return scores;
}

}  // namespace

std::optional<ExpertSharing> DraftPlanner::sharing_of(const TargetSpec& target) {
  for (const LayerSpec& layer : target.layers) {
    const auto* experts = std::get_if<ExpertsSpec>(&layer.mlp);
    if (experts != nullptr) return ExpertSharing(experts->num_experts, experts->top_k);
  }
  return std::nullopt;
}

StepPrices DraftPlanner::prices(const StepTable& table, int num_seqs) const {
  if (!sharing_ || seconds_per_expert_ == 0.0) return table.of(num_seqs);
  return {table.of(num_seqs), table.of(num_seqs, &StepTable::Point::num_experts),
          seconds_per_expert_, num_seqs, *sharing_};
}

int DraftPlanner::expected_depths() const {
  // The best drafts of a tree that may be as deep as it has drafts stand about two to a level.
  const int most = needs_.makes_trees ? (config_.max_draft_tokens + 1) / 2 : config_.num_depths();
  return std::min(config_.num_depths(), most);
}

DraftPlanner::ExpectedOffers DraftPlanner::expected_offers(const StepLease& lease,
                                                           bool with_drafter,
                                                           bool may_be_absent) const {
  ExpectedOffers expected;
  const bool compares = with_drafter && config_.max_copied_drafts > 0;
  const double price = compares ? row_price(lease) : 0.0;
  const auto worth = [&](const DraftOffer& offer) {
    return static_cast<float>(worth_of(offer, price));
  };
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    DraftOffer& offer = expected.offers.emplace_back();
    offer.num_drafts = lease.offers[i].num_offered[kGrammarDrafts];
    offer.ratio = ratio(request.slot, kGrammarDrafts);
    if (offer.num_drafts > 0) continue;
    DraftOffer drafter;
    if (with_drafter) {
      const SourceEstimate& estimate = table_.estimate(request.slot, kDrafterDrafts);
      drafter = {.num_drafts = std::min(request.max_drafts, config_.max_draft_tokens),
                 .ratio = estimate.acceptance.ratio(),
                 .availability = may_be_absent ? estimate.availability.ratio() : 1.0,
                 .num_depths = expected_depths()};
    }
    const DraftOffer copy =
        may_be_absent ? expected_copy(request) : known_copy(request.slot, lease.offers[i]);
    if (copy.num_drafts > 0 && may_be_absent) {
      offer.scores = expected.scores.emplace_back(scores_of_either(copy, drafter));
      offer.num_drafts = static_cast<int>(offer.scores.size());
    } else {
      offer = is_copy_better(worth(copy), worth(drafter)) ? copy : drafter;
    }
  }
  return expected;
}

DraftOffer DraftPlanner::expected_copy(const SpanRequest& request) const {
  const SourceEstimate& estimate = table_.estimate(request.slot, kCopiedDrafts);
  return {.num_drafts = std::min(request.max_drafts, config_.max_copied_drafts),
          .ratio = estimate.acceptance.ratio(),
          .availability = estimate.availability.ratio()};
}

DraftOffer DraftPlanner::known_copy(int slot, const MergedDraft& merged) const {
  return {.num_drafts = merged.num_offered[kCopiedDrafts],
          .ratio = table_.copy_estimate(slot).ratio(merged.copied.copy_class())};
}

double DraftPlanner::row_price(const StepLease& lease) const {
  const int num_seqs = static_cast<int>(lease.requests.size());
  if (!is_adaptive()) return 0.0;
  const StepPrices times = prices(plain_times_, num_seqs);
  const int num_rows = num_known_rows(lease), num_more = num_seqs * config_.draft_room();
  const double row_seconds =
      (times.seconds(num_rows + num_more) - times.seconds(num_rows)) / std::max(1, num_more);
  return row_seconds * num_sampled(lease) / times.seconds(num_sampled(lease));
}

bool DraftPlanner::prefers_copy(int slot, const MergedDraft& merged, const Draft& drafter,
                                double row_price) const {
  const auto price = static_cast<float>(row_price);
  const auto worth = [&](int num_drafts, double acceptance, const float* scores) {
    float worth = 0.0f;
    for (int i = 0; i < num_drafts; ++i) {
      worth += worth_of_draft(i, static_cast<float>(acceptance), scores, price);
    }
    return worth;
  };
  const float* scores = drafter.scores.empty() ? nullptr : drafter.scores.data();
  return is_copy_better(
      worth(merged.num_offered[kCopiedDrafts],
            table_.copy_estimate(slot).ratio(merged.copied.copy_class()), nullptr),
      worth(drafter.size(), ratio(slot, kDrafterDrafts), scores));
}

bool DraftPlanner::drafter_pays(StepLease& lease, bool may_be_absent, double host_seconds) {
  const auto plan_with = [&](bool proposes) {
    const ExpectedOffers expected = expected_offers(lease, proposes, may_be_absent);
    return plan(lease, expected.offers, proposes, host_seconds);
  };
  const RowBudget with = plan_with(true), without = plan_with(false);
  const double rate = with.num_drafts > 0 ? with.tokens_per_second : 0.0;
  // Nothing is learned of steps with prompts: no trials there.
  if (has_prompt(lease)) return rate > without.tokens_per_second;
  auto& [yield, gates] = experience_[lease.plan.samples];
  const int num_seqs = num_sampled(lease);
  // Nothing is known of steps without drafts: if they are not as late, they win.
  const bool is_guess =
      !yield.is_known(num_seqs, without.num_drafts) && rate <= without.tokens / without.seconds;
  return gates.of(num_seqs).opens(rate, without.tokens_per_second, with.seconds / without.seconds,
                                  is_guess);
}

RowBudget DraftPlanner::plan(StepLease& lease, std::span<const DraftOffer> offers, bool proposes,
                             double host_seconds) {
  proposes = proposes && !proposing_times_.empty();
  const int num_seqs = static_cast<int>(lease.requests.size());
  const int num_rows = num_known_rows(lease), num_samples = num_sampled(lease);
  const bool samples =
      2 * std::ranges::count_if(lease.requests,
                                [&](const SpanRequest& request) {
                                  return table_.params(request.slot).temperature >= kMinTemperature;
                                }) >
      num_seqs;
  const StepPrices plain = prices(plain_times_, num_seqs);
  // A prompt takes its time whatever is drafted beside it. Were that part of the rate, drafts would
  // seem to pay that take more time than the same tokens do in the steps after it.
  const double prompt_seconds = plain.seconds(num_rows) - plain.seconds(num_samples);
  RowBudget budget = spend_row_budget(offers, num_rows, num_samples, config_.max_num_batched_tokens,
                                      proposes ? prices(proposing_times_, num_seqs) : plain,
                                      host_seconds - prompt_seconds, experience_[samples].yield);
  lease.plan = {proposes, samples, budget.num_drafts, budget.tokens, budget.seconds};
  return budget;
}

std::vector<int> DraftPlanner::grant(StepLease& lease, double host_seconds) {
  std::vector<DraftOffer> offers;
  std::vector<size_t> request_of;
  std::vector<int> counts;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const MergedDraft& merged = lease.offers[i];
    counts.push_back(merged.draft.size());
    const std::span<const float> scores = merged.draft.scores;
    size_t first = 0;
    for (const DraftSourceId source : {kGrammarDrafts, kCopiedDrafts, kDrafterDrafts}) {
      const int num_drafts = merged.num_offered[source];
      if (num_drafts == 0) continue;
      const int slot = lease.requests[i].slot;
      offers.push_back({.num_drafts = num_drafts,
                        .ratio = source == kCopiedDrafts
                                     ? table_.copy_estimate(slot).ratio(merged.copied.copy_class())
                                     : ratio(slot, source),
                        .follows = first > 0});
      // Of others they say only that what follows is as likely as it was.
      if (source == kDrafterDrafts && !scores.empty()) {
        offers.back().scores = scores.subspan(first, static_cast<size_t>(num_drafts));
      }
      request_of.push_back(i);
      first += static_cast<size_t>(num_drafts);
    }
  }
  if (!is_adaptive()) return counts;
  const RowBudget budget = plan(lease, offers, lease.has_proposed, host_seconds);
  std::fill(counts.begin(), counts.end(), 0);
  for (size_t i = 0; i < offers.size(); ++i) counts[request_of[i]] += budget.counts[i];
  return counts;
}

std::optional<double> DraftPlanner::expected_draft_seconds(int num_seqs, int num_rows) const {
  if (plain_times_.empty() || proposing_times_.empty()) return std::nullopt;
  const double proposing = proposing_times_.of(num_seqs).seconds(num_rows);
  return std::max(0.0, proposing - plain_times_.of(num_seqs).seconds(num_rows));
}

void DraftPlanner::observe_time(const StepLease& lease, double seconds) {
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
  experience_[lease.plan.samples].yield.observe(num_sampled(lease), lease.plan.num_drafts,
                                                lease.plan.tokens, lease.plan.seconds, num_tokens,
                                                seconds);
}

void DraftPlanner::observe_experts(const StepLease& lease) {
  if (!sharing_ || lease.experts.num_layers == 0 || has_prompt(lease)) return;
  const auto num_seqs = std::ranges::count_if(
      lease.results, [](const SpanResult& result) { return result.num_computed > 0; });
  sharing_->observe(static_cast<int>(num_seqs), lease.num_rows, lease.experts.experts_per_layer());
}

}  // namespace openspec
