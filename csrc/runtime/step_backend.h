#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "core/draft_budget.h"
#include "kernels/rows.h"
#include "runtime/drafter.h"
#include "runtime/runner_config.h"
#include "runtime/sequence_table.h"
#include "runtime/step.h"

namespace openspec {

/// What a step works on; all of it is the runner's.
struct StepContext {
  const RunnerConfig& config;
  SequenceTable& table;
  Qwen3& target;
  Drafter& drafter;
  const std::vector<KvLayerView>& kv_layers;  // the target's, then the drafter's
  std::function<void(const char* stage)> enter;
  std::function<void(const std::exception&)> report_drafter_failure;
};

/// The middle of the transaction on one kind of device: propose, score, choose, accept.
class StepBackend {
 public:
  virtual ~StepBackend() = default;

  /// Leases that may be launched before the first of them is collected, beyond one.
  virtual int num_steps_ahead() const = 0;
  /// Called once all weights are there, and again after set_capture.
  virtual void prepare() {}

  /// A slot was given to a new sequence, with as much KV as a cached prefix has.
  virtual void add_sequence(int /*slot*/) {}
  /// What was launched for a sequence is given up: its lengths are the table's again.
  virtual void restore_sequence(int /*slot*/) {}
  /// Waits until nothing is under way.
  virtual void synchronize() {}

  virtual void launch(StepLease& lease) = 0;
  /// Fills lease.results.
  virtual void collect(StepLease& lease) = 0;
  /// After the table has taken the results.
  virtual void show_committed(const StepLease& /*lease*/) {}

  /// Numbers of rows whose steps are worth timing, rising.
  virtual std::vector<int> row_sizes() const = 0;
  /// Whether a step of any other number takes as long as the next larger of these.
  virtual bool has_sizes() const { return false; }
  /// Seconds of one step of so many rows of the sequence, which has pages for them; nothing is
  /// committed. `proposes`: with the drafter at work for as many sequences as these rows would be
  /// with all their drafts.
  virtual double time_rows(int slot, int num_rows, bool proposes) = 0;
  const StepTimes& proposing_times() const { return proposing_times_; }
  void set_step_times(StepTimes plain, StepTimes proposing) {
    step_times_ = std::move(plain);
    proposing_times_ = std::move(proposing);
  }

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
  /// Seconds that proposing for `num_seqs` sequences adds to a step.
  double proposing_seconds(int num_seqs, int num_speculative_tokens) const {
    const int num_rows = num_seqs * (1 + num_speculative_tokens);
    return std::max(0.0, proposing_times_.seconds(num_rows) - step_times_.seconds(num_rows));
  }

  StepTimes step_times_, proposing_times_;
  DraftGate gate_;
  std::vector<int> capture_layers_;
};

}  // namespace openspec
