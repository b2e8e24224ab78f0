#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/draft_budget.h"
#include "kernels/common/records.h"
#include "kernels/common/rows.h"
#include "runtime/drafting/drafter.h"
#include "runtime/state/lease.h"
#include "runtime/state/sequence_table.h"
#include "runtime/step/runner_config.h"

namespace openspec {

/// What a step works on; all of it is the runner's.
struct StepContext {
  const RunnerConfig& config;
  SequenceTable& table;
  TargetModel& target;
  Drafter& drafter;
  const std::vector<KvLayerView>& kv_layers;  // the target's
  RecordView records;                         // the target's
  std::function<void(const char* stage)> enter;
  std::function<void(const std::exception&)> report_drafter_failure;
};

/// The middle of the transaction on one kind of device: propose, score, choose, accept.
class StepBackend {
 public:
  StepBackend(const StepContext& context, StepYield::Common common)
      : yield_(common, context.drafter.needs().is_costly ? StepYield::Tokens::kByDrafts
                                                         : StepYield::Tokens::kAlike) {}
  virtual ~StepBackend() = default;

  /// Leases that may be launched before the first of them is collected, beyond one.
  virtual int num_steps_ahead() const = 0;
  /// Called once all weights are there.
  virtual void prepare() {}

  /// The slot's rows and parameters are about to be overwritten: returns once nobody reads them.
  virtual void await_slot(int /*slot*/) {}
  /// A slot was given to a new sequence, with as much KV as a cached prefix has.
  virtual void add_sequence(int /*slot*/) {}
  /// What was launched for a sequence is given up: its lengths are the table's again.
  virtual void restore_sequence(int /*slot*/) {}
  /// Waits until nothing is under way.
  virtual void synchronize() {}

  virtual void launch(StepLease& lease) = 0;
  /// Fills lease.results.
  virtual void collect(StepLease& lease) = 0;
  /// Seconds of a collected step that went into proposing; none: not known.
  virtual std::optional<double> draft_seconds(const StepLease& lease) const = 0;
  /// After the table has taken the results.
  virtual void teach_drafter(const StepLease& /*lease*/) {}

  /// The steps that are worth timing, in the order of their use.
  virtual std::vector<StepKind> step_kinds() const = 0;
  /// Up to so many rows any other step takes as long as the next larger of these.
  virtual int most_sized_rows() const { return 0; }
  /// Seconds of one step of the sequences, which have pages for its rows and more; nothing is
  /// committed.
  virtual double time_step(const StepKind& kind, std::span<const int> slots) = 0;
  /// Of steps without and with a costly drafter at work.
  void set_step_times(StepTable plain, StepTable proposing) {
    plain_times_ = std::move(plain);
    proposing_times_ = std::move(proposing);
  }
  /// What came of a step that was planned here: `seconds` until it was collected, since the step
  /// before it was.
  void observe_time(const StepLease& lease, double seconds);

  /// Layers whose output is kept: the drafter's needs, or a test's.
  virtual void set_capture(std::vector<int> layers) { capture_layers_ = std::move(layers); }
  const std::vector<int>& capture_layers() const { return capture_layers_; }
  /// Of the last step, for tests: logits of the rows of its last block of samples [rows,
  /// vocab_size], and the captured features [rows, num_captures * hidden_size].
  virtual std::vector<float> last_logits() = 0;
  virtual std::vector<float> last_features() = 0;
  /// Of the last step, for tests: what was proposed for each of its spans, before the row budget.
  virtual std::vector<Draft> last_drafts() = 0;

 protected:
  /// Whether the drafter may learn from the step later: a costly one, of steps in which it is left
  /// out and every sequence has one row. A step with more of either has it learn from all that
  /// waits first.
  static bool may_keep_rows(const StepContext& context, const StepLease& lease);
  /// Steps whose rows can wait.
  static int most_kept_steps(const RunnerConfig& config);

  /// Levels that the row budget takes a tree of all drafts to have; see DraftOffer.
  static int expected_depths(const StepContext& context);
  bool has_step_times() const { return !plain_times_.empty(); }
  /// What a costly drafter adds to a step, as the timed steps have it; none: they were not timed.
  std::optional<double> expected_draft_seconds(int num_seqs, int num_rows) const;
  /// How many of the drafts on offer, one offer a request, a step is to have that costs
  /// `host_seconds` beside its time; `proposes` as in StepKind. The lease keeps what is expected.
  RowBudget plan_drafts(StepLease& lease, std::span<const DraftOffer> offers, bool proposes,
                        int max_rows, double host_seconds);
  /// Whether a costly drafter should work for the step, which else has the drafts of `otherwise`.
  bool drafts_pay(StepLease& lease, std::span<const DraftOffer> offers,
                  std::span<const DraftOffer> otherwise, int max_rows, double host_seconds);
  std::vector<int> capture_layers_;
  int num_kept_steps_ = 0;  // since the drafter has learned from all rows

 private:
  StepTable plain_times_, proposing_times_;
  StepYield yield_;
  DraftGates gates_;
  // Steps of the kind of the last one, in a row; from which on they count.
  static constexpr int kFirstLearned = 3;
  bool last_proposed_ = false;
  int num_same_ = 0;
};

}  // namespace openspec
