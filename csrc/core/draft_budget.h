#pragma once

#include <array>
#include <span>
#include <vector>

#include "core/copied_drafts.h"
#include "core/step_times.h"

namespace openspec {

/// How likely drafts are, as a ratio: accepted over tried, where a draft counts as tried if
/// everything before it was accepted. A ratio does not drift with the number of drafts.
class AcceptanceEstimate {
 public:
  /// Starts from what is known already, as if `kPriorTrials` drafts had been tried.
  explicit AcceptanceEstimate(double prior = kPrior);
  /// Of all sequences together: about the last fifty observations count.
  static AcceptanceEstimate of_all();
  /// A sequence's own. What `all`, which outlives it, show at the time counts beside it as
  /// `kCommonTrials` trials, or a few unlucky steps would say too much.
  static AcceptanceEstimate among(const AcceptanceEstimate& all);

  /// `num_accepted` of `num_drafted` in a chain were accepted.
  void observe(int num_drafted, int num_accepted);
  /// A step without a drafter shows nothing: from below the ratio drifts towards the others', so
  /// that a sequence whose drafts no longer pay is tried again. What speaks for its drafts is kept:
  /// with many requests good ones may not pay either.
  void rest();
  /// Conditional probability that the next draft is accepted given all before it were.
  double ratio() const;

  static constexpr double kPrior = 0.5;

 private:
  static constexpr double kPriorTrials = 2.0, kCommonTrials = 4.0;
  // Per observation: of a sequence about the last ten steps count.
  static constexpr double kDecay = 0.9, kDecayOfAll = 0.98;
  // Of an observation's weight, per step without a drafter. Some tens of steps make up for a few
  // failures at the start; where all drafts fail, trying them again and again costs 1 to 2 %.
  static constexpr double kRest = 0.1;
  double others() const { return all_ == nullptr ? kPrior : all_->ratio(); }

  double accepted_;
  double tried_;
  double decay_ = kDecay;
  const AcceptanceEstimate* all_ = nullptr;
};

/// What is known of one source of drafts for one sequence.
struct SourceEstimate {
  AcceptanceEstimate acceptance;    // of its drafts
  AcceptanceEstimate availability;  // how often it has any; of copies those that begin rightly,
                                    // after whose first token their acceptance counts
};

/// Acceptance of copies by class (core/copied_drafts.h).
class CopyEstimate {
 public:
  /// What is expected of copies before any was seen.
  CopyEstimate();
  /// A sequence's own, which begins with what others have shown.
  static CopyEstimate like(const CopyEstimate& others);

  double ratio(int copy_class) const { return by_class_[static_cast<size_t>(copy_class)].ratio(); }
  /// By class, in single precision [kNumCopyClasses].
  void copy_to(float* ratios) const {
    for (const AcceptanceEstimate& one : by_class_) *ratios++ = static_cast<float>(one.ratio());
  }
  /// An opinion is no part of what is known where nobody is asked.
  void observe(int copy_class, int num_judged, int num_right);

 private:
  std::array<AcceptanceEstimate, kNumCopyClasses> by_class_;
};

/// How steps differ from what was expected of them: what no measurement at the start can know.
/// Seconds (long contexts, work beside the step) and tokens (how good this text's estimates are) by
/// number of sequences and of drafts, in powers of two; of a kind of step that was not seen, what
/// all of as many sequences have in common counts.
class StepYield {
 public:
  /// What changes steps of all kinds alike. A delay: long contexts add the same seconds to each.
  /// The pace: work beside the step makes all of them slower by a factor, which is no part of the
  /// corrections, or a kind seen lately would be compared with what another took at another time.
  enum class Common { kDelay, kPace };
  /// Whether tokens are corrected by number of drafts: where the last drafts of a block or a tree
  /// are worse than the first ones let expect. Otherwise steps differ by chance, and a number of
  /// drafts that met with bad luck would not be tried again: one correction for all.
  enum class Tokens { kAlike, kByDrafts };
  explicit StepYield(Common common = Common::kDelay, Tokens tokens = Tokens::kAlike)
      : common_(common), tokens_(tokens) {}

  struct Correction {
    double tokens = 1.0;   // factor
    double seconds = 0.0;  // to be added
  };
  Correction of(int num_seqs, int num_drafts) const;
  /// Whether such steps were seen: else they are thought to be as late as all of as many sequences.
  bool is_known(int num_seqs, int num_drafts) const;
  /// Forgets how many tokens steps brought: other drafts come. What steps take stays known.
  void forget_tokens() {
    for (Load& load : loads_) load.tokens = Kinds{1.0};
  }
  /// A step that was expected to bring and take so much did bring and take so much.
  void observe(int num_seqs, int num_drafts, double expected_tokens, double expected_seconds,
               double tokens, double seconds);

