#include "core/draft_budget.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace openspec {

AcceptanceEstimate::AcceptanceEstimate(double prior)
    : accepted_(prior * kPriorTrials), tried_(kPriorTrials) {}

void AcceptanceEstimate::observe(int num_drafted, int num_accepted) {
  if (num_drafted <= 0) return;
  accepted_ = kDecay * accepted_ + num_accepted;
  tried_ = kDecay * tried_ + std::min(num_accepted + 1, num_drafted);
}

StepTimes::StepTimes(std::vector<std::pair<int, double>> points, bool has_sizes)
    : points_(std::move(points)), has_sizes_(has_sizes) {
  for (size_t i = 1; i < points_.size(); ++i) {
    OPENSPEC_CHECK_ARG(points_[i].first > points_[i - 1].first, "row counts must rise");
    // More rows never take less time; a smaller reading is noise.
    points_[i].second = std::max(points_[i].second, points_[i - 1].second);
  }
}

double StepTimes::seconds(double num_rows) const {
  if (points_.empty()) return 0.0;
  if (points_.size() == 1 || num_rows <= points_.front().first) return points_.front().second;
  auto right = std::find_if(points_.begin(), points_.end(),
                            [&](const auto& point) { return point.first >= num_rows; });
  if (right == points_.end()) --right;
  if (has_sizes_ && num_rows <= right->first) return right->second;
  const auto left = right - 1;
  const double slope = (right->second - left->second) / (right->first - left->first);
  return left->second + slope * (num_rows - left->first);
}

namespace {

/// By draft, the probability that it and all before it are accepted; never rising.
std::vector<double> survivals_of(const DraftOffer& offer) {
  std::vector<double> survivals;
  if (!offer.scores.empty()) {
    for (float score : offer.scores) {
      survivals.push_back(offer.availability * std::exp(static_cast<double>(score)));
    }
    return survivals;
  }
  if (offer.num_drafts == 0) return survivals;
  // A tree has several drafts of a depth, of which at most one survives: each has its share.
  const bool is_tree = offer.num_depths > 0 && offer.num_depths < offer.num_drafts;
  const int num_depths = is_tree ? offer.num_depths : offer.num_drafts;
  double survival = offer.availability * num_depths / offer.num_drafts;
  for (int i = 0, depth = 0; i < offer.num_drafts; ++i) {
    for (; depth <= i * num_depths / offer.num_drafts; ++depth) survival *= offer.ratio;
    survivals.push_back(survival);
  }
  return survivals;
}

}  // namespace

RowBudget spend_row_budget(std::span<const DraftOffer> offers, int num_rows, int num_sampled,
                           int max_rows, const StepTimes& times, double fixed_seconds) {
  struct Candidate {
    double survival;
    size_t offer;
  };
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < offers.size(); ++i) {
    for (double survival : survivals_of(offers[i])) candidates.push_back({survival, i});
  }
  // Stable: a draft never overtakes the one it follows.
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.survival > b.survival; });
  const size_t room = static_cast<size_t>(std::max(0, max_rows - num_rows));
  if (candidates.size() > room) candidates.resize(room);

  double expected = num_sampled;
  double best_rate = expected / (times.seconds(num_rows) + fixed_seconds);
  size_t num_taken = 0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    expected += candidates[i].survival;
    const double rate =
        expected / (times.seconds(num_rows + static_cast<double>(i) + 1) + fixed_seconds);
    if (rate > best_rate) {
      best_rate = rate;
      num_taken = i + 1;
    }
  }
  RowBudget budget{std::vector<int>(offers.size(), 0), best_rate};
  for (size_t i = 0; i < num_taken; ++i) ++budget.counts[candidates[i].offer];
  return budget;
}

bool DraftGate::opens(double with_drafts, double without_drafts) {
  if (with_drafts <= without_drafts && ++num_closed_ < kProbeInterval) return false;
  num_closed_ = 0;
  return true;
}

}  // namespace openspec
