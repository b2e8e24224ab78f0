#include "model/heads/eagle3.h"

#include <algorithm>

#include "runtime/drafting/feature_drafter.h"

namespace openspec {
namespace {

constexpr int kMaxTopK = 10;

/// Autoregressive drafts from a head over the target's features: chains, or with draft_top_k above
/// 1 trees.
class Eagle3Drafter final : public ChainDrafter<Eagle3> {
 public:
  explicit Eagle3Drafter(const RunnerConfig& config)
      : ChainDrafter(config), shape_{depth(), config.integer("draft_top_k", 1, 1, kMaxTopK)} {
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
  struct Places {  // of trees
    size_t node_token, node_parent, node_score, row_node, order, parent_row, frontier_row,
        root_outputs;
  };

  bool makes_trees() const { return shape_.top_k > 1; }
  int num_tree_rows() const { return makes_trees() ? shape_.num_rows() : 0; }

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
    model_->logits(exec, target_.head, nullptr, num_seqs, logits_of(0));
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
      model_->logits(exec, target_.head, frontier_row, num_seqs * shape_.top_k, logits_of(0));
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
    set_last_logits(logits_of(0), count);
    NetworkDrafter::find_best(exec, table,
                              {.rows = rows.batch(),
                               .sample_row = row,
                               .num_samples = count,
                               .logits = logits_of(0),
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
    const int rows = limits().max_rows;
    const int logits_rows = limits().max_logits_rows;
    plan_rows(rows, std::max(1, num_tree_rows()));
    plan_kept(rows);
    plan_chains(max_proposals_, logits_rows);
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
