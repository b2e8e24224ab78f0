#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/drafts/kept_rows.h"
#include "runtime/drafting/drafter_source.h"
#include "runtime/drafting/grammar_source.h"
#include "runtime/drafting/row_masks.h"
#include "runtime/step/step_backend.h"

namespace openspec {

/// The step on the CPU, and the reference of what a step is.
class HostStep final : public StepBackend {
 public:
  explicit HostStep(StepContext context);

  int num_steps_ahead() const override { return 0; }
  void prepare() override { context_.drafter.prepare(exec_); }
  void launch(StepLease& lease) override;
  void collect(StepLease&) override {}
  std::optional<double> draft_seconds(const StepLease& lease) const override {
    return lease.draft_seconds;
  }
  void add_sequence(int slot) override;
  void teach_drafter(const StepLease& lease) override;
  std::vector<StepKind> step_kinds() const override;
  double time_step(const StepKind& kind, std::span<const int> slots) override;
  void set_capture(std::vector<int> layers) override;
  std::vector<float> last_logits() override;
  std::vector<float> last_features() override;
  std::vector<Draft> last_drafts() override { return last_drafts_; }

  static size_t scratch_bytes(const RunnerConfig& config);

 private:
  void propose(StepLease& lease);
  void offer_drafts(StepLease& lease);
  std::vector<size_t> ask(DraftSource& source, StepLease& lease);
  bool drafter_works(StepLease& lease);
  void grant_drafts(StepLease& lease);
  void teach(const StepLease& lease, const std::vector<int32_t>& num_computed);
  void keep_rows(const StepLease& lease, const std::vector<int32_t>& num_computed);
  void teach_kept();
  KeptRows kept_rows();
  void lay_out(StepLease& lease);
  void fill_masks(const StepLease& lease);
  void score(StepLease& lease);
  void choose(StepLease& lease);
  DrawnDrafts drawn_drafts(const StepLease& lease);
  void accept(StepLease& lease);
  SpanResult resolve(const StepLease& lease, size_t span, std::span<const int32_t> path) const;
  void line_up(StepLease& lease, size_t span, std::span<const int32_t> path);
  void move_kv(const StepLease& lease);
  RowBatch row_batch(const RowLayout& layout) const;

  StepContext context_;
  ThreadPool threads_;
  ExecContext exec_;
  Buffer logits_, choose_workspace_;
  int num_last_logits_ = 0;
  DrafterSource drafter_;
  GrammarSource grammars_;
  // Of drafts by whose probabilities the choice is made, by span.
  std::vector<int32_t> drawn_tokens_, drawn_counts_, drawn_rows_;
  std::vector<std::byte> captured_;
  std::vector<std::byte> kept_;  // see KeptRows, as the next
  std::vector<int32_t> kept_begin_;
  int num_captured_rows_ = 0;
  std::vector<Draft> last_drafts_;
  RowMasks masks_;
  // Of the step under way.
  bool keeps_rows_ = false;
  double host_seconds_ = 0.0;      // between steps, smoothed, without
  double learning_seconds_ = 0.0;  // those of the drafter, which step times have
  std::optional<std::chrono::steady_clock::time_point> last_end_;
};

}  // namespace openspec
