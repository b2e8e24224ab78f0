#pragma once

#include <vector>

#include "kernels/drafts/kept_rows.h"
#include "runtime/device/device_buffers.h"
#include "runtime/device/graph_book.h"
#include "runtime/drafting/copy_source.h"
#include "runtime/step/step_backend.h"

namespace openspec {

/// What a step enqueues on the device, stage by stage. Graphs record these calls, so all that
/// changes from step to step is read on the device.
class DeviceStages {
 public:
  DeviceStages(const StepContext& context, const DeviceBuffers& arrays, void* stream);

  const ExecContext& exec() const { return exec_; }
  /// Takes the memory of the captured rows.
  void set_capture(const std::vector<int>& layers);
  const Buffer& captured() const { return captured_; }

  /// The step without its input.
  void enqueue(const StepShape& shape, int num_samples);
  /// All that follows the target's forward pass. `masks` is null where no grammar limits a row.
  struct Masks {
    const int32_t *words, *samples;  // see ChooseParams
  };
  void enqueue_choices(const StepShape& shape, int num_samples, const Masks* masks);
  /// Takes the input from where the host wrote it.
  void begin(const StepInputArrays& host, const StepHeader& header, int num_spans);
  /// Whether a step of that shape has sources of drafts on the device.
  bool drafts(const StepShape& shape) const { return shape.proposes || has_copies(); }
  /// Asks them, and picks the drafts of each sequence.
  void propose(const StepShape& shape);
  /// The drafts of the host's input come before those of the drafter, if that has any.
  void merge(const StepInputArrays& host, const StepShape& shape, int num_spans, bool has_proposed);
  void lay_out(const StepShape& shape, int num_samples);
  void score(const StepShape& shape);
  /// The slot's tokens from `begin` on, `count` of them, are an answer to copy from.
  void remember(uint64_t owner, int slot, int begin, int count);
  void forget_answers() { answers_.clear(exec_); }
  /// The drafter learns from all rows of the input's kept_slots, which waited for so many steps.
  void teach_kept(const StepInputArrays& host, int num_slots, int num_steps);

  /// Drafts of the step, [max_num_seqs, D] and [max_num_seqs]: the drafter's on the device, or what
  /// the host sent with the input.
  struct Proposals {
    int32_t *tokens, *counts;
    int32_t* parents;  // null where all are chains
    float* scores;     // null where there are none
  };
  Proposals proposals(bool has_trees, int num_spans) const;
  bool proposes_on_host() const {
    return context_.config.max_draft_tokens > 0 && !context_.drafter.works_on_arrays();
  }
  /// Whether a drafter that is left out learns later.
  bool keeps_rows() const {
    return context_.drafter.needs().is_costly && context_.drafter.works_on_arrays();
  }
  bool has_copies() const { return context_.config.max_copied_drafts > 0; }
  /// Whether sequences share rows by how likely their chains are: one alone has nothing to share.
  bool compares_chains(int num_spans) const {
    return context_.drafter.needs().has_scores && num_spans > 1;
  }

 private:
  void ask_drafter(const StepShape& shape);
  void choose_source(const StepShape& shape);
  CopiedDrafts copied_drafts() const;
  void choose(const RowBatch& rows, int num_samples, const Masks* masks);
  void commit(const StepShape& shape);
  void keep_rows(const RowBatch& rows);

  RowBatch row_batch(const StepShape& shape) const;
  CommittedStep committed(const RowBatch& rows) const;
  DrawnDrafts drawn_drafts() const;
  KeptRows kept_rows();
  StepInput input() const { return {arrays_.input.header, arrays_.input.spans}; }
  TableView table_view() const;
  int max_drafts() const { return static_cast<int>(most_drafts(context_.config)); }

  const StepContext& context_;
  const DeviceBuffers& arrays_;
  ExecContext exec_;
  std::vector<int> capture_layers_;
  Buffer captured_, kept_;
  CopyLookup copies_;
  AnswerMemory answers_;
  Buffer kv_layers_;  // [target's layers] KvLayerView
};

}  // namespace openspec
