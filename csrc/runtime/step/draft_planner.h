#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "core/draft_budget.h"
#include "runtime/drafting/drafter.h"
#include "runtime/drafting/runner_config.h"
#include "runtime/state/lease.h"
#include "runtime/state/sequence_table.h"

namespace openspec {

/// Decides how many of the drafts on offer a step has, and whether a costly drafter works for it,
/// from times of steps and estimates of the sequences. Both devices plan with it.
class DraftPlanner {
 public:
  DraftPlanner(const RunnerConfig& config, const SequenceTable& table, const DrafterNeeds& needs,
               StepYield::Common common)
      : config_(config), table_(table), needs_(needs), sharing_(sharing_of(config.target)) {
    const auto tokens = needs.is_costly ? StepYield::Tokens::kByDrafts : StepYield::Tokens::kAlike;
    for (Experience& one : experience_) one.yield = StepYield(common, tokens);
  }

  /// Of steps without and with a costly drafter at work.
  void set_step_times(StepTable plain, StepTable proposing) {
    seconds_per_expert_ = plain.seconds_per_expert();
    plain_times_ = std::move(plain);
    proposing_times_ = std::move(proposing);
  }
  /// Whether steps are planned at all: else every draft has its row.
  bool is_adaptive() const { return config_.adaptive && !plain_times_.empty(); }

  /// What a step is expected to be offered, one of each request: by its grammar, or else by a copy
  /// or, if `with_drafter`, by the drafter, whichever is worth more. `may_be_absent`: the step is
  /// planned before it is known what there is to copy, and the drafter has often nothing. Then a
  /// copy has its share of steps, and the drafter stands in for it in the others.
  struct ExpectedOffers {
    std::vector<DraftOffer> offers;
    std::vector<std::vector<float>> scores;  // that some of them refer to
  };
  ExpectedOffers expected_offers(const StepLease& lease, bool with_drafter,
                                 bool may_be_absent) const;
  /// Tokens that a row costs where it has none, at least: what plain decoding makes in its time.
  double row_price(const StepLease& lease) const;
  /// Whether the copy among a sequence's offers, if there is one, is worth more than what its
  /// drafter offers.
  bool prefers_copy(int slot, const MergedDraft& merged, const Draft& drafter,
                    double row_price) const;
  /// Whether a costly drafter should work for the step, beside what others have offered.
  /// `host_seconds`: what the step costs beside its time.
  bool drafter_pays(StepLease& lease, bool may_be_absent, double host_seconds);
  /// How many of the drafts on offer the step is to have; `proposes` as in StepKind. The lease
  /// keeps what is expected.
  RowBudget plan(StepLease& lease, std::span<const DraftOffer> offers, bool proposes,
                 double host_seconds);
  /// By request, how many of the merged drafts have rows.
  std::vector<int> grant(StepLease& lease, double host_seconds);

  /// What a costly drafter adds to a step, as the timed steps have it; none: they were not timed.
  std::optional<double> expected_draft_seconds(int num_seqs, int num_rows) const;
  /// What came of a step that was planned here: `seconds` until it was collected, since the step
  /// before it was.
  void observe_time(const StepLease& lease, double seconds);
  /// Another drafter works from here on: what its drafts bring is not known. What steps take is.
  void forget_drafter() {
    for (Experience& one : experience_) {
      one.yield.forget_tokens();
      one.gates = {};
    }
  }
  /// What rows of a collected step have in common, if it was one of decoding alone.
  void observe_experts(const StepLease& lease);
  /// Null: the target has no experts.
  const ExpertSharing* expert_sharing() const { return sharing_ ? &*sharing_ : nullptr; }

 private:
  static std::optional<ExpertSharing> sharing_of(const TargetSpec& target);
  StepPrices prices(const StepTable& table, int num_seqs) const;
  /// One that begins rightly, as often as such a copy comes.
  DraftOffer expected_copy(const SpanRequest& request) const;
  DraftOffer known_copy(int slot, const MergedDraft& merged) const;
  /// Levels that the row budget takes a tree of all drafts to have; see DraftOffer.
  int expected_depths() const;
  double ratio(int slot, DraftSourceId source) const {
    return table_.estimate(slot, source).acceptance.ratio();
  }

  const RunnerConfig& config_;
  const SequenceTable& table_;
  const DrafterNeeds& needs_;
  StepTable plain_times_, proposing_times_;
  double seconds_per_expert_ = 0.0;
  std::optional<ExpertSharing> sharing_;
  /// Of steps most of whose sequences take the likeliest token, and of those most of whose sample:
  /// their rows cost more than the timed ones, and other drafts are right.
  struct Experience {
    StepYield yield;
    DraftGates gates;
  };
  std::array<Experience, 2> experience_;
  // Steps of the kind of the last one, in a row; from which on they count.
  static constexpr int kFirstLearned = 3;
  bool last_proposed_ = false;
  int num_same_ = 0;
};

}  // namespace openspec
