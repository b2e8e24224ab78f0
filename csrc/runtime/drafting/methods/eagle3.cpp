#include "runtime/drafting/methods/eagle3.h"

#include <algorithm>

namespace openspec {
namespace {

constexpr int kMaxDepth = 15;
constexpr int kMaxTopK = 10;

/// Autoregressive drafts from a head over the target's features: chains, or with draft_top_k above
/// 1 trees.
class Eagle3Drafter final : public Eagle3HeadDrafter {
 public:
  explicit Eagle3Drafter(const RunnerConfig& config)
      : Eagle3HeadDrafter(config),
        shape_{config.num_depths(), config.integer("draft_top_k", 1, 1, kMaxTopK)} {
    OPENSPEC_CHECK_ARG(shape_.depth >= 1 && shape_.depth <= kMaxDepth,
                       "draft_depth must be in [1, ", kMaxDepth, "], got ", shape_.depth);
    OPENSPEC_CHECK_ARG(config.max_draft_tokens <= shape_.num_nodes(), "a tree of ",
                       config.max_draft_tokens, " drafts, ", shape_.num_nodes(), " are made");
    max_proposals_ = std::min(config.max_num_seqs, config.limits().max_rows);
    if (makes_trees() && shape_.depth > 1) {
      max_proposals_ = std::clamp(config.limits().max_rows / shape_.num_rows(), 1, max_proposals_);
    }
    head_.validate();
    declare_trees(shape_.top_k, head_.draft_vocab_size);
    needs_.num_draft_entries = num_tree_rows();
    plan();
    declare_head(limits());
  }

  DraftLogits draft_logits() override {
    return kept_logits(at<float>(at_.logits), depth_stride(), at<int32_t>(at_.logits_row));
  }

  void propose(const ExecContext& exec, const TableView& table,
               const WantedDrafts& wanted) override {
    if (!makes_trees()) {
      propose_chains(exec, table, wanted);
      return;
    }
    for (int first = 0; first < wanted.num_seqs; first += max_proposals_) {
      propose_trees(exec, table,
                    wanted.part(first, std::min(max_proposals_, wanted.num_seqs - first)));
    }
  }

 private:
  struct Places {
    size_t chosen, logits, logits_row;
    // of trees
    size_t node_token, node_parent, node_score, row_node, order, parent_row, frontier_row,
        root_outputs;
  };

  bool makes_trees() const { return shape_.top_k > 1; }
  /// Logits of one depth; where they are not kept, all depths share a place.
  float* logits_of(int depth) {
    return at<float>(at_.logits) + (keeps_logits() ? depth * depth_stride() : 0);
  }
  int64_t depth_stride() const {  // floats, whole lines of 256 bytes
    return (int64_t{max_proposals_} * head_.draft_vocab_size + 63) / 64 * 64;
  }
  int num_tree_rows() const { return makes_trees() ? shape_.num_rows() : 0; }

  void propose_chains(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted) {
    DraftRows rows = draft_rows(wanted.num_seqs, wanted.num_seqs);
    OPENSPEC_CHECK(wanted.num_seqs <= max_proposals_, wanted.num_seqs, " chains, at most ",
                   max_proposals_);
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
      set_last_logits(logits_of(depth), wanted.num_seqs);
      if (depth == 0) {
        copy_rows(exec, rows.source, feature_of_slot(), hidden(), rows.num_rows, head_.hidden_size);
      }
      run(exec, table, rows, wanted.expected_kv_len);
      model_->logits(exec, target_.head, nullptr, rows.num_rows, logits_of(depth));
      draw(exec, table,
           {.rows = rows.batch(),
            .sample_row = rows.row_span,  // a row's own number; -1: padding
            .num_samples = rows.num_rows,
            .logits = logits_of(depth),
            .vocab_size = head_.draft_vocab_size,
            .token_of = token_of(),
            .chosen = at<int32_t>(at_.chosen)});
    }
  }

