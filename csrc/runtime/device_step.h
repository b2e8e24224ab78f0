#pragma once

#include <compare>
#include <map>
#include <memory>
#include <vector>

#include "kernels/common/device.h"
#include "kernels/drafts/kept_rows.h"
#include "kernels/steps/step_rows.h"
#include "runtime/step_backend.h"

namespace openspec {

/// The step on CUDA: a kernel that takes the input from pinned memory, one graph launch, and an
/// outcome that the device writes into a ring there. The device holds the sequence table that
/// counts; the host's own is what it has heard of so far, so the next step can be launched before
/// this one is known.
///
/// A graph is recorded for each number of rows in kGraphRows, where it matters for several numbers
/// of sequences; a step takes the next larger one, its surplus rows are padding. Larger steps
/// (prompts) are launched op by op, through the same code.
class DeviceStep final : public StepBackend {
 public:
  explicit DeviceStep(StepContext context);
  ~DeviceStep() override;

  int num_steps_ahead() const override;
  void prepare() override;
  void await_slot(int slot) override;
  void add_sequence(int slot) override;
  void restore_sequence(int slot) override;
  void synchronize() override;
  void launch(StepLease& lease) override;
  void collect(StepLease& lease) override;
  std::vector<StepKind> step_kinds() const override;
  int most_sized_rows() const override { return 2 * row_sizes().back(); }
  double time_step(const StepKind& kind, std::span<const int> slots) override;
  void set_capture(std::vector<int> layers) override;
  std::vector<float> last_logits() override;
  std::vector<float> last_features() override;
  std::vector<Draft> last_drafts() override;

  /// Bytes on the device beside weights, pages and the forward pass's scratch.
  static size_t scratch_bytes(const RunnerConfig& config, const DrafterNeeds& needs);

 private:
  /// Offsets into a block of memory: an entry of the host's ring, which has all but the header, or
  /// what stays of it on the device, which has no updates.
  struct InputLayout {
    size_t header, spans, slot_updates, page_updates, num_drafts, drafts, parents, total;
  };
  struct Scratch {
    size_t tokens, num_tokens, kv_len, prompt_len, max_num_tokens, is_active, pages, sampling,
        input, seq, num_wanted, drafts, num_drafts, parents, scores, row_token, row_position,
        row_span, row_parent, row_kv_slot, span_begin, span_kv_len, span_seq, num_offered,
        num_granted, num_computed, committed_row, first_choice, sample_begin, sample_row,
        score_token, chosen, logprob_ids, logprobs, ranks, logits, choose, kept_begin, kept_slot,
        total;
  };
  /// One slot's sampling parameters: lists on the device, and where the host writes them.
  struct SlotParams {
    Buffer lists, staging;
    device::Event uploaded;  // what the sequence in the slot began with
  };

  void update_slot(int slot);
  static InputLayout plan_input(const RunnerConfig& config, const DrafterNeeds& needs);
  static Scratch plan_scratch(const RunnerConfig& config, const DrafterNeeds& needs);
  template <typename T>
  T* at(size_t offset) {
    return reinterpret_cast<T*>(scratch_.at(offset));
  }

  /// What a step launches, and its graph.
  struct Shape {
    int num_rows = 0;
    int num_spans = 0;      // room
    bool proposes = false;  // on the device
    bool has_trees = false;
    bool is_general = true;      // false: no sequence has more than kShortKvLen tokens
    bool keeps_rows = false;     // for the drafter, which else learns from them
    bool has_long_spans = true;  // false: none has more rows than a known token and its drafts
    auto operator<=>(const Shape&) const = default;
  };

  // The step, by stages, on the device's stream.
  void enqueue(const Shape& shape, int num_samples);
  void begin(int ring_index, const StepHeader& header, int num_spans);
  void propose(const RowBatch& rows);
  void lay_out(const Shape& shape, int num_samples);
  void score(const RowBatch& rows);
  void choose(const RowBatch& rows, int num_samples);
  void commit(const Shape& shape);
  void move_kv(const RowBatch& rows);
  void teach(const RowBatch& rows);
  void keep_rows(const RowBatch& rows);

  StepInput input();
  TableView table_view() const;
  /// Drafts of the step, [max_num_seqs, K] and [max_num_seqs]: the drafter's on the device, or what
  /// the host sent with the input.
  struct Proposals {
    const int32_t *tokens, *counts;
    const int32_t* parents;  // null where all are chains
    const float* scores;     // null where there are none
  };
  Proposals proposals(bool has_trees, int num_spans);
  /// Rows of a sequence's known token and all its drafts.
  int most_draft_rows() const { return 1 + context_.config.max_draft_tokens; }
  /// Whether sequences share rows by how likely their chains are: one alone has nothing to share.
  bool compares_chains(int num_spans) const {
    return context_.drafter.needs().has_scores && num_spans > 1;
  }
  /// Numbers of rows that graphs are recorded of, rising.
  std::vector<int> row_sizes() const;
  /// The steps of so many rows that graphs are recorded of.
  std::vector<Shape> shapes_of(int num_rows) const;
  /// The smallest recorded step that has room for `least`; graphs_.end(): there is none.
  std::map<Shape, device::Graph>::iterator find_graph(const Shape& least);
  DrawnDrafts drawn_drafts();
  /// The step that serves the lease best, with at least the rows that its known tokens need.
  Shape choose_shape(StepLease& lease, bool host_has_trees);
  int num_samples_of(const StepLease& lease, const Shape& shape) const;
  /// Returns whether any of the proposals is a tree.
  bool propose_on_host(const StepLease& lease, std::byte* input);
  std::byte* input_at(int ring_index) { return input_ring_.at(input_.total * index(ring_index)); }
  KeptRows kept_rows();
  /// The drafter learns from all rows that wait. The ring's entry holds the list of slots.
  void teach_kept(int ring_index);
  /// Starts the step whose input is the header and the ring's entry.
  void start(int ring_index, const StepHeader& header, const Shape& shape, int num_samples);
  SpanResult result_of(const StepLease& lease, size_t span) const;
  void upload_params(int slot);
  static size_t index(int i) { return static_cast<size_t>(i); }
  static constexpr int kLogprobWidth = 1 + kMaxLogprobs;

  StepContext context_;
  device::Stream stream_;
  ExecContext exec_;
  InputLayout input_;
  Scratch scratch_at_;
  Buffer scratch_;
  Buffer captured_, kept_;
  Buffer kv_layers_;  // [target's layers] KvLayerView
  DeviceTable table_;
  std::vector<SlotParams> slot_params_;
  std::vector<SlotUpdate> slot_updates_;  // for the next step
  std::vector<int> new_slots_;            // of these, those whose sequence the device does not know
  bool has_restored_ = false;             // and whether there are others
  // [ring] in pinned memory
  Buffer input_ring_, outcomes_, tokens_, samples_, logprob_ids_, logprobs_, ranks_, kept_slots_;
  std::vector<device::Event> begun_, done_;  // [ring]
  int next_ring_ = 0;
  int num_last_rows_ = 0, num_last_logits_ = 0, num_last_spans_ = 0;
  std::map<Shape, device::Graph> graphs_;
};

}  // namespace openspec
