#pragma once

#include "core/check.h"
#include "kernels/ops.h"
#include "runtime/drafting/network_drafter.h"

namespace openspec {

/// What drafters share whose rows read a feature each: made of the target's captured states, or the
/// output of the row before. `Model` is the head.
///
/// Its state per sequence: entries in the page pool up to the last known token, and the feature of
/// that token's row. The row itself runs when drafts are wanted, so that a step without costs
/// little more than the entries. Entries of drafts are overwritten as soon as the step is known.
template <typename Model>
class FeatureDrafter : public HeadDrafter<Model> {
 public:
  void learn(const ExecContext& exec, const TableView& table, const CommittedStep& step) final {
    void* hidden = this->hidden();
    const int width = head_.num_captures * head_.hidden_size;
    const DraftRows rows = extend_rows(exec, table, step, features(), width,
                                       this->template at<int32_t>(kept_.last_row));
    if (rows.num_rows == 0) return;
    if (head_.captures_normed) {
      this->norm_last(exec, target_.norm, features(), rows.num_rows, width, head_.hidden_size);
    }
    RowBatch batch = rows.batch();
    batch.max_span_rows = step.rows.max_span_rows;
    batch.expected_kv_len = step.rows.expected_kv_len;
    const Sight whole = {.rows = batch, .pages = table.pages};
    model_->append(exec, whole, sliding_of(whole), kv_, target_.embedding, features(), hidden);
    copy_rows(exec, this->template at<int32_t>(kept_.last_row), hidden, feature_of_slot(),
              table.max_num_seqs, head_.hidden_size);
  }

 protected:
  using HeadDrafter<Model>::config_;
  using HeadDrafter<Model>::copy_rows;
  using HeadDrafter<Model>::extend_rows;
  using HeadDrafter<Model>::head_;
  using HeadDrafter<Model>::head_window;
  using HeadDrafter<Model>::kv_;
  using HeadDrafter<Model>::model_;
  using HeadDrafter<Model>::row_bytes;
  using HeadDrafter<Model>::take;
  using HeadDrafter<Model>::target_;
  using HeadDrafter<Model>::HeadDrafter;

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
    const Sight whole = this->sight_of(exec, table, rows, expected_kv_len, may_have_trees);
    Sight sliding = whole;
    if (head_window() > 0) {
      sliding =
          sliding_of(this->sliding_sight_of(exec, table, rows, expected_kv_len, may_have_trees));
    }
    model_->forward(exec, whole, sliding, kv_, target_.embedding,
                    hidden != nullptr ? hidden : this->hidden());
  }
  /// Rows [num_captures * hidden_size], which only `learn` needs.
  void* features() { return this->template at<void>(kept_.features); }
  /// [max_rows, hidden_size], for a pass.
  void* hidden() { return this->template at<void>(kept_.hidden); }
  /// [max_num_seqs] by slot and what was planned after them, [hidden_size] each.
  void* feature_of_slot() { return this->template at<void>(kept_.feature_of_slot); }

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

inline constexpr int kMaxChainDepth = 15;

/// Such a drafter that drafts token by token: chains, each draft of which is a pass over one row of
/// each sequence.
template <typename Model>
class ChainDrafter : public FeatureDrafter<Model> {
  using Base = FeatureDrafter<Model>;

 public:
  DraftLogits draft_logits() final {
    return this->kept_logits(logits_of(0), depth_stride(),
                             this->template at<int32_t>(chain_.logits_row));
  }

 protected:
  using Base::config_;
  using Base::head_;
  using Base::keeps_logits;
  using Base::take;

  explicit ChainDrafter(const RunnerConfig& config) : Base(config), depth_(config.num_depths()) {
    OPENSPEC_CHECK_ARG(depth_ >= 1 && depth_ <= kMaxChainDepth, "draft_depth must be in [1, ",
                       kMaxChainDepth, "], got ", depth_);
  }

  int depth() const { return depth_; }
  /// Logits of one depth; where they are not kept, all depths share a place.
  float* logits_of(int depth) {
    return this->template at<float>(chain_.logits) + (keeps_logits() ? depth * depth_stride() : 0);
  }
  /// Plans memory for so many chains at a time; logits have room for so many rows.
  void plan_chains(int max_chains, int max_logits_rows) {
    max_chains_ = max_chains;
    chain_.chosen = take(config_.max_num_seqs, sizeof(int32_t));
    if (keeps_logits()) {
      chain_.logits = take(depth_, static_cast<size_t>(depth_stride()) * sizeof(float));
      chain_.logits_row = take(config_.max_num_seqs, sizeof(int32_t));
    } else {
      chain_.logits = take(max_logits_rows, this->logits_bytes());
    }
  }

  void propose_chains(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted) {
    DraftRows rows = this->draft_rows(wanted.num_seqs, wanted.num_seqs);
    OPENSPEC_CHECK(wanted.num_seqs <= max_chains_, wanted.num_seqs, " chains, at most ",
                   max_chains_);
    for (int depth = 0; depth <= wanted.max_drafts; ++depth) {
      ops::chain_rows(
          exec,
          {.table = table,
           .seq = wanted.seq,
           .num_wanted = wanted.num_wanted,
           .num_seqs = wanted.num_seqs,
           .max_drafts = wanted.max_drafts,
           .depth = depth,
           .page_size = config_.page_size,
           .chosen = this->template at<int32_t>(chain_.chosen),
           .out = rows,
           .drafts = wanted.drafts,
           .num_drafts = wanted.num_drafts,
           .row_of_seq = keeps_logits() ? this->template at<int32_t>(chain_.logits_row) : nullptr});
      if (depth == wanted.max_drafts) break;
      this->set_last_logits(logits_of(depth), wanted.num_seqs);
      if (depth == 0) {
        this->copy_rows(exec, rows.source, this->feature_of_slot(), this->hidden(), rows.num_rows,
                        head_.hidden_size);
      }
      this->run(exec, table, rows, wanted.expected_kv_len);
      this->model_->logits(exec, this->target_.head, nullptr, rows.num_rows, logits_of(depth));
      this->draw(exec, table,
                 {.rows = rows.batch(),
                  .sample_row = rows.row_span,  // a row's own number; -1: padding
                  .num_samples = rows.num_rows,
                  .logits = logits_of(depth),
                  .vocab_size = head_.draft_vocab_size,
                  .token_of = this->token_of(),
                  .chosen = this->template at<int32_t>(chain_.chosen)});
    }
  }

 private:
  int64_t depth_stride() const {  // floats, whole lines of 256 bytes
    return (int64_t{max_chains_} * head_.draft_vocab_size + 63) / 64 * 64;
  }

  struct Places {
    size_t chosen, logits, logits_row;
  };
  const int depth_;
  int max_chains_ = 0;
  Places chain_{};
};

}  // namespace openspec
