#include "model/eagle3.h"

#include <algorithm>
#include <optional>

#include "core/check.h"
#include "kernels/ops.h"
#include "runtime/network_drafter.h"

namespace openspec {
namespace {

constexpr int kMaxDepth = 15;
constexpr int kMaxTopK = 10;

/// Autoregressive drafts from a one-layer head over the target's features: chains, or with
/// draft_top_k above 1 trees.
///
/// Its state per sequence: entries in the page pool up to the last known token, and the feature of
/// that token's row. The row itself runs when drafts are wanted, so that a step without costs
/// little more than the entries. Entries of drafts are overwritten as soon as the step is known.
class Eagle3Drafter final : public NetworkDrafter {
 public:
  explicit Eagle3Drafter(const DrafterConfig& config)
      : NetworkDrafter(config),
        shape_{config.draft_depth, config.integer("draft_top_k", 1, 1, kMaxTopK)} {
    OPENSPEC_CHECK_ARG(shape_.depth >= 1 && shape_.depth <= kMaxDepth,
                       "draft_depth must be in [1, ", kMaxDepth, "], got ", shape_.depth);
    OPENSPEC_CHECK_ARG(config.max_draft_tokens <= shape_.num_nodes(), "a tree of ",
                       config.max_draft_tokens, " drafts, ", shape_.num_nodes(), " are made");
    max_proposals_ = std::min(config.max_num_seqs, config.limits.max_rows);
    if (makes_trees() && shape_.depth > 1) {
      max_proposals_ = std::clamp(config.limits.max_rows / shape_.num_rows(), 1, max_proposals_);
    }
    head_ = {draft_model_config()};
    head_.has_qk_norm = config.flag("has_qk_norm", false);
    head_.norm_before_residual = config.flag("norm_before_residual", false);
    head_.validate();
    declare_trees(shape_.top_k, head_);
    needs_.num_draft_entries = num_tree_rows();
    needs_.kv_layers = {{head_.num_kv_heads, head_.head_dim}};
    plan();
    needs_.fixed_bytes =
        Eagle3::weight_bytes(head_, config_.device) +
        Eagle3::scratch_bytes(head_, config_.dtype, config_.device, limits(), config_.num_threads) +
        planned_bytes();
  }

  Weights* weights() override { return model_ ? &model_->weights() : nullptr; }

  void attach(const Qwen3& target, std::span<const KvLayerView> kv_layers) override {
    embedding_ = target.embedding();
    kv_ = kv_layers.front();
    model_.emplace(head_, config_.dtype, config_.device, limits(), config_.num_threads);
    allocate();
  }

  std::vector<float> last_logits() override {
    return on_host(logits_of(last_depth_), static_cast<size_t>(num_last_logits_) *
                                               static_cast<size_t>(head_.draft_vocab_size));
  }

  DraftLogits draft_logits() override {
    if (!keeps_logits()) return {};
    return {.values = at<float>(at_.logits),
            .row_stride = head_.draft_vocab_size,
            .depth_stride = depth_stride(),
            .row = at<int32_t>(at_.logits_row),
            .vocab_size = head_.draft_vocab_size,
            .column_of = model_->column_of()};
  }

  void propose(const ExecContext& exec, const TableView& table,
               const WantedDrafts& wanted) override {
    if (!makes_trees()) {
      propose_chains(exec, table, wanted);
      return;
    }
    for (int first = 0; first < wanted.num_seqs; first += max_proposals_) {
      const ptrdiff_t drafts = ptrdiff_t{first} * wanted.max_drafts;
      propose_trees(exec, table,
                    {.seq = wanted.seq + first,
                     .num_wanted = wanted.num_wanted + first,
                     .num_seqs = std::min(max_proposals_, wanted.num_seqs - first),
                     .max_drafts = wanted.max_drafts,
                     .expected_kv_len = wanted.expected_kv_len,
                     .drafts = wanted.drafts + drafts,
                     .num_drafts = wanted.num_drafts + first,
                     .parents = wanted.parents + drafts,
                     .scores = wanted.scores + drafts});
    }
  }

  void learn(const ExecContext& exec, const TableView& table, const CommittedStep& step) override {
    void* features = at<void>(at_.features);
    void* hidden = at<void>(at_.hidden);
    const DraftRows rows =
        extend_rows(exec, table, step, features, head_.num_captures * head_.hidden_size,
                    at<int32_t>(at_.last_row));
    if (rows.num_rows == 0) return;
    RowBatch batch = rows.batch();
    batch.expected_span_rows = step.rows.expected_span_rows;
    model_->append(exec, batch, table.pages, kv_, embedding_, features, hidden);
    copy_rows(exec, at<int32_t>(at_.last_row), hidden, at<void>(at_.feature_of_slot),
              table.max_num_seqs, head_.hidden_size);
  }

 private:
  struct Places {
    size_t last_row, chosen, features, hidden, feature_of_slot, logits, logits_row, choose;
    // of trees
    size_t node_token, node_parent, node_score, row_node, order, top_tokens, top_scores, parent_row,
        frontier_row, root_outputs, top_drafts;
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

  void forward(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted,
               const DraftRows& rows, void* hidden, bool may_have_trees = false) {
    const Sight sight = sight_of(exec, table, rows, wanted.expected_kv_len, may_have_trees);
    model_->forward(exec, sight.rows, sight.pages, kv_, embedding_, hidden);
  }