  /// All trees together, level by level. At every level the rows so far run again: a span is a
  /// whole one.
  void propose_trees(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted) {
    const int num_seqs = wanted.num_seqs;
    const DraftTrees trees = draft_trees();
    const DraftRows roots = draft_rows(num_seqs, num_seqs);
    void* outputs = hidden();
    void* next = features();
    ops::chain_rows(exec, {.table = table,
                           .seq = wanted.seq,
                           .num_wanted = wanted.num_wanted,
                           .num_seqs = num_seqs,
                           .max_drafts = wanted.max_drafts,
                           .page_size = config_.page_size,
                           .out = roots,
                           .drafts = wanted.drafts,
                           .num_drafts = wanted.num_drafts});
    void* root_outputs = at<void>(at_.root_outputs);
    copy_rows(exec, roots.source, feature_of_slot(), root_outputs, num_seqs, head_.hidden_size);
    run(exec, table, roots, wanted.expected_kv_len, root_outputs);
    model_->logits(exec, target_.head, nullptr, num_seqs, at<float>(at_.logits));
    find_best(exec, table, roots, roots.row_span, num_seqs);
    for (int level = 1; level <= shape_.depth; ++level) {
      const DraftRows rows = draft_rows(num_seqs * level * shape_.top_k, num_seqs);
      ops::grow_trees(exec, {.table = table,
                             .seq = wanted.seq,
                             .num_wanted = wanted.num_wanted,
                             .num_seqs = num_seqs,
                             .level = level,
                             .page_size = config_.page_size,
                             .tokens = top_tokens(),
                             .scores = top_scores(),
                             .trees = trees,
                             .out = rows,
                             .parent_row = at<int32_t>(at_.parent_row),
                             .frontier_row = at<int32_t>(at_.frontier_row)});
      if (level == shape_.depth) break;
      // A row's feature is its parent's output, or that of the last known token.
      ops::gather_rows(exec, {.row = at<int32_t>(at_.parent_row),
                              .in = outputs,
                              .out = next,
                              .num_rows = rows.num_rows,
                              .width_bytes = row_bytes(head_.hidden_size),
                              .out_stride = row_bytes(head_.hidden_size),
                              .other_row = rows.source,
                              .other_in = root_outputs});
      std::swap(outputs, next);
      run(exec, table, rows, wanted.expected_kv_len, outputs, /*may_have_trees=*/true);
      const int32_t* frontier_row = at<int32_t>(at_.frontier_row);
      model_->logits(exec, target_.head, frontier_row, num_seqs * shape_.top_k,
                     at<float>(at_.logits));
      find_best(exec, table, rows, frontier_row, num_seqs * shape_.top_k);
    }
    ops::pick_drafts(exec, {.trees = trees,
                            .num_wanted = wanted.num_wanted,
                            .num_seqs = num_seqs,
                            .max_drafts = wanted.max_drafts,
                            .order = at<int32_t>(at_.order),
                            .drafts = wanted.drafts,
                            .parents = wanted.parents,
                            .scores = wanted.scores,
                            .num_drafts = wanted.num_drafts});
  }

  /// The best drafts after rows, whose logits are there.
  void find_best(const ExecContext& exec, const TableView& table, const DraftRows& rows,
                 const int32_t* row, int count) {
    set_last_logits(at<float>(at_.logits), count);
    NetworkDrafter::find_best(exec, table,
                              {.rows = rows.batch(),
                               .sample_row = row,
                               .num_samples = count,
                               .logits = at<float>(at_.logits),
                               .vocab_size = head_.draft_vocab_size,
                               .token_of = token_of(),
                               .top_k = shape_.top_k});
  }

  ForwardLimits limits() const {
    ForwardLimits limits = config_.limits();
    limits.max_logits_rows = max_proposals_ * (makes_trees() ? shape_.top_k : 1);
    limits.max_rows = std::max(limits.max_rows, num_tree_rows());
    limits.max_tokens += num_tree_rows();
    return limits;
  }

  void plan() {
    const int rows = limits().max_rows, seqs = config_.max_num_seqs;
    const int logits_rows = limits().max_logits_rows;
    plan_rows(rows, std::max(1, num_tree_rows()));
    plan_kept(rows);
    at_.chosen = take(seqs, sizeof(int32_t));
    if (keeps_logits()) {
      at_.logits = take(shape_.depth, static_cast<size_t>(depth_stride()) * sizeof(float));
      at_.logits_row = take(seqs, sizeof(int32_t));
    } else {
      at_.logits = take(logits_rows, logits_bytes());
    }
    if (!makes_trees()) {
      plan_draws(max_proposals_, head_.draft_vocab_size);
      return;
    }
    plan_best(logits_rows, head_.draft_vocab_size, shape_.top_k);
    for (size_t* array : {&at_.node_token, &at_.node_parent, &at_.node_score}) {
      *array = take(max_proposals_ * shape_.num_nodes(), sizeof(int32_t));
    }
    at_.row_node = take(max_proposals_ * shape_.num_rows(), sizeof(int32_t));
    at_.order = take(shape_.num_nodes(), sizeof(int32_t));
    at_.parent_row = take(rows, sizeof(int32_t));
    at_.frontier_row = take(logits_rows, sizeof(int32_t));
    at_.root_outputs = take(max_proposals_, static_cast<size_t>(row_bytes(head_.hidden_size)));
  }

  DraftTrees draft_trees() {
    return {.shape = shape_,
            .node_token = at<int32_t>(at_.node_token),
            .node_parent = at<int32_t>(at_.node_parent),
            .node_score = at<float>(at_.node_score),
            .row_node = at<int32_t>(at_.row_node)};
  }

  TreeShape shape_;        // top_k 1: a chain
  int max_proposals_ = 0;  // sequences that draft at a time
  Places at_{};
};

const DrafterRegistration kRegistration("eagle3", make_drafter_of<Eagle3Drafter>);

}  // namespace
}  // namespace openspec
