#include "core/draft_budget.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace openspec {

AcceptanceEstimate::AcceptanceEstimate(double prior)
    : accepted_(prior * kPriorTrials), tried_(kPriorTrials) {}

AcceptanceEstimate AcceptanceEstimate::of_all() {
  AcceptanceEstimate all;
  all.decay_ = kDecayOfAll;
  return all;
}

AcceptanceEstimate AcceptanceEstimate::among(const AcceptanceEstimate& all) {
  AcceptanceEstimate own;
  own.accepted_ = own.tried_ = 0.0;
  own.all_ = &all;
  return own;
}

void AcceptanceEstimate::observe(int num_drafted, int num_accepted) {
  if (num_drafted <= 0) return;
  accepted_ = decay_ * accepted_ + num_accepted;
  tried_ = decay_ * tried_ + std::min(num_accepted + 1, num_drafted);
}

void AcceptanceEstimate::rest() {
  accepted_ += kRest * (1.0 - decay_) * std::max(0.0, others() * tried_ - accepted_);
}

double AcceptanceEstimate::ratio() const {
  const double common = all_ == nullptr ? 0.0 : kCommonTrials;
  return (accepted_ + common * others()) / (tried_ + common);
}

CopyEstimate::CopyEstimate()
    : by_class_{AcceptanceEstimate(0.6),  AcceptanceEstimate(0.8),  AcceptanceEstimate(0.9),
                AcceptanceEstimate(0.75), AcceptanceEstimate(0.85), AcceptanceEstimate(0.95),
                AcceptanceEstimate(0.3),  AcceptanceEstimate(0.5),  AcceptanceEstimate(0.7)} {}

void CopyEstimate::observe(int copy_class, int num_judged, int num_right) {
  const auto at = static_cast<size_t>(copy_class);
  by_class_[at].observe(num_judged, num_right);
  if (at >= kNumMatchClasses) by_class_[at % kNumMatchClasses].observe(num_judged, num_right);
}

CopyEstimate CopyEstimate::like(const CopyEstimate& others) {
  CopyEstimate own;
  for (size_t i = 0; i < own.by_class_.size(); ++i) {
    own.by_class_[i] = AcceptanceEstimate(others.by_class_[i].ratio());
  }
  return own;
}

namespace {

size_t power_of_two(int count) {
  return std::min<size_t>(std::bit_width(static_cast<unsigned>(count)), 15);
}

constexpr double kForgotten = 1.0 / 1024;  // per step, of what is not seen any more

}  // namespace

void StepYield::Mean::observe(double observed) {
  constexpr int kFirst = 3, kLast = 32;  // steps that make the mean, about: at first and later
  value += (observed - value) / std::min(kFirst + num_observed, kLast);
  num_observed = std::min(num_observed + 1, kLast);
}

void StepYield::Kinds::observe(int num_drafts, double observed, bool is_common, double doubt) {
  if (is_common) common.observe(observed);
  Mean &own = by_drafts[power_of_two(num_drafts)], &plain = by_drafts[0];
  for (Mean& mean : by_drafts) {
    const bool stays = &mean == &own || (is_common && &mean == &plain);
    const double weight = mean.num_observed == 0 ? 1.0 : stays ? 0.0 : kForgotten;
    mean.value += weight * (common.value - mean.value);
  }
  const bool is_first = is_common && &own == &plain && own.num_observed == 0;
  if (is_first && std::abs(observed - own.value) > doubt) own.value = observed;
  own.observe(observed);
}

StepYield::Correction StepYield::of(int num_seqs, int num_drafts) const {
  const Load& load = loads_[power_of_two(num_seqs)];
  const size_t own = power_of_two(num_drafts);
  const Mean& tokens = tokens_ == Tokens::kAlike ? load.tokens.common : load.tokens.by_drafts[own];
  return {num_drafts > 0 ? tokens.value : 1.0, load.seconds.by_drafts[own].value};
}

bool StepYield::is_known(int num_seqs, int num_drafts) const {
  const Kinds& seconds = loads_[power_of_two(num_seqs)].seconds;
  return seconds.by_drafts[power_of_two(num_drafts)].num_observed > 0;
}

void StepYield::observe(int num_seqs, int num_drafts, double expected_tokens,
                        double expected_seconds, double tokens, double seconds) {
  constexpr double kMost = 4.0;  // a step that was held up says nothing of the next
  if (common_ == Common::kPace) {
    constexpr double kPaceWeight = 1.0 / 8;  // sooner than a kind's correction follows
    const double predicted = expected_seconds + of(num_seqs, num_drafts).seconds;
    const double slowness = std::clamp(seconds / predicted, 1.0 / kMost, kMost);
    slowness_ += kPaceWeight * (slowness - slowness_);
    seconds /= slowness_;
  }
  const double late = seconds / expected_seconds - 1.0;
  const double delay = std::clamp(late, 1.0 / kMost - 1.0, kMost - 1.0) * expected_seconds;
  Load& load = loads_[power_of_two(num_seqs)];
  constexpr double kDoubt = 0.2;
  load.seconds.observe(num_drafts, delay, common_ == Common::kDelay, kDoubt * expected_seconds);
  if (num_drafts > 0) {
    load.tokens.observe(num_drafts, std::min(tokens / expected_tokens, kMost), true);
  } else {
    load.tokens.common.value += kForgotten * (1.0 - load.tokens.common.value);
  }
}

namespace {

// Of a tree's root, how much of what its children bring is the best one's. With it the first drafts
// of trees of 15 bring nearly what chains of so many do.
constexpr double kFirstShare = 0.9;

}  // namespace

