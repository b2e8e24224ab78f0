#include <algorithm>

#include "core/check.h"
#include "kernels/ops.h"
#include "model/heads/language_model.h"
#include "runtime/drafting/one_pass_drafter.h"

namespace openspec {
namespace {

constexpr int kMaxDepth = 15;
constexpr int kMaxMasks = 63;

/// A small language model. Its state per sequence: entries in the page pool for known tokens.
/// Entries of drafts are overwritten as soon as the step is known.
class LanguageModelDrafter : public HeadDrafter<LanguageModel> {
 protected:
  explicit LanguageModelDrafter(const RunnerConfig& config) : HeadDrafter(config) {
    head_.validate();
  }

  /// The entries of a step's rows.
  void extend(const ExecContext& exec, const TableView& table, const CommittedStep& step,
              const DraftRows& rows, const void* states = nullptr) {
    RowBatch batch = rows.batch();
    // A first token's row may come before a span's.
    if (step.rows.max_span_rows > 0) batch.max_span_rows = step.rows.max_span_rows + 1;
    batch.expected_kv_len = step.rows.expected_kv_len;
    model_->forward(exec, {.rows = batch, .pages = table.pages}, kv_, states);
  }
};

/// Drafts token by token. The output of the last known token's row is state, too: so the pass over
/// what a step has committed gives the first draft of the next.
class LanguageModelChain final : public LanguageModelDrafter {
 public:
  explicit LanguageModelChain(const RunnerConfig& config)
      : LanguageModelDrafter(config),
        max_chains_(std::min(config.max_num_seqs, limits().max_rows)) {
    const int depth = config.num_depths();
    OPENSPEC_CHECK_ARG(depth >= 1 && depth <= kMaxDepth, "draft_depth must be in [1, ", kMaxDepth,
                       "], got ", depth);
    OPENSPEC_CHECK_ARG(
        config.max_draft_tokens <= depth && config.integer("draft_top_k", 1, 1, kMaxTopDrafts) == 1,
        "a model without a mask token drafts chains: set draft_top_k to 1");
    OPENSPEC_CHECK_ARG(head_.num_captures == 0, "only a model with a mask token reads states");
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
    extend(exec, table, step, rows);
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
    model_->logits(exec, nullptr, rows.num_rows, logits);
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

/// Drafts all tokens in one pass: after the last known token's row stand rows of masks, and every
/// row drafts the token of its depth. Of a model that reads captured states the entry of a token is
/// made with the states of the position before it; the first token has none, so zeros, and rows of
/// masks have those of the last known token.
///
/// Source: PARD (An et al., arXiv 2504.18583), PARD-2 and their reference code.
class ParallelDrafter final : public OnePassDrafter<LanguageModelDrafter> {
 public:
  explicit ParallelDrafter(const RunnerConfig& config) : OnePassDrafter(config) {
    OPENSPEC_CHECK_ARG(head_.mask_token < head_.vocab_size, "mask_token must be in [0, ",
                       head_.vocab_size, "), got ", head_.mask_token);
    OPENSPEC_CHECK_ARG(depth_ >= 1 && depth_ <= kMaxMasks, "draft_depth must be in [1, ", kMaxMasks,
                       "], got ", depth_);
    const int most = makes_trees() ? kMaxBlockTreeNodes : depth_;
    OPENSPEC_CHECK_ARG(config.max_draft_tokens <= most, "a tree of ", config.max_draft_tokens,
                       " drafts, at most ", most);
    declare_trees(top_k_, head_.draft_vocab_size);
    ForwardLimits all = limits();
    if (has_states()) all.max_rows += config.max_num_seqs;  // see ExtendRowsParams::from_start
    plan_blocks(makes_trees() ? top_k_ : 0, all.max_rows - limits().max_rows);
    if (has_states()) plan_states(all.max_rows);
    declare_head(all);
  }

  void learn(const ExecContext& exec, const TableView& table, const CommittedStep& step) override {
    int32_t* last_row = has_states() ? at<int32_t>(at_.last_row) : nullptr;
    const DraftRows rows = extend_rows(exec, table, step, /*features=*/nullptr, /*width=*/0,
                                       last_row, /*from_start=*/has_states());
    if (rows.num_rows == 0) return;
    if (has_states()) take_states(exec, step, rows);
    extend(exec, table, step, rows, states());
    if (!has_states()) return;
    copy_rows(exec, last_row, states(), at<void>(at_.states_of_slot), table.max_num_seqs,
              head_.states_width());
  }

 private:
  struct Places {
    size_t last_row, states, states_of_slot, zeros, no_states;
  };

  bool has_states() const { return head_.num_captures > 0; }
  void* states() { return has_states() ? at<void>(at_.states) : nullptr; }

  void plan_states(int max_rows) {
    const auto width = static_cast<size_t>(row_bytes(head_.states_width()));
    at_.last_row = take(config_.max_num_seqs, sizeof(int32_t));
    at_.states = take(max_rows, width);
    at_.states_of_slot = take(config_.max_num_seqs, width);
    at_.zeros = take(max_rows, sizeof(int32_t));
    at_.no_states = take(1, width);
  }

  /// The states of the positions before the rows'.
  void take_states(const ExecContext& exec, const CommittedStep& step, const DraftRows& rows) {
    ops::gather_rows(exec, {.row = rows.source,
                            .in = step.features,
                            .out = states(),
                            .num_rows = rows.num_rows,
                            .width_bytes = row_bytes(head_.states_width()),
                            .out_stride = row_bytes(head_.states_width()),
                            .other_row = at<int32_t>(at_.zeros),
                            .other_in = at<void>(at_.no_states)});
    if (!head_.captures_normed) return;
    norm_last(exec, target_.norm, states(), rows.num_rows, head_.states_width(),
              head_.target_hidden_size);
  }

  void propose_blocks(const ExecContext& exec, const TableView& table,
                      const WantedDrafts& wanted) override {
    const Room room = room_of(exec, wanted);
    const DraftRows rows = make_rows(exec, table, wanted, room, /*mask_source=*/-1);
    if (rows.num_rows == 0) return;
    if (has_states()) {
      copy_rows(exec, rows.source, at<void>(at_.states_of_slot), states(), rows.num_rows,
                head_.states_width());
    }
    model_->forward(exec, sight_of(exec, table, rows, wanted.expected_kv_len), kv_, states());
    model_->logits(exec, head_row(), rows.num_rows, logits());
    make_drafts(exec, table, wanted, rows, rows.num_rows);
  }

  Places at_{};
};

std::unique_ptr<Drafter> make(const RunnerConfig& config) {
  if (config.the_head().mask_token >= 0) return std::make_unique<ParallelDrafter>(config);
  return std::make_unique<LanguageModelChain>(config);
}

const DrafterRegistration kRegistration("draft_model", make);

}  // namespace
}  // namespace openspec
