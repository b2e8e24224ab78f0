#include <algorithm>

#include "core/check.h"
#include "kernels/ops.h"
#include "model/heads/language_model.h"
#include "runtime/drafting/network_drafter.h"

namespace openspec {
namespace {

constexpr int kMaxDepth = 15;

/// A small language model that drafts token by token.
///
/// Its state per sequence: entries in the page pool for all known tokens, and the output of the
/// last one's row. So what a step has committed costs one pass, which gives the first draft, too.
/// Entries of drafts are overwritten as soon as the step is known.
class DraftModelDrafter final : public HeadDrafter<LanguageModel> {
 public:
  explicit DraftModelDrafter(const RunnerConfig& config)
      : HeadDrafter(config), max_chains_(std::min(config.max_num_seqs, limits().max_rows)) {
    const int depth = config.num_depths();
    OPENSPEC_CHECK_ARG(depth >= 1 && depth <= kMaxDepth, "draft_depth must be in [1, ", kMaxDepth,
                       "], got ", depth);
    OPENSPEC_CHECK_ARG(config.max_draft_tokens <= depth, "drafts of this kind are chains");
    head_.validate();
    const auto width = static_cast<size_t>(row_bytes(head_.hidden_size));
    plan_rows(limits().max_rows, 1);
    at_.last_row = take(config.max_num_seqs, sizeof(int32_t));
    at_.output_of_slot = take(config.max_num_seqs, width);
    at_.chosen = take(config.max_num_seqs, sizeof(int32_t));
    at_.logits_row = take(config.max_num_seqs, sizeof(int32_t));
    at_.logits =
        take(keeps_logits() ? depth : 1, static_cast<size_t>(depth_stride()) * sizeof(float));
    plan_draws(max_chains_, head_.draft_vocab_size);
    declare_head(limits());
  }

  DraftLogits draft_logits() override {
    return kept_logits(at<float>(at_.logits), depth_stride(), at<int32_t>(at_.logits_row));
  }

  void learn(const ExecContext& exec, const TableView& table, const CommittedStep& step) override {
    const DraftRows rows = extend_rows(exec, table, step, /*features=*/nullptr, /*width=*/0,
                                       at<int32_t>(at_.last_row), /*from_start=*/true);
    if (rows.num_rows == 0) return;
    RowBatch batch = rows.batch();
    batch.expected_span_rows = step.rows.expected_span_rows;
    batch.expected_kv_len = step.rows.expected_kv_len;
    model_->forward(exec, {.rows = batch, .pages = table.pages}, kv_);
    copy_rows(exec, at<int32_t>(at_.last_row), model_->outputs(), at<void>(at_.output_of_slot),
              table.max_num_seqs, head_.hidden_size);
  }

  void propose(const ExecContext& exec, const TableView& table,
               const WantedDrafts& wanted) override {
    const DraftRows rows = draft_rows(wanted.num_seqs, wanted.num_seqs);
    OPENSPEC_CHECK(wanted.num_seqs <= max_chains_, wanted.num_seqs, " chains, at most ",
                   max_chains_);
    for (int depth = 0; depth <= wanted.max_drafts; ++depth) {
      ops::chain_rows(exec, {.table = table,
                             .seq = wanted.seq,
                             .num_wanted = wanted.num_wanted,
                             .num_seqs = wanted.num_seqs,
                             .max_drafts = wanted.max_drafts,
                             .depth = depth,
                             .page_size = config_.page_size,
                             .chosen = at<int32_t>(at_.chosen),
                             .out = rows,
                             .drafts = wanted.drafts,
                             .num_drafts = wanted.num_drafts,
                             .row_of_seq = keeps_logits() ? at<int32_t>(at_.logits_row) : nullptr});
      if (depth == wanted.max_drafts) break;
      if (depth == 0) {
        copy_rows(exec, rows.source, at<void>(at_.output_of_slot), model_->outputs(), rows.num_rows,
                  head_.hidden_size);
      } else {
        model_->forward(exec, sight_of(exec, table, rows, wanted.expected_kv_len), kv_);
      }
      draw_from(exec, table, rows, logits_of(depth));
    }
  }

 private:
  struct Places {
    size_t last_row, output_of_slot, chosen, logits, logits_row;
  };

  void draw_from(const ExecContext& exec, const TableView& table, const DraftRows& rows,
                 float* logits) {
    set_last_logits(logits, rows.num_rows);
    model_->logits(exec, rows.num_rows, logits);
    draw(exec, table,
         {.rows = rows.batch(),
          .sample_row = rows.row_span,  // a row's own number; -1: padding
          .num_samples = rows.num_rows,
          .logits = logits,
          .vocab_size = head_.draft_vocab_size,
          .token_of = token_of(),
          .chosen = at<int32_t>(at_.chosen)});
  }

  /// Logits of one depth; where they are not kept, all depths share a place.
  float* logits_of(int depth) {
    return at<float>(at_.logits) + (keeps_logits() ? depth * depth_stride() : 0);
  }
  int64_t depth_stride() const {  // floats, whole lines of 256 bytes
    return (int64_t{max_chains_} * head_.draft_vocab_size + 63) / 64 * 64;
  }
  ForwardLimits limits() const {
    ForwardLimits limits = config_.limits();
    limits.max_rows += config_.max_num_seqs;  // first tokens, see ExtendRowsParams::from_start
    limits.max_logits_rows = config_.max_num_seqs;
    return limits;
  }

  const int max_chains_;  // at a time
  Places at_{};
};

const DrafterRegistration kRegistration("draft_model", make_drafter_of<DraftModelDrafter>);

}  // namespace
}  // namespace openspec