  void propose_chains(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted) {
    num_last_logits_ = wanted.num_seqs;
    DraftRows rows = draft_rows(wanted.num_seqs, wanted.num_seqs);
    OPENSPEC_CHECK(wanted.num_seqs <= max_proposals_, wanted.num_seqs, " chains, at most ",
                   max_proposals_);
    void* hidden = at<void>(at_.hidden);
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
      last_depth_ = depth;
      if (depth == 0) {
        copy_rows(exec, rows.source, at<void>(at_.feature_of_slot), hidden, rows.num_rows,
                  head_.hidden_size);
      }
      forward(exec, table, wanted, rows, hidden);
      model_->logits(exec, nullptr, rows.num_rows, logits_of(depth));
      ops::choose(exec, {.rows = rows.batch(),
                         .sample_row = rows.row_span,  // a row's own number; -1: padding
                         .num_samples = rows.num_rows,
                         .logits = logits_of(depth),
                         .vocab_size = head_.draft_vocab_size,
                         .is_draft = true,
                         .has_own_noise = keeps_logits(),
                         .token_of = model_->token_of(),
                         .sampling = sampling(table),
                         .chosen = at<int32_t>(at_.chosen),
                         .workspace = at<float>(at_.choose)});
    }
  }

  /// All trees together, level by level. At every level the rows so far run again: a span is a
  /// whole one.
  void propose_trees(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted) {
    const int num_seqs = wanted.num_seqs;
    const DraftTrees trees = draft_trees();
    const DraftRows roots = draft_rows(num_seqs, num_seqs);
    void* outputs = at<void>(at_.hidden);
    void* next = at<void>(at_.features);  // which only `learn` needs
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
    copy_rows(exec, roots.source, at<void>(at_.feature_of_slot), root_outputs, num_seqs,
              head_.hidden_size);
    forward(exec, table, wanted, roots, root_outputs);
    model_->logits(exec, nullptr, num_seqs, at<float>(at_.logits));
    find_best(exec, table, roots, roots.row_span, num_seqs);
    for (int level = 1; level <= shape_.depth; ++level) {
      const DraftRows rows = draft_rows(num_seqs * level * shape_.top_k, num_seqs);
      ops::grow_trees(exec, {.table = table,
                             .seq = wanted.seq,
                             .num_wanted = wanted.num_wanted,
                             .num_seqs = num_seqs,
                             .level = level,
                             .page_size = config_.page_size,
                             .tokens = at<int32_t>(at_.top_tokens),
                             .scores = at<float>(at_.top_scores),
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
      forward(exec, table, wanted, rows, outputs, /*may_have_trees=*/true);
      const int32_t* frontier_row = at<int32_t>(at_.frontier_row);
      model_->logits(exec, frontier_row, num_seqs * shape_.top_k, at<float>(at_.logits));
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
    num_last_logits_ = count;
    ops::top_drafts(exec, {.rows = rows.batch(),
                           .sample_row = row,
                           .num_samples = count,
                           .logits = at<float>(at_.logits),
                           .vocab_size = head_.draft_vocab_size,
                           .token_of = model_->token_of(),
                           .sampling = sampling(table),
                           .top_k = shape_.top_k,
                           .tokens = at<int32_t>(at_.top_tokens),
                           .scores = at<float>(at_.top_scores),
                           .workspace = at<void>(at_.top_drafts)});
  }
  ForwardLimits limits() const {
    ForwardLimits limits = config_.limits;
    limits.max_logits_rows = max_proposals_ * (makes_trees() ? shape_.top_k : 1);
    limits.max_rows = std::max(limits.max_rows, num_tree_rows());
    limits.max_tokens += num_tree_rows();
    return limits;
  }

  void plan() {
    const int rows = limits().max_rows, seqs = config_.max_num_seqs;
    const int logits_rows = limits().max_logits_rows;
    plan_rows(rows, std::max(1, num_tree_rows()));
    at_.last_row = take(seqs, sizeof(int32_t));
    at_.chosen = take(seqs, sizeof(int32_t));
    const size_t width = static_cast<size_t>(head_.hidden_size) * dtype_bytes(config_.dtype);
    at_.features = take(rows, static_cast<size_t>(head_.num_captures) * width);
    at_.hidden = take(rows, width);
    at_.feature_of_slot = take(seqs, width);
    if (keeps_logits()) {
      at_.logits = take(shape_.depth, static_cast<size_t>(depth_stride()) * sizeof(float));
      at_.logits_row = take(seqs, sizeof(int32_t));
    } else {
      at_.logits = take(logits_rows, static_cast<size_t>(head_.draft_vocab_size) * sizeof(float));
    }
    at_.choose = take(1, makes_trees() ? 0 : choose_bytes(max_proposals_, head_.draft_vocab_size));
    if (!makes_trees()) return;
    for (size_t* array : {&at_.node_token, &at_.node_parent, &at_.node_score}) {
      *array = take(max_proposals_ * shape_.num_nodes(), sizeof(int32_t));
    }
    at_.row_node = take(max_proposals_ * shape_.num_rows(), sizeof(int32_t));
    at_.order = take(shape_.num_nodes(), sizeof(int32_t));
    for (size_t* array : {&at_.top_tokens, &at_.top_scores}) {
      *array = take(logits_rows * shape_.top_k, sizeof(int32_t));
    }
    at_.parent_row = take(rows, sizeof(int32_t));
    at_.frontier_row = take(logits_rows, sizeof(int32_t));
    at_.root_outputs = take(max_proposals_, width);
    at_.top_drafts = take(1, top_drafts_bytes(logits_rows, head_.draft_vocab_size));
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
  int num_last_logits_ = 0, last_depth_ = 0;
  Eagle3Config head_;
  Places at_{};
  std::optional<Eagle3> model_;
  KvLayerView kv_;
  const void* embedding_ = nullptr;
};

const DrafterRegistration kRegistration(
    "eagle3", [](const DrafterConfig& config) -> std::unique_ptr<Drafter> {
      return std::make_unique<Eagle3Drafter>(config);
    });

}  // namespace
}  // namespace openspec
