#pragma once

#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "runtime/drafting/row_masks.h"
#include "runtime/step/host_drafts.h"
#include "runtime/step/host_teacher.h"
#include "runtime/step/step_backend.h"

namespace openspec {

/// When steps begin and end, and what the host takes between them.
class HostPace {
 public:
  void begin();
  double seconds_since_begin() const;
  /// Returns the seconds of the step.
  double end();
  /// So much of the time after the step is the drafter's, which step times have.
  void exclude(double seconds) { excluded_seconds_ = seconds; }
  /// Between steps, smoothed.
  double host_seconds() const { return host_seconds_; }

 private:
  // Longer gaps are idleness, not the host's share of a step.
  static constexpr double kLongestGap = 0.02;
  Clock::time_point begin_;
  std::optional<Clock::time_point> end_;
  double host_seconds_ = 0.0, excluded_seconds_ = 0.0;
};

/// The step on the CPU, and the reference of what a step is.
class HostStep final : public StepBackend {
 public:
  explicit HostStep(StepContext context);

  int num_steps_ahead() const override { return 0; }
  void prepare() override { context_.drafter.prepare(exec_); }
  void copy(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void launch(StepLease& lease) override;
  void collect(StepLease&) override {}
  std::optional<double> draft_seconds(const StepLease& lease) const override {
    return lease.draft_seconds;
  }
  void add_sequence(int slot) override { teacher_.add_sequence(slot); }
  void teach_drafter(const StepLease& lease) override;
  std::vector<StepKind> step_kinds() const override;
  double time_step(const StepKind& kind, std::span<const int> slots) override;
  void set_capture(std::vector<int> layers) override;
  std::vector<float> last_logits() override;
  std::vector<float> last_features() override;
  std::vector<Draft> last_drafts() override { return last_drafts_; }

  static size_t scratch_bytes(const RunnerConfig& config);

 private:
  // The step, by stages.
  void propose(StepLease& lease);
  void score(StepLease& lease);
  void choose(StepLease& lease);
  void accept(StepLease& lease);

  void settle_learning(StepLease& lease);
  void lay_out(StepLease& lease);
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
  Buffer logits_, choose_workspace_;
  HostPace pace_;
  bool keeps_rows_ = false;  // the step under way, for the drafter to learn from later
  int num_last_logits_ = 0, num_captured_rows_ = 0;
  std::vector<Draft> last_drafts_;
};

}  // namespace openspec
