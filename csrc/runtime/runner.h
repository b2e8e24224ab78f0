#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/draft_budget.h"
#include "core/page_pool.h"
#include "core/prefix_hash.h"
#include "core/thread_pool.h"
#include "model/qwen3.h"
#include "runtime/drafter.h"
#include "runtime/sequence_table.h"
#include "runtime/step.h"

namespace openspec {

struct RunnerConfig {
  TargetConfig target;
  DType dtype = DType::kF32;  // activations and KV
  int page_size = 16;         // tokens
  int max_num_seqs = 1;
  int max_model_len = 1;
  int max_num_batched_tokens = 1;  // rows of a step
  int max_num_logits_rows = 64;    // rows of logits at a time
  int num_threads = 1;
  int num_speculative_tokens = 0;
  std::string method = "none";
  std::map<std::string, DrafterOption> method_options;
  bool adaptive = true;
  bool enable_prefix_caching = true;
  PrefixHasher::Key cache_key{};

  void validate() const;
  DrafterConfig drafter() const;
};

/// Bytes a runner takes; pages come on top.
struct MemoryPlan {
  size_t weight_bytes = 0, scratch_bytes = 0, table_bytes = 0, draft_fixed_bytes = 0;
  size_t page_bytes = 0;  // of one page, all layers
};

MemoryPlan plan_memory(const RunnerConfig& config);

struct RunnerStats {
  int64_t num_steps = 0, num_rows = 0, num_drafter_failures = 0;
  double step_seconds = 0.0;
  std::string last_drafter_failure;
};

/// Thrown by Runner::reserve when the pool cannot cover the step; nothing was taken.
class OutOfPages : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Target, drafter, pages and running sequences of one engine, and the step over them:
///
///   reserve   pages for the worst case
///   launch    propose, score, choose, accept
///   collect   what each sequence got
///   commit    lengths advance, full pages become reusable
///
/// Not thread-safe.
class Runner {
 public:
  /// `drafter` replaces the one named in the configuration.
  Runner(const RunnerConfig& config, int num_pages, std::unique_ptr<Drafter> drafter = nullptr);
  ~Runner();
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  Qwen3& target() { return target_; }
  const RunnerConfig& config() const { return config_; }
  const SequenceTable& table() const { return table_; }

  /// Times steps of rising row counts over a made-up sequence, for the row budget; stops after
  /// about `budget_seconds`. Call before the first sequence.
  const StepTimes& measure_step_times(double budget_seconds);

  int add_sequence(std::span<const int32_t> tokens, int prompt_len, SequenceParams params,
                   std::span<const uint8_t> cache_salt);
  void remove_sequence(int slot);

  int num_pages() const { return pool_.num_pages(); }
  int num_free_pages() const { return pool_.num_available(); }
  int num_free_slots() const { return table_.num_free_slots(); }
  /// Pages that `num_rows` more rows would take from the pool.
  int num_pages_needed(int slot, int num_rows) const;
  void reset_prefix_cache() { pool_.reset_cache(); }
  void check_integrity() const;

  std::unique_ptr<StepLease> reserve(std::span<const SpanRequest> requests);
  void launch(StepLease& lease);
  const std::vector<SpanResult>& collect(StepLease& lease);
  void commit(StepLease& lease);

  using StageHook = std::function<void(const char* stage)>;
  /// Called at the start of each stage; what it throws counts as the stage's own failure.
  void set_stage_hook(StageHook hook) { stage_hook_ = std::move(hook); }
  void set_capture(std::vector<int> layers);

  const RunnerStats& stats() const { return stats_; }
  std::pair<int64_t, int64_t> prefix_cache_stats() const { return {cache_queries_, cache_hits_}; }
  /// Features and logits of the last step, for tests: row-major, width captures * hidden_size and
  /// vocab_size.
  std::span<const float> last_logits() const;
  const std::vector<std::byte>& captured() const { return captured_; }
  int num_captured_rows() const { return num_captured_rows_; }
  const std::vector<int>& capture_layers() const { return capture_layers_; }

 private:
  void enter(const char* stage) {
    if (stage_hook_) stage_hook_(stage);
  }
  void attach_prefix(int slot);
  void propose(StepLease& lease);
  void offer_drafts(StepLease& lease);
  void grant_drafts(StepLease& lease);
  void lay_out(StepLease& lease);
  void score(StepLease& lease);
  void choose(StepLease& lease);
  void accept(StepLease& lease);
  SpanResult resolve(const StepLease& lease, size_t span) const;
  void learn(const StepLease& lease, size_t span);
  void publish_pages(int slot);
  void show_committed(const StepLease& lease);
  void report_drafter_failure(const std::exception& error);
  RowBatch row_batch(const RowLayout& layout) const;

  RunnerConfig config_;
  ThreadPool threads_;
  ExecContext exec_;
  PrefixHasher hasher_;
  std::unique_ptr<Drafter> drafter_;
  Qwen3 target_;
  PagePool pool_;
  SequenceTable table_;
  std::vector<Buffer> kv_buffers_;  // by layer: the target's, then the drafter's
  std::vector<KvLayerView> kv_layers_;
  Buffer logits_, choose_workspace_;
  int num_last_logits_ = 0;
  std::vector<int> capture_layers_;
  std::vector<std::byte> captured_;
  int num_captured_rows_ = 0;
  StepTimes step_times_;
  AcceptanceEstimate acceptance_;  // over all sequences: where a new one starts
  double host_seconds_ = 0.0;      // between steps, smoothed
  std::optional<std::chrono::steady_clock::time_point> last_commit_;
  StageHook stage_hook_;
  RunnerStats stats_;
  int64_t cache_queries_ = 0, cache_hits_ = 0;  // tokens
};

}  // namespace openspec
