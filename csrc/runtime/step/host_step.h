#pragma once

#include <cstring>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "core/thread_pool.h"
#include "runtime/drafting/row_masks.h"
#include "runtime/step/host_drafts.h"
#include "runtime/step/host_teacher.h"
#include "runtime/step/step_backend.h"

namespace openspec {

/// What steps take of the calling thread's processor time, and what the host takes between them.
/// By the wall clock a step that others held up would seem dear.
class HostPace {
 public:
  void begin();
  void end();
  /// So much of the time after the step is the drafter's, which step times have.
  void note_learning(double seconds) { learning_seconds_ = seconds; }
  /// Between steps, smoothed.
  double host_seconds() const { return host_seconds_; }
  /// Of the step that has ended, with what came since the one before.
  double seconds() const { return seconds_; }

 private:
  // Longer gaps are other work of the thread, not the host's share of a step.
  static constexpr double kLongestGap = 0.02;
  std::thread::id thread_;  // that ran the last step: another one's clock is not comparable
  double begin_ = 0.0, end_ = 0.0;
  double host_seconds_ = 0.0, learning_seconds_ = 0.0, seconds_ = 0.0;
};

/// The step on the CPU, and the reference of what a step is.
class HostStep final : public StepBackend {
 public:
  explicit HostStep(StepContext context);

  int num_steps_ahead() const override { return 0; }
  void prepare() override { context_.drafter.prepare(exec_); }
  void refresh_drafter() override { context_.drafter.refresh(exec_); }
  void exchange_drafter() override { context_.drafter.exchange(exec_); }
  void copy(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void launch(StepLease& lease) override;
  void collect(StepLease&) override {}
  double planned_seconds(double) const override { return pace_.seconds(); }
  std::optional<double> draft_seconds(const StepLease& lease) const override {
    return lease.draft_seconds;
  }
  void add_sequence(int slot) override { teacher_.add_sequence(slot); }
  void remember(int slot) override;
  void forget_answers() override { drafts_.answers().clear(exec_); }
  void teach_drafter(const StepLease& lease) override;
  std::vector<StepKind> step_kinds() const override;
  size_t num_needed_kinds() const override { return context_.drafter.needs().is_costly ? 4 : 3; }
  double time_step(const StepKind& kind, std::span<const int> slots) override;
  void set_capture(std::vector<int> layers) override;
  std::vector<float> last_logits() override;
  std::vector<float> last_features() override;
  std::vector<Draft> last_drafts() override { return last_drafts_; }

  static size_t scratch_bytes(const RunnerConfig& config);

 private:
  // Sequences whose rows with all drafts make a step of many rows: there the weights, which are
  // read once a step, no longer hide what a row costs.
  static constexpr int kManySeqs = 4;

  // The step, by stages.
  void propose(StepLease& lease);
  void score(StepLease& lease);
  void choose(StepLease& lease);
  void accept(StepLease& lease);

  /// Rows of a sequence that a timed drafter learns from: where drafts just pay, so many are taken.
  int num_learned() const;
  void settle_learning(StepLease& lease);
  void lay_out(StepLease& lease);
  /// How many blocks of records are folded before and after the step, by span.
  void lay_out_folds(StepLease& lease);
  void fill_masks(const StepLease& lease);
  SpanResult resolve(const StepLease& lease, size_t span, std::span<const int32_t> path) const;
  RowBatch row_batch(const RowLayout& layout) const;
  /// The step as it counts, for the drafter to learn from: `num_computed` by span.
  CommittedStep committed(const StepLease& lease, const std::vector<int32_t>& num_computed) const;

  ThreadPool threads_;
  ExecContext exec_;
  HostTeacher teacher_;
  HostDrafts drafts_;
  RowMasks masks_;
  std::vector<int32_t> folded_read_, folded_write_;  // see TargetMemory
  Buffer logits_, choose_workspace_;
  HostPace pace_;
  bool keeps_rows_ = false;  // the step under way, for the drafter to learn from later
  int num_last_logits_ = 0, num_captured_rows_ = 0;
  std::vector<Draft> last_drafts_;
};

}  // namespace openspec
