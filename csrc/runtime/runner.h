#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/draft_budget.h"
#include "runtime/drafting/runner_config.h"
#include "runtime/state/sequences.h"
#include "runtime/step/step_backend.h"

namespace openspec {

class DeviceExchange;

/// Bytes a runner takes, where ranks share its target the most that one does; pages come on top.
struct MemoryPlan {
  size_t weight_bytes = 0, scratch_bytes = 0, table_bytes = 0, draft_fixed_bytes = 0;
  size_t exchange_bytes = 0;    // of scratch_bytes, room for what other ranks send
  size_t state_bytes = 0;       // of running states: all slots' records, and snapshots of prefixes
  size_t page_bytes = 0;        // of one page, all layers
  size_t draft_page_bytes = 0;  // of these, the drafter's
  int num_base_pages = 0;       // of a sequence with a running state, besides those of its tokens
};

MemoryPlan plan_memory(const RunnerConfig& config);

struct RunnerStats {
  int64_t num_steps = 0, num_rows = 0, num_drafter_failures = 0;
  // Of all steps, as SpanDetail has them of one: proposing; the rest of the device's time; both
  // where they are not known apart; what the step took beside.
  double draft_seconds = 0.0, verify_seconds = 0.0, unsplit_seconds = 0.0, rest_seconds = 0.0;
  double device_seconds() const { return draft_seconds + verify_seconds + unsplit_seconds; }
  ExpertCounts experts;
  // See ExpertSharing.
  double experts_of_drafts = 1.0, experts_of_sequences = 1.0;
  /// Of each rank on a device of its own, from the first step that was collected on.
  std::vector<ExchangeCounts> exchange;
  std::string last_drafter_failure;
};

/// Target, drafter and running sequences of one engine, and the step over them:
///
///   reserve   pages for the worst case; what the step may overwrite is saved at launch
///   launch    propose, score, choose, accept
///   collect   what each sequence got
///   commit    lengths advance, full pages become reusable
///
/// On a device the next lease may be reserved and launched before this one is collected
/// (`num_steps_ahead`); leases are collected and committed in order of their launch, and given up
/// newest first. A sequence may be removed and its slot and pages reused at any time, since what is
/// launched later runs later; what an earlier lease says of the slot's old occupant is dropped.
///
/// Not thread-safe.
class Runner {
 public:
  /// `drafter` replaces the one named in the configuration; where ranks share the target on CUDA,
  /// one that works on the host.
  Runner(const RunnerConfig& config, int num_pages, std::unique_ptr<Drafter> drafter = nullptr);
  ~Runner();
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  /// Of several ranks on CUDA, the first one's.
  TargetModel& target() { return *ranks_.front().target; }
  Drafter& drafter() { return *ranks_.front().drafter; }
  /// Of each rank; all of them are given every tensor of the checkpoint.
  std::vector<Weights*> target_weights();
  /// As these, of a drafter that has some.
  std::vector<Weights*> draft_weights();
  /// Room for another head's weights, which a thread may load beside steps; see has_spare_head.
  Weights& spare_draft_weights();
  /// Between launches: the spare weights and the drafter's take each other's place, in the order of
  /// what is launched. What was learned of its acceptance is forgotten. Pages keep what it wrote.
  void exchange_drafter();
  /// Once all weights are loaded: everything that a step needs is allocated and, on a device,
  /// recorded.
  void finish_loading();
  const RunnerConfig& config() const { return config_; }
  const SequenceTable& table() const { return table_; }

  /// Times steps over made-up sequences, for the row budget; stops after about `budget` seconds of
  /// steps.
  /// Call before the first sequence. Returns what was measured.
  std::vector<TimedStep> measure_step_times(double budget);
  /// Takes what a runner with the same configuration measured on such a device, instead.
  void set_step_times(std::span<const TimedStep> measured);
  /// Each step over sequences of `context` tokens, the least seconds of several; 0: past `budget`,
  /// or it does not fit.
  std::vector<TimedStep> time_steps(std::span<const StepKind> kinds, int context, int num_repeats,
                                    double budget);

  int add_sequence(std::span<const int32_t> tokens, int prompt_len, SequenceParams params,
                   std::span<const uint8_t> cache_salt);
  void remove_sequence(int slot);
  /// Forgets the answers that drafts are copied from.
  void forget_answers() {
    if (config_.draft_memory_bytes > 0) backend_->forget_answers();
  }

