#pragma once

#include "core/check.h"
#include "kernels/ops.h"
#include "model/heads/eagle3.h"
#include "runtime/drafting/network_drafter.h"

namespace openspec {

/// What drafters with such a head have in common: its geometry, and what it learns of a step.
///
/// Its state per sequence: entries in the page pool up to the last known token, and the feature of
/// that token's row. The row itself runs when drafts are wanted, so that a step without costs
/// little more than the entries. Entries of drafts are overwritten as soon as the step is known.
class Eagle3HeadDrafter : public HeadDrafter<Eagle3> {
 public:
  void learn(const ExecContext& exec, const TableView& table, const CommittedStep& step) final {
    void* features = at<void>(kept_.features);
    void* hidden = at<void>(kept_.hidden);
    const DraftRows rows =
        extend_rows(exec, table, step, features, head_.num_captures * head_.hidden_size,
                    at<int32_t>(kept_.last_row));
    if (rows.num_rows == 0) return;
    RowBatch batch = rows.batch();
    batch.max_span_rows = step.rows.max_span_rows;
    batch.expected_kv_len = step.rows.expected_kv_len;
    const Sight whole = {.rows = batch, .pages = table.pages};
    model_->append(exec, whole, sliding_of(whole), kv_, target_.embedding, features, hidden);
    copy_rows(exec, at<int32_t>(kept_.last_row), hidden, at<void>(kept_.feature_of_slot),
              table.max_num_seqs, head_.hidden_size);
  }

 protected:
  using HeadDrafter::HeadDrafter;

  /// Plans memory for passes of so many rows, and `num_features` more features after those of the
  /// slots.
  void plan_kept(int max_rows, int num_features = 0) {
    const int seqs = config_.max_num_seqs;
    const size_t width = static_cast<size_t>(row_bytes(head_.hidden_size));
    kept_.last_row = take(seqs, sizeof(int32_t));
    kept_.features = take(max_rows, static_cast<size_t>(head_.num_captures) * width);
    kept_.hidden = take(max_rows, width);
    kept_.feature_of_slot = take(seqs + num_features, width);
  }
  /// A pass over draft rows; `hidden()` holds their features before and their outputs after it.
  void run(const ExecContext& exec, const TableView& table, const DraftRows& rows,
           int expected_kv_len, void* hidden = nullptr, bool may_have_trees = false) {
    const Sight whole = sight_of(exec, table, rows, expected_kv_len, may_have_trees);
    Sight sliding = whole;
    if (head_window() > 0) {
      sliding = sliding_of(sliding_sight_of(exec, table, rows, expected_kv_len, may_have_trees));
    }
    model_->forward(exec, whole, sliding, kv_, target_.embedding,
                    hidden != nullptr ? hidden : this->hidden());
  }
  /// Rows [num_captures * hidden_size], which only `learn` needs.
  void* features() { return at<void>(kept_.features); }
  /// [max_rows, hidden_size], for a pass.
  void* hidden() { return at<void>(kept_.hidden); }
  /// [max_num_seqs] by slot and what was planned after them, [hidden_size] each.
  void* feature_of_slot() { return at<void>(kept_.feature_of_slot); }

 private:
  /// A row sees the last tokens up to itself.
  Sight sliding_of(Sight sight) const {
    sight.window = head_window();
    sight.window_follows_rows = head_window() > 0;
    return sight;
  }

  struct Places {
    size_t last_row, features, hidden, feature_of_slot;
  };
  Places kept_{};
};

}  // namespace openspec
