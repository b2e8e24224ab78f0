#pragma once

#include <span>
#include <utility>
#include <vector>

namespace openspec {

/// How likely a sequence's drafts are, as a ratio: accepted over tried, where a draft counts as
/// tried if everything before it was accepted. A ratio does not drift with the number of drafts.
class AcceptanceEstimate {
 public:
  /// Starts from what is known of other sequences, as if `kPriorTrials` drafts had been tried.
  explicit AcceptanceEstimate(double prior = kPrior);

  /// `num_accepted` of `num_drafted` in a chain were accepted.
  void observe(int num_drafted, int num_accepted);
  /// Conditional probability that the next draft is accepted given all before it were.
  double ratio() const { return accepted_ / tried_; }

  static constexpr double kPrior = 0.5;

 private:
  static constexpr double kPriorTrials = 2.0;
  static constexpr double kDecay = 0.9;  // per observation: about the last ten steps count
  double accepted_;
  double tried_;
};

/// Seconds of a step by its number of rows, measured on this machine; between the measured points a
/// straight line, past the last one the slope of the last two. Where steps come in sizes, a count
/// between two of them takes the time of the larger.
class StepTimes {
 public:
  StepTimes() = default;
  /// `points` are (rows, seconds) with rising rows. Times are made non-decreasing.
  explicit StepTimes(std::vector<std::pair<int, double>> points, bool has_sizes = false);

  bool empty() const { return points_.empty(); }
  double seconds(double num_rows) const;
  const std::vector<std::pair<int, double>>& points() const { return points_; }

 private:
  std::vector<std::pair<int, double>> points_;
  bool has_sizes_ = false;
};

/// Drafts on offer: a chain, or a tree whose drafts are ordered so that its beginnings are trees.
struct DraftOffer {
  int num_drafts = 0;
  double ratio = 0.0;                  // conditional acceptance at each depth
  double availability = 1.0;           // probability that they come at all
  int num_depths = 0;                  // of a tree that is not known yet; 0: a chain
  std::span<const float> scores = {};  // logarithms of the survivals, if they are known
};

/// How many drafts of each offer to verify so that expected tokens per second are highest.
///
/// Drafts are taken in falling order of survival (the probability that they and all before them
/// are accepted); the number taken maximises
///   (num_sampled + sum of survivals) / (seconds(num_rows + taken) + fixed_seconds)
/// over every count, so that a step in the cost is looked across.
///
/// Source: the rule of vLLM's scheduler, with measured times, over all sequences at once.
struct RowBudget {
  std::vector<int> counts;         // of drafts, by offer
  double tokens_per_second = 0.0;  // expected
};
RowBudget spend_row_budget(std::span<const DraftOffer> offers, int num_rows, int num_sampled,
                           int max_rows, const StepTimes& times, double fixed_seconds);

/// Whether to run a drafter that costs time, step by step: where it would not pay it is left out,
/// but tried now and then.
class DraftGate {
 public:
  /// Expected tokens per second with and without drafts.
  bool opens(double with_drafts, double without_drafts);

 private:
  static constexpr int kProbeInterval = 64;  // steps
  int num_closed_ = kProbeInterval - 1;      // at first nothing is known: the first step tries
};

}  // namespace openspec
