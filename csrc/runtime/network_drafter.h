#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/common/exec.h"
#include "kernels/drafts/draft_rows.h"
#include "model/buffer.h"
#include "model/draft_model.h"
#include "runtime/drafter.h"

namespace openspec {

/// What drafters have in common that run a network of their own over rows of their own, on the
/// device of the step: memory, the arrays of the rows, how far rows see, how drafts are drawn.
///
/// Options: `draft_noise` (drafts are drawn as the request is, with the noise of the choice to be
/// guessed; off: always the best) and `draft_window` (tokens of the context that draft rows see,
/// the last ones; 0: all).
class NetworkDrafter : public Drafter {
 public:
  const DrafterNeeds& needs() const final { return needs_; }
  bool works_on_arrays() const final { return true; }

 protected:
  explicit NetworkDrafter(const DrafterConfig& config);

  /// The geometry that the options give; declares the layers to capture.
  DraftModelConfig draft_model_config();
  /// Declares what is drafted from the best `top_k` tokens; 1: chains.
  void declare_trees(int top_k, const DraftModelConfig& model);
  /// Plans memory for passes of so many rows; a draft pass has at most `max_span_rows` for a
  /// sequence. Before memory of the drafter's own is planned.
  void plan_rows(int max_rows, int max_span_rows);
  /// A place for `count` entries of `bytes` each, which `at` finds once memory is allocated.
  size_t take(int count, size_t bytes);
  size_t planned_bytes() const { return num_bytes_; }
  /// Takes the memory that is planned, zeroed.
  void allocate();
  template <typename T>
  T* at(size_t place) {
    return reinterpret_cast<T*>(memory_.at(place));
  }

  DraftRows draft_rows(int num_rows, int num_spans);
  /// The rows of a step that count, as the drafter's own, with their features in `features`
  /// [num_rows, width]. With `last_row` (ExtendRowsParams) rows move one position ahead.
  DraftRows extend_rows(const ExecContext& exec, const TableView& table, const CommittedStep& step,
                        void* features, int width, int32_t* last_row = nullptr);
  /// What a pass over draft rows sees.
  struct Sight {
    RowBatch rows;
    PageTableView pages;
  };
  Sight sight_of(const ExecContext& exec, const TableView& table, const DraftRows& rows,
                 int expected_kv_len, bool may_have_trees = false);

  /// to[i] = from[row[i]], rows of `width` activations; rows of -1 keep what they hold.
  void copy_rows(const ExecContext& exec, const int32_t* row, const void* from, void* to,
                 int num_rows, int width) const;
  int64_t row_bytes(int width) const;

  /// How drafts are drawn; see draft_noise.
  const SamplingParams* sampling(const TableView& table);
  /// Whether the logits of all drafts are to be kept, for acceptance by rejection.
  bool keeps_logits() const { return needs_.keeps_logits; }
  size_t choose_bytes(int max_num_samples, int vocab_size) const;
  size_t top_drafts_bytes(int max_num_samples, int vocab_size) const;
  std::vector<float> on_host(const float* values, size_t count) const;

  const DrafterConfig config_;
  DrafterNeeds needs_;

 private:
  struct Places {
    size_t row_token, row_position, row_span, row_parent, source, row_kv_slot, span_begin,
        span_kv_len, span_seq, greedy, window_kv_len, window_seq, window_pages;
  };

  bool has_noise_;
  int window_;
  int max_window_pages_ = 0, max_span_rows_ = 0;
  size_t num_bytes_ = 0;
  Places at_{};
  Buffer memory_;
};

}  // namespace openspec
