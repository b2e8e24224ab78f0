#include <algorithm>

#include "runtime/drafting/methods/eagle3.h"

namespace openspec {
namespace {

constexpr int kMaxDepth = 63;

/// All drafts in one pass: behind the last known token's row stand rows of masks, whose feature is
/// a constant of the head, and every row tells the draft of its depth. Chains, or with draft_top_k
/// above 1 trees from the marginals of the depths.
///
/// The entries of masks, from the one behind the last known token on, are no more than its drafts
/// will take, and are overwritten when the step is known.
class PEagleDrafter final : public Eagle3HeadDrafter {
 public:
  explicit PEagleDrafter(const DrafterConfig& config)
      : Eagle3HeadDrafter(config),
        depth_(config.draft_depth),
        top_k_(config.integer("draft_top_k", 1, 1, kMaxTopDrafts)),
        mask_token_(config.integer("mask_token", -1, 0, config.target.vocab_size - 1)) {
    OPENSPEC_CHECK_ARG(depth_ >= 1 && depth_ <= kMaxDepth, "draft_depth must be in [1, ", kMaxDepth,
                       "], got ", depth_);
    const int most = makes_trees() ? kMaxBlockTreeNodes : depth_;
    OPENSPEC_CHECK_ARG(config.max_draft_tokens <= most, "a tree of ", config.max_draft_tokens,
                       " drafts, at most ", most);
    head_.has_mask_hidden = true;
    head_.validate();
    declare_trees(top_k_, head_);
    plan();
    declare_head(head_.num_layers, limits());
  }

  void prepare(const ExecContext& exec) override {
    model_->mask_feature(exec, at<int32_t>(at_.zero), features(),
                         static_cast<std::byte*>(feature_of_slot()) +
                             config_.max_num_seqs * row_bytes(head_.hidden_size));
  }

  DraftLogits draft_logits() override {
    return kept_logits(at<float>(at_.logits), head_.draft_vocab_size,
                       at<int32_t>(at_.first_sample));
  }

  void propose(const ExecContext& exec, const TableView& table,
               const WantedDrafts& wanted) override {
    // In a device's one pass chains are cut to the rows that a step can take; on the host all rows
    // are of use, in as many passes as they need.
    const int seqs_per_pass =
        exec.device == Device::kCuda ? wanted.num_seqs : std::max(1, most_rows() / depth_);
    for (int first = 0; first < wanted.num_seqs; first += seqs_per_pass) {
      propose_together(exec, table,
                       wanted.part(first, std::min(seqs_per_pass, wanted.num_seqs - first)));
    }
  }

 private:
  struct Places {
    size_t zero, head_row, sample_row, first_sample, num_depths, chosen, logits;
  };

  bool makes_trees() const { return top_k_ > 1; }
  int most_rows() const { return std::min(limits().max_rows, limits().max_logits_rows); }
  int num_rows_of(const ExecContext& exec, const WantedDrafts& wanted) const {
    if (exec.device == Device::kCuda) {
      // A whole chain for one sequence, be the step as small as it may: it costs hardly more.
      return std::min({wanted.num_seqs * depth_, std::max(wanted.max_rows, depth_), most_rows()});
    }
    int num_rows = 0;
    for (int i = 0; i < wanted.num_seqs; ++i) num_rows += std::min(wanted.num_wanted[i], depth_);
    return num_rows;
  }