 private:
  struct Mean {
    double value;
    int num_observed = 0;
    void observe(double observed);
  };
  /// What one number of sequences has in common, and by drafts.
  struct Kinds {
    Mean common;
    std::array<Mean, 16> by_drafts;
    explicit Kinds(double value) : common{value} { by_drafts.fill({value}); }
    /// What is not seen is forgotten; where kinds have something in common, steps without drafts
    /// are not, because others are weighed by them. Then the first of these counts alone if it
    /// differs by more than `doubt` from what was thought.
    void observe(int num_drafts, double observed, bool is_common, double doubt = 0.0);
  };
  struct Load {
    Kinds tokens{1.0}, seconds{0.0};
  };

  Common common_;
  Tokens tokens_;
  double slowness_ = 1.0;       // the pace: seconds that steps take, over those expected
  std::array<Load, 16> loads_;  // by sequences
};

/// Drafts on offer, of one source: a chain, or a tree whose drafts are ordered so that its
/// beginnings are trees.
struct DraftOffer {
  int num_drafts = 0;
  double ratio = 0.0;                  // conditional acceptance at each depth
  double availability = 1.0;           // probability that they come at all
  int num_depths = 0;                  // of a tree that is not known yet; 0: a chain
  std::span<const float> scores = {};  // logarithms of the survivals, if they are known
  bool follows = false;  // the offer before it, a chain of the same sequence: as likely as it lasts
};

/// By draft, the probability that it and all before it are accepted; never rising.
std::vector<double> survivals_of(const DraftOffer& offer);

/// Tokens that an offer is expected to bring, each less the `price` of its row in tokens.
double worth_of(const DraftOffer& offer, double price);

/// How many drafts of each offer to verify so that expected tokens per second are highest.
///
/// Drafts are taken in falling order of survival (the probability that they and all before them
/// are accepted); the number taken maximises
///   (num_sampled + 0.8 * sum of survivals) / (seconds(num_rows + taken) + fixed_seconds)
/// over every count, both corrected by `yield`, so that a step in the cost is looked across; where
/// that is next to nothing more than without drafts, none is taken. Drafts do not make a step
/// larger than those that were measured. `fixed_seconds` is below zero where rows of a prompt take
/// time that no draft is to pay for.
///
/// Source: the rule of vLLM's scheduler, with measured times, over all sequences at once.
struct RowBudget {
  std::vector<int> counts;  // of drafts, by offer
  int num_drafts = 0;
  double tokens = 0.0, seconds = 0.0;  // of the step, expected
  double tokens_per_second = 0.0;      // expected, corrected
};
RowBudget spend_row_budget(std::span<const DraftOffer> offers, int num_rows, int num_sampled,
                           int max_rows, const StepPrices& prices, double fixed_seconds,
                           const StepYield& yield = StepYield());

/// Whether to run a drafter that costs time, step by step: where it would not pay it is left out.
/// Now and then, ever more rarely, a few steps in a row do the opposite, so that both are known.
class DraftGate {
 public:
  /// Expected tokens per second with and without drafts; `duration` of a step with them, in steps
  /// without. `is_guess`: nothing is known of steps without, and drafts that pay may not.
  bool opens(double with_drafts, double without_drafts, double duration = 1.0,
             bool is_guess = false);

 private:
  static constexpr int kTrialSteps = 6;
  // Steps between trials, doubled by each. A trial of drafts may win much; where they win there is
  // less to find out, and more to lose.
  static constexpr int kFirstInterval = 16, kLastInterval = 512;
  static constexpr int kOpenFactor = 4, kClearFactor = 16;
  static constexpr double kClearGain = 1.5;
  // What a step of a trial of drafts may lose, in steps without. Of more, trials are as much rarer
  // than the rarest, from the first on: they cost 0.6 %.
  static constexpr double kUsualLoss = 0.5;
  int interval_ = kFirstInterval;
  int guess_interval_ = 8;  // doubled as well: what is not known after a trial may never be
  int num_steps_ = 0;       // since the last trial
  int num_left_ = 0;        // of the trial under way
  bool trial_opens_ = false;
};

/// The gates of steps by number of sequences, in powers of two.
class DraftGates {
 public:
  DraftGate& of(int num_seqs);

 private:
  std::array<DraftGate, 16> gates_;
};

}  // namespace openspec
