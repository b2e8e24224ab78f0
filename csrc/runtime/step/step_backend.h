#pragma once

#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kernels/common/records.h"
#include "kernels/common/rows.h"
#include "kernels/delta_net/delta_states.h"
#include "runtime/drafting/drafter.h"
#include "runtime/drafting/runner_config.h"
#include "runtime/state/lease.h"
#include "runtime/state/sequence_table.h"
#include "runtime/state/slot_bases.h"
#include "runtime/step/draft_planner.h"

namespace openspec {

class SumExchange;

/// What a step works on, or one rank's part of it on a device of its own; all of it is the
/// runner's.
struct StepContext {
  const RunnerConfig& config;
  SequenceTable& table;
  TargetModel& target;
  Drafter& drafter;
  std::span<const KvLayerView> kv_layers;  // the target's; on the host those of all ranks
  RecordView records;                      // the target's, as are
  RecordView tails;                        // what lies beside them,
  const SlotBases& bases;                  // the bases of its records,
  DeltaStates base_memory;                 // and where they lie
  std::function<void(const char* stage)> enter;
  std::function<void(const std::exception&)> report_drafter_failure;
  bool takes_trees = true;          // the target, else chains of drafts alone
  SumExchange* exchange = nullptr;  // of a rank on a device of its own
};

/// Where accepted drafts of a tree stand among others, moves their KV and records to their places.
/// `layers` lie on the device that ran the step.
void move_kv(const ExecContext& exec, const StepContext& context, const KvLayerView* layers,
             const PageTableView& pages, const CommittedStep& step);

/// The middle of the transaction on one kind of device: propose, score, choose, accept.
class StepBackend {
 public:
  StepBackend(StepContext context, StepYield::Common common)
      : context_(std::move(context)),
        planner_(context_.config, context_.table, context_.drafter.needs(), common) {}
  virtual ~StepBackend() = default;

  /// Leases that may be launched before the first of them is collected, beyond one.
  virtual int num_steps_ahead() const = 0;
  /// Called once all weights are there.
  virtual void prepare() {}
  /// Drafter::refresh, after what was launched before.
  virtual void refresh_drafter() = 0;
  /// Drafter::exchange, after what was launched before.
  virtual void exchange_drafter() = 0;

  /// The slot's rows and parameters are about to be overwritten: returns once nobody reads them.
  virtual void await_slot(int /*slot*/) {}
  /// A slot was given to a new sequence, with as much KV as a cached prefix has.
  virtual void add_sequence(int /*slot*/) {}
  /// What was launched for a sequence is given up: its lengths are the table's again.
  virtual void restore_sequence(int /*slot*/) {}
  /// An answer ends, or is put off: later drafts may be copied from it.
  virtual void remember(int /*slot*/) {}
  virtual void forget_answers() {}
  /// Copies bytes of the runner's memory on the device, after what was launched before.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  /// Waits until nothing is under way.
  virtual void synchronize() {}

  virtual void launch(StepLease& lease) = 0;
  /// Fills lease.results.
  virtual void collect(StepLease& lease) = 0;
  /// Seconds of a collected step that went into proposing; none: not known.
  virtual std::optional<double> draft_seconds(const StepLease& lease) const = 0;
  /// After the table has taken the results.
  virtual void teach_drafter(const StepLease& /*lease*/) {}

  /// The steps that are worth timing, in the order of their use, and how many of the first are
  /// timed however long they take.
  virtual std::vector<StepKind> step_kinds() const = 0;
  virtual size_t num_needed_kinds() const = 0;
  /// Up to so many rows any other step takes as long as the next larger of these.
  virtual int most_sized_rows() const { return 0; }
  /// Seconds of one step of the sequences, which have pages for its rows and more; nothing is
  /// committed.
  virtual double time_step(const StepKind& kind, std::span<const int> slots) = 0;
  /// What the step that was collected last took, as `time_step` counts, with the host's share;
  /// `seconds` have gone by since the one before it was collected.
  virtual double planned_seconds(double seconds) const { return seconds; }
  DraftPlanner& planner() { return planner_; }
  /// What the target's experts have done so far, once nothing is under way.
  ExpertCounts expert_counts() const;

  /// Layers whose output is kept: the drafter's needs, or a test's.
  virtual void set_capture(std::vector<int> layers) { capture_layers_ = std::move(layers); }
  const std::vector<int>& capture_layers() const { return capture_layers_; }
  /// Of the last step, for tests: logits of the rows of its last block of samples [rows,
  /// vocab_size], and the captured features [rows, num_captures * hidden_size].
  virtual std::vector<float> last_logits() = 0;
  virtual std::vector<float> last_features() = 0;
  /// These features where they lie on a device, in bfloat16, until the next step; on the CPU null.
  virtual const void* features_on_device() const { return nullptr; }
  /// Of the last step, for tests: what was proposed for each of its spans, before the row budget.
  virtual std::vector<Draft> last_drafts() = 0;

 protected:
  /// Whether the drafter may learn from the step later: a costly one, of steps in which it is left
  /// out and every sequence has one row. A step with more of either has it learn from all that
  /// waits first.
  bool may_keep_rows(const StepLease& lease) const;
  /// Notes which sequences of the step cannot go on, once the step has its masks.
  void note_failures(StepLease& lease) const;
  /// Steps whose rows can wait.
  int most_kept_steps() const;

  StepContext context_;
  DraftPlanner planner_;
  std::vector<int> capture_layers_;
};

}  // namespace openspec