  int num_pages() const { return sequences_.pool().num_pages(); }
  int num_free_pages() const { return sequences_.pool().num_available(); }
  int num_free_slots() const { return table_.num_free_slots(); }
  /// Where a chunk of the slot's prompt should end, see PrefixCache; 0: nowhere.
  int wanted_end(int slot) const { return sequences_.prefixes().wanted_end(slot); }
  /// Pages that a sequence's running state takes besides those of its tokens.
  int num_base_pages() const { return sequences_.bases().num_pages(); }
  /// Pages that `num_rows` more rows would take from the pool.
  int num_pages_needed(int slot, int num_rows) const {
    return sequences_.num_pages_needed(slot, num_rows);
  }
  /// Entries after the last known token that a step may write, at most.
  int num_rows_ahead() const {
    return std::max(config_.draft_room(), ranks_.front().drafter->needs().num_draft_entries);
  }
  /// Whether the sequence's next mask is being made beside the steps: until it is, steps have
  /// nothing to do for the sequence.
  bool is_held(int slot) const {
    table_.check_slot(slot);
    const GrammarPlace* grammar = table_.grammar(slot);
    return grammar != nullptr && grammar->is_away();
  }
  /// Returns when such a mask was made since the last call, or after so many seconds.
  void await_masks(double seconds) { table_.grammar_work().await(seconds); }
  /// For tests.
  GrammarTimes& grammar_times() { return table_.grammar_work().times; }
  PrefixCache& prefixes() { return sequences_.prefixes(); }
  void check_integrity() const;

  std::unique_ptr<StepLease> reserve(std::span<const SpanRequest> requests);
  void launch(StepLease& lease);
  const std::vector<SpanResult>& collect(StepLease& lease);
  void commit(StepLease& lease);

  /// Steps that may be launched before their predecessors are collected.
  int num_steps_ahead() const { return backend_->num_steps_ahead(); }

  using StageHook = std::function<void(const char* stage)>;
  /// Called at the start of each stage; what it throws counts as the stage's own failure.
  void set_stage_hook(StageHook hook) { stage_hook_ = std::move(hook); }
  void set_capture(std::vector<int> layers);

  /// Unlike all else, of any thread, also while a step runs.
  RunnerStats stats() const {
    const std::lock_guard lock(stats_mutex_);
    return stats_;
  }
  StepBackend& backend() { return *backend_; }

 private:
  void enter(const char* stage) {
    if (stage_hook_) stage_hook_(stage);
  }
  void abandon(StepLease& lease);
  /// What a result tells about the sources of its drafts.
  void observe_acceptance(const SpanResult& result, bool has_proposed);
  /// A sequence's own estimate begins with what the others show.
  void forget_drafts(int slot, DraftSourceId source);

  /// What a rank on a device of its own has there; else there is one of these, with all that is.
  struct Rank {
    std::unique_ptr<Drafter> drafter;  // null: the first rank's, which works on the host
    std::unique_ptr<TargetModel> target;
    std::vector<Buffer> kv_buffers = {};  // of all its layers: the target's, then the drafter's
    // The target's; on the host those of all its ranks.
    std::vector<KvLayerView> kv_layers = {};
  };
  static std::vector<Rank> make_ranks(const RunnerConfig& config, DeviceExchange* exchange,
                                      std::unique_ptr<Drafter> drafter);
  void take_pages(Rank& rank, int number, int num_pages);
  /// Where the bases of running states lie: in the pages of the target's KV.
  DeltaStates base_memory(const Rank& rank, int num_pages) const;

  RunnerConfig config_;
  std::unique_ptr<DeviceExchange> exchange_;  // null: there is one device
  std::vector<Rank> ranks_;
  Sequences sequences_;
  SequenceTable& table_;  // theirs
  StageHook stage_hook_;
  mutable std::mutex stats_mutex_;
  RunnerStats stats_;
  Clock::time_point last_collected_;
  std::unique_ptr<StepBackend> backend_;
  // Over all sequences, which have theirs beside it.
  BySource<AcceptanceEstimate> acceptance_ = {
      AcceptanceEstimate::of_all(), AcceptanceEstimate::of_all(), AcceptanceEstimate::of_all()};
  CopyEstimate copy_acceptance_;          // the same by class
  AcceptanceEstimate copy_availability_;  // and how often there is one that begins rightly
};

}  // namespace openspec
