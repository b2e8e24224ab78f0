#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/common/device.h"
#include "kernels/drafts/kept_rows.h"
#include "runtime/device/device_buffers.h"
#include "runtime/device/graph_book.h"
#include "runtime/drafting/row_masks.h"
#include "runtime/step/step_backend.h"

namespace openspec {

/// The step on CUDA: a kernel that takes the input from pinned memory, one graph launch, and an
/// outcome that the device writes into a ring there. The device holds the sequence table that
/// counts; the host's own is what it has heard of so far, so the next step can be launched before
/// this one is known. GraphBook says which steps are graphs; any other goes op by op through the
/// same code. A step with a grammar in it takes three launches (device_grammar.cpp). In builds
/// without CUDA there is none.
class DeviceStep final : public StepBackend {
 public:
  explicit DeviceStep(StepContext context);
  ~DeviceStep() override;

  int num_steps_ahead() const override { return proposes_on_host() ? 0 : 1; }
  void prepare() override;
  void await_slot(int slot) override;
  void add_sequence(int slot) override;
  void restore_sequence(int slot) override;
  void copy(void* to, const void* from, size_t bytes) override {
    device::copy_on_device(to, from, bytes, stream_.handle());
  }
  void synchronize() override { device::synchronize(stream_.handle()); }
  void launch(StepLease& lease) override;
  void collect(StepLease& lease) override;
  std::optional<double> draft_seconds(const StepLease& lease) const override;
  std::vector<StepKind> step_kinds() const override { return book_.step_kinds(); }
  int most_sized_rows() const override { return book_.most_sized_rows(); }
  double time_step(const StepKind& kind, std::span<const int> slots) override;
  void set_capture(std::vector<int> layers) override;
  std::vector<float> last_logits() override;
  std::vector<float> last_features() override;
  std::vector<Draft> last_drafts() override;

 private:
  /// One slot's sampling parameters: lists on the device, and where the host writes them.
  struct SlotParams {
    Buffer lists, staging;
    device::Event uploaded;  // what the sequence in the slot began with
  };
  /// Drafts of the step, [max_num_seqs, D] and [max_num_seqs]: the drafter's on the device, or what
  /// the host sent with the input.
  struct Proposals {
    int32_t *tokens, *counts;
    int32_t* parents;  // null where all are chains
    float* scores;     // null where there are none
  };

  // The step, by stages, on the device's stream.
  void enqueue(const StepShape& shape, int num_samples);
  // Its parts: drafts and rows, and all that follows the target's forward pass.
  void enqueue_rows(const StepShape& shape, int num_samples);
  void enqueue_choices(const StepShape& shape, int num_samples, bool has_masks);
  RowBatch row_batch(const StepShape& shape) const;
  void begin(int ring_index, const StepHeader& header, int num_spans);
  void propose(const RowBatch& rows);
  void lay_out(const StepShape& shape, int num_samples);
  void score(const RowBatch& rows);
  void choose(const RowBatch& rows, int num_samples, bool has_masks);
  void commit(const StepShape& shape);
  void move_kv(const RowBatch& rows);
  void teach(const RowBatch& rows);
  void keep_rows(const RowBatch& rows);
  /// The drafter learns from all rows that wait. The ring's entry holds the list of slots.
  void teach_kept(int ring_index);

  Proposals proposals(bool has_trees, int num_spans) const;
  DrawnDrafts drawn_drafts() const;
  KeptRows kept_rows();
  StepInput input() const { return {arrays_.input.header, arrays_.input.spans}; }
  TableView table_view() const;

  bool proposes_on_host() const {
    return context_.config.max_draft_tokens > 0 && !context_.drafter.works_on_arrays();
  }
  int drafts_per_seq() const { return std::max(1, context_.config.draft_room()); }
  /// Whether sequences share rows by how likely their chains are: one alone has nothing to share.
  bool compares_chains(int num_spans) const {
    return context_.drafter.needs().has_scores && num_spans > 1;
  }
  /// The step that serves the lease best, with at least the rows that its known tokens need.
  StepShape choose_shape(StepLease& lease, bool host_has_trees);
  int num_samples_of(const StepLease& lease, const StepShape& shape) const;
  /// Returns whether any of the proposals is a tree.
  bool propose_on_host(const StepLease& lease, const StepInputArrays& input);
  /// Starts the step whose input is the header and the ring's entry. With `masked`, the lease, it
  /// has rows that a grammar limits.
  void start(int ring_index, const StepHeader& header, const StepShape& shape, int num_samples,
             StepLease* masked = nullptr);

  // Steps with a grammar in them.
  using Graphs = std::map<StepShape, device::Graph>;
  void run_masked(StepLease& lease, const StepShape& shape, int num_samples);
  /// What the grammars force behind what is known, where it pays to wait for the step before.
  void find_forced(StepLease& lease);
  /// Their first tokens; with `waits` behind the step before, which must be done.
  void take_forced(StepLease& lease, std::span<const size_t> spans, bool waits);
  void force_drafts(const StepLease& lease, const StepShape& shape);
  /// Started at the first use.
  ThreadPool& grammar_threads();
  /// The graph of the shape, recorded at its first use; where the shape has none, `enqueue` itself.
  void run_part(Graphs& graphs, const StepShape& shape, const std::function<void()>& enqueue);
  bool has_masks(const StepLease& lease) const;
  void download_rows(const StepShape& shape);
  void fill_masks(StepLease& lease, int num_samples);
  void upload_masks();
  /// Known tokens of a sequence, those of steps that are not collected yet included.
  std::vector<int32_t> known_tokens(int slot, uint64_t serial) const;
  void note_launched(const StepLease& lease);
  void note_collected(const StepLease& lease);

  SpanResult result_of(const StepLease& lease, size_t span) const;
  SpanDetail detail_of(const SpanResult& result, size_t entry) const;
  void update_slot(int slot);
  void upload_params(int slot);
  static size_t index(int i) { return static_cast<size_t>(i); }
  static constexpr int kLogprobWidth = 1 + kMaxLogprobs;

  StepContext context_;
  GraphBook book_;
  device::Stream stream_;
  ExecContext exec_;
  DeviceBuffers arrays_;
  Buffer captured_, kept_;
  Buffer kv_layers_;  // [target's layers] KvLayerView
  std::vector<SlotParams> slot_params_;
  std::vector<SlotUpdate> slot_updates_;  // for the next step
  std::vector<int> new_slots_;            // of these, those whose sequence the device does not know
  bool has_restored_ = false;             // and whether there are others
  std::vector<device::Event> begun_, done_;  // [ring]
  int next_ring_ = 0;
  int num_last_rows_ = 0, num_last_logits_ = 0, num_last_spans_ = 0;
  Graphs graphs_;

  // Of steps with a grammar in them; taken at the first.
  struct LaunchedSpan {
    int ring_index = 0;
    size_t span = 0;
    int slot = 0;
    uint64_t serial = 0;
  };
  std::vector<LaunchedSpan> launched_;   // of sequences with a grammar, until they are collected
  std::unique_ptr<ThreadPool> threads_;  // for the work of grammars
  RowMasks masks_;                       // pinned
  Buffer mask_words_, sample_mask_;      // on the device, see ChooseParams
  Buffer sample_staging_, laid_out_;     // pinned: sample_mask_, and what download_rows brings
  size_t laid_out_spans_ = 0;            // room for spans in it
  bool laid_out_trees_ = false;          // whether it has parents
  device::Event is_laid_out_, is_uploaded_;
  device::Stream uploads_;  // beside the forward pass
  Graphs draft_graphs_, score_graphs_, choice_graphs_;
};

}  // namespace openspec