  void propose_together(const ExecContext& exec, const TableView& table,
                        const WantedDrafts& wanted) {
    const int num_rows = num_rows_of(exec, wanted);
    const DraftRows rows = draft_rows(num_rows, wanted.num_seqs);
    // How many drafts a chain has is settled here, a tree has as many levels.
    int32_t* num_depths = makes_trees() ? at<int32_t>(at_.num_depths) : wanted.num_drafts;
    ops::block_rows(exec, {.table = table,
                           .seq = wanted.seq,
                           .num_wanted = wanted.num_wanted,
                           .num_seqs = wanted.num_seqs,
                           .max_depth = depth_,
                           .mask_token = mask_token_,
                           .mask_source = config_.max_num_seqs,
                           .page_size = config_.page_size,
                           .out = rows,
                           .num_samples = num_rows,
                           .head_row = at<int32_t>(at_.head_row),
                           .sample_row = at<int32_t>(at_.sample_row),
                           .first_sample = at<int32_t>(at_.first_sample),
                           .num_drafts = num_depths});
    set_last_logits(at<float>(at_.logits), num_rows);
    if (num_rows == 0) return;
    copy_rows(exec, rows.source, feature_of_slot(), hidden(), num_rows, head_.hidden_size);
    run(exec, table, rows, wanted.expected_kv_len);
    model_->logits(exec, at<int32_t>(at_.head_row), num_rows, at<float>(at_.logits));
    if (makes_trees()) {
      grow_trees(exec, table, wanted, rows);
    } else {
      draw_chains(exec, table, wanted, rows);
    }
  }

  void draw_chains(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted,
                   const DraftRows& rows) {
    draw(exec, table,
         {.rows = rows.batch(),
          .sample_row = at<int32_t>(at_.sample_row),
          .num_samples = rows.num_rows,
          .logits = at<float>(at_.logits),
          .vocab_size = head_.draft_vocab_size,
          .token_of = token_of(),
          .chosen = at<int32_t>(at_.chosen)});
    ops::store_blocks(exec, {.chosen = at<int32_t>(at_.chosen),
                             .first_sample = at<int32_t>(at_.first_sample),
                             .num_drafts = wanted.num_drafts,
                             .num_seqs = wanted.num_seqs,
                             .max_drafts = wanted.max_drafts,
                             .drafts = wanted.drafts,
                             .scores = wanted.scores});
  }

  void grow_trees(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted,
                  const DraftRows& rows) {
    find_best(exec, table,
              {.rows = rows.batch(),
               .sample_row = at<int32_t>(at_.sample_row),
               .num_samples = rows.num_rows,
               .logits = at<float>(at_.logits),
               .vocab_size = head_.draft_vocab_size,
               .token_of = token_of(),
               .top_k = top_k_});
    ops::block_trees(exec, {.tokens = top_tokens(),
                            .scores = top_scores(),
                            .top_k = top_k_,
                            .first_sample = at<int32_t>(at_.first_sample),
                            .num_depths = at<int32_t>(at_.num_depths),
                            .num_wanted = wanted.num_wanted,
                            .num_seqs = wanted.num_seqs,
                            .max_drafts = wanted.max_drafts,
                            .drafts = wanted.drafts,
                            .parents = wanted.parents,
                            .path_scores = wanted.scores,
                            .num_drafts = wanted.num_drafts});
  }

  ForwardLimits limits() const {
    ForwardLimits limits = config_.limits;
    // Logits that are kept are those of one pass.
    const int seqs = config_.max_num_seqs;
    const int least = keeps_logits() ? seqs * depth_ : std::max(seqs, depth_);
    limits.max_rows = std::max(limits.max_rows, least);
    limits.max_logits_rows = std::max(limits.max_logits_rows, least);
    return limits;
  }

  void plan() {
    const int seqs = config_.max_num_seqs, samples = most_rows();
    plan_rows(limits().max_rows, depth_);
    plan_kept(limits().max_rows, /*num_features=*/1);
    at_.zero = take(1, sizeof(int32_t));
    at_.first_sample = take(seqs, sizeof(int32_t));
    at_.num_depths = take(seqs, sizeof(int32_t));
    for (size_t* array : {&at_.head_row, &at_.sample_row, &at_.chosen}) {
      *array = take(samples, sizeof(int32_t));
    }
    at_.logits = take(samples, logits_bytes());
    if (makes_trees()) {
      plan_best(samples, head_.draft_vocab_size, top_k_);
    } else {
      plan_draws(samples, head_.draft_vocab_size);
    }
  }

  int depth_, top_k_;  // top_k 1: a chain
  int mask_token_;
  Places at_{};
};

const DrafterRegistration kRegistration(
    "peagle", [](const DrafterConfig& config) -> std::unique_ptr<Drafter> {
      return std::make_unique<PEagleDrafter>(config);
    });

}  // namespace
}  // namespace openspec