std::vector<double> survivals_of(const DraftOffer& offer) {
  std::vector<double> survivals;
  if (!offer.scores.empty()) {
    for (float score : offer.scores) {
      survivals.push_back(offer.availability * std::exp(static_cast<double>(score)));
    }
    return survivals;
  }
  if (offer.num_drafts == 0) return survivals;
  const bool is_tree = offer.num_depths > 0 && offer.num_depths < offer.num_drafts;
  double survival = offer.availability;
  if (!is_tree) {
    for (int i = 0; i < offer.num_drafts; ++i) survivals.push_back(survival *= offer.ratio);
    return survivals;
  }
  // Of each depth at most one survives, so together they bring what the depths do. The best come
  // first: each is worth the same share of the one before it.
  double all = 0.0, of_depth = 1.0;
  for (int i = 0; i < offer.num_depths; ++i) all += of_depth *= offer.ratio;
  const double first = kFirstShare * offer.ratio;
  const auto sum = [&](double share) {
    double total = 0.0, each = first;
    for (int i = 0; i < offer.num_drafts; ++i, each *= share) total += each;
    return total;
  };
  double low = 0.0, high = 1.0;
  for (int i = 0; i < 40; ++i) {
    const double middle = 0.5 * (low + high);
    (sum(middle) < all ? low : high) = middle;
  }
  survival *= first;
  for (int i = 0; i < offer.num_drafts; ++i, survival *= low) survivals.push_back(survival);
  return survivals;
}

double worth_of(const DraftOffer& offer, double price) {
  double worth = 0.0;
  for (const double survival : survivals_of(offer)) worth += std::max(0.0, survival - price);
  return worth;
}

RowBudget spend_row_budget(std::span<const DraftOffer> offers, int num_rows, int num_sampled,
                           int max_rows, const StepPrices& prices, double fixed_seconds,
                           const StepYield& yield) {
  struct Candidate {
    double survival;
    size_t offer;
  };
  std::vector<Candidate> candidates;
  double last = 1.0;  // what all drafts of the offer before survive
  for (size_t i = 0; i < offers.size(); ++i) {
    const double before = offers[i].follows ? last : 1.0;
    last = before;
    for (double survival : survivals_of(offers[i])) {
      candidates.push_back({last = before * survival, i});
    }
  }
  // Stable: a draft never overtakes the one it follows.
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.survival > b.survival; });
  if (num_rows <= prices.most_rows()) max_rows = std::min(max_rows, prices.most_rows());
  const size_t room = static_cast<size_t>(std::max(0, max_rows - num_rows));
  if (candidates.size() > room) candidates.resize(room);

  constexpr double kLeastShare = 0.1;  // of the expected time, whatever it was corrected by
  // A token that a draft brings is worth a whole one only where others wait for its sequence's
  // place. Else the step goes on for the others, and what is saved is the sequence's last row.
  constexpr double kWorth = 0.8;
  // What is expected is off by a few hundredths. The best of many counts is often one that seems
  // better than it is, so drafts that promise less than this over a step without are not taken.
  constexpr double kLeastGain = 1.02;
  double least = 0.0, best = 0.0;
  RowBudget budget{.counts = std::vector<int>(offers.size(), 0)};
  double tokens = num_sampled;
  for (int taken = 0;; ++taken) {
    const double seconds =
        std::max(prices.seconds(num_rows + taken) + fixed_seconds, prices.seconds(num_sampled));
    const StepYield::Correction correction = yield.of(num_sampled, taken);
    const double brought = correction.tokens * tokens;
    const double taking = std::max(seconds + correction.seconds, kLeastShare * seconds);
    const double rate = (num_sampled + kWorth * (brought - num_sampled)) / taking;
    if (taken == 0) least = kLeastGain * rate;
    if (taken == 0 || rate > std::max(best, least)) {
      best = rate;
      budget.num_drafts = taken;
      budget.tokens = tokens;
      budget.seconds = seconds;
      budget.tokens_per_second = brought / taking;
    }
    if (taken == static_cast<int>(candidates.size())) break;
    tokens += candidates[static_cast<size_t>(taken)].survival;
  }
  for (int i = 0; i < budget.num_drafts; ++i) {
    ++budget.counts[candidates[static_cast<size_t>(i)].offer];
  }
  return budget;
}

DraftGate& DraftGates::of(int num_seqs) { return gates_[power_of_two(num_seqs)]; }

bool DraftGate::opens(double with_drafts, double without_drafts, double duration, bool is_guess) {
  if (num_left_ > 0) {
    --num_left_;
    return trial_opens_;
  }
  const bool pays = with_drafts > without_drafts;
  const bool is_clear = with_drafts > kClearGain * without_drafts;
  double wait = (is_clear ? kClearFactor : kOpenFactor) * interval_;
  const bool is_early = pays && is_guess && guess_interval_ < wait;
  if (is_early) wait = guess_interval_;
  if (!pays) {
    const double loss = duration * (1.0 - with_drafts / without_drafts);
    wait = loss > kUsualLoss ? kLastInterval * loss / kUsualLoss : interval_;
  }
  if (++num_steps_ < wait) return pays;
  int& interval = is_early ? guess_interval_ : interval_;
  interval = std::min(2 * interval, kLastInterval);
  num_steps_ = 0;
  num_left_ = kTrialSteps - 1;
  trial_opens_ = !pays;
  return trial_opens_;
}

}  // namespace openspec
