#pragma once

#include <algorithm>

#include "kernels/ops.h"
#include "runtime/drafting/network_drafter.h"

namespace openspec {

/// What drafters share that draft all depths in one pass over a block of rows for each sequence:
/// chains, or with draft_top_k above 1 trees from the marginals of the depths. `Head` is the
/// HeadDrafter that such a drafter is.
///
/// Entries of a block's own rows are no more than its drafts will take, and are overwritten when
/// the step is known.
template <typename Head>
class OnePassDrafter : public Head {
 public:
  void propose(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted) final {
    // In a device's one pass blocks are cut to the rows that a step can take; on the host all rows
    // are of use, in as many passes as they need.
    const int seqs_per_pass =
        exec.device == Device::kCuda ? wanted.num_seqs : std::max(1, most_rows() / block_rows());
    for (int first = 0; first < wanted.num_seqs; first += seqs_per_pass) {
      propose_blocks(exec, table,
                     wanted.part(first, std::min(seqs_per_pass, wanted.num_seqs - first)));
    }
  }
  DraftLogits draft_logits() final {
    return kept_logits(logits(), head_.draft_vocab_size, first_sample());
  }

 protected:
  using Head::config_;
  using Head::head_;
  using Head::keeps_logits;
  using Head::kept_logits;
  using Head::logits_bytes;
  using Head::set_last_logits;
  using Head::take;
  using Head::token_of;

  /// Rows of blocks, and how many of them draft, at most.
  struct Room {
    int num_rows = 0, num_samples = 0;
  };

  /// `first_draft_row`: the row of a block that drafts first; 0 is the last known token's.
  explicit OnePassDrafter(const RunnerConfig& config, int first_draft_row = 0)
      : Head(config),
        depth_(config.num_depths()),
        top_k_(config.integer("draft_top_k", 1, 1, kMaxTopDrafts)),
        first_draft_row_(first_draft_row) {}

  /// Proposes for sequences whose blocks fit in one pass.
  virtual void propose_blocks(const ExecContext& exec, const TableView& table,
                              const WantedDrafts& wanted) = 0;

  bool makes_trees() const { return top_k_ > 1; }
  int block_rows() const { return depth_ + first_draft_row_; }
  int most_rows() const { return std::min(limits().max_rows, limits().max_logits_rows); }
  ForwardLimits limits() const {
    ForwardLimits limits = config_.limits();
    // Logits that are kept are those of one pass.
    const int seqs = config_.max_num_seqs;
    const int least = keeps_logits() ? seqs * block_rows() : std::max(seqs, block_rows());
    limits.max_rows = std::max(limits.max_rows, least);
    limits.max_logits_rows = std::max(limits.max_logits_rows, least);
    return limits;
  }

  /// Plans memory for rows, logits and what is drafted from them: among the `num_candidates` best
  /// tokens of each depth; 0: of all tokens. Passes of other kinds have `num_more` rows more.
  void plan_blocks(int num_candidates, int num_more = 0) {
    const int seqs = config_.max_num_seqs, samples = most_rows();
    this->plan_rows(limits().max_rows + num_more, block_rows());
    block_.first_sample = take(seqs, sizeof(int32_t));
    block_.num_depths = take(seqs, sizeof(int32_t));
    for (size_t* array : {&block_.head_row, &block_.sample_row, &block_.chosen}) {
      *array = take(samples, sizeof(int32_t));
    }
    block_.logits = take(samples, logits_bytes());
    if (num_candidates == 0) {
      this->plan_draws(samples, head_.draft_vocab_size);
    } else {
      this->plan_best(samples, head_.draft_vocab_size, num_candidates);
    }
  }

  Room room_of(const ExecContext& exec, const WantedDrafts& wanted) const {
    Room room;
    if (exec.device == Device::kCuda) {
      // A whole block for one sequence, be the step as small as it may: it costs hardly more.
      room.num_rows = std::min(
          {wanted.num_seqs * block_rows(), std::max(wanted.max_rows, block_rows()), most_rows()});
      room.num_samples = room.num_rows - first_draft_row_;
      return room;
    }
    for (int i = 0; i < wanted.num_seqs; ++i) {
      const int count = std::min(wanted.num_wanted[i], depth_);
      room.num_samples += count;
      room.num_rows += count > 0 ? count + first_draft_row_ : 0;
    }
    return room;
  }
  /// Fills in the rows of the blocks (`mask_source`: see BlockRowsParams), and settles how many
  /// depths each sequence has.
  DraftRows make_rows(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted,
                      const Room& room, int mask_source) {
    const DraftRows rows = this->draft_rows(room.num_rows, wanted.num_seqs);
    ops::block_rows(exec, {.table = table,
                           .seq = wanted.seq,
                           .num_wanted = wanted.num_wanted,
                           .num_seqs = wanted.num_seqs,
                           .max_depth = depth_,
                           .first_draft_row = first_draft_row_,
                           .mask_token = head_.mask_token,
                           .mask_source = mask_source,
                           .page_size = config_.page_size,
                           .out = rows,
                           .num_samples = room.num_samples,
                           .head_row = head_row(),
                           .sample_row = ints(block_.sample_row),
                           .first_sample = first_sample(),
                           .num_drafts = num_depths(wanted)});
    set_last_logits(logits(), room.num_samples);
    return rows;
  }

  /// Draws the drafts of `samples`, or of the first `num_samples` there are.
  void draw_drafts(const ExecContext& exec, const TableView& table, const DraftRows& rows,
                   int num_samples, const int32_t* samples = nullptr) {
    this->draw(exec, table,
               {.rows = rows.batch(),
                .sample_row = ints(block_.sample_row),
                .num_samples = num_samples,
                .samples = samples,
                .logits = logits(),
                .vocab_size = head_.draft_vocab_size,
                .token_of = token_of(),
                .chosen = chosen()});
  }
  /// Hands over the chains that were chosen; `confidence` [num_samples] or null.
  void store_chains(const ExecContext& exec, const WantedDrafts& wanted,
                    const float* confidence = nullptr) {
    ops::store_blocks(exec, {.chosen = chosen(),
                             .confidence = confidence,
                             .first_sample = first_sample(),
                             .num_drafts = wanted.num_drafts,
                             .num_seqs = wanted.num_seqs,
                             .max_drafts = wanted.max_drafts,
                             .drafts = wanted.drafts,
                             .scores = wanted.scores});
  }

  /// Chains or trees from the logits of rows that know nothing of each other's drafts.
  void make_drafts(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted,
                   const DraftRows& rows, int num_samples) {
    if (makes_trees()) {
      this->find_best(exec, table, best_of(rows, num_samples, top_k_));
      grow_trees(exec, wanted, top_k_);
    } else {
      draw_drafts(exec, table, rows, num_samples);
      store_chains(exec, wanted);
    }
  }

  /// What `find_best` needs for the `count` best tokens of each depth.
  TopDraftsParams best_of(const DraftRows& rows, int num_samples, int count) {
    return {.rows = rows.batch(),
            .sample_row = ints(block_.sample_row),
            .num_samples = num_samples,
            .logits = logits(),
            .vocab_size = head_.draft_vocab_size,
            .token_of = token_of(),
            .top_k = count};
  }
  /// Grows trees from the `count` best tokens of each depth, and from what is known of each after
  /// those before it (BlockTreesParams), or null.
  void grow_trees(const ExecContext& exec, const WantedDrafts& wanted, int count,
                  const int32_t* pair_ranks = nullptr, const float* pair_scores = nullptr) {
    ops::block_trees(exec, {.tokens = this->top_tokens(),
                            .scores = this->top_scores(),
                            .pair_ranks = pair_ranks,
                            .pair_scores = pair_scores,
                            .top_k = count,
                            .num_children = top_k_,
                            .first_sample = first_sample(),
                            .num_depths = num_depths(wanted),
                            .num_wanted = wanted.num_wanted,
                            .num_seqs = wanted.num_seqs,
                            .max_drafts = wanted.max_drafts,
                            .drafts = wanted.drafts,
                            .parents = wanted.parents,
                            .path_scores = wanted.scores,
                            .num_drafts = wanted.num_drafts});
  }

  float* logits() { return this->template at<float>(block_.logits); }  // [num_samples, vocabulary]
  int32_t* head_row() { return ints(block_.head_row); }                // [num_samples]
  int32_t* chosen() { return ints(block_.chosen); }                    // [num_samples]
  int32_t* first_sample() { return ints(block_.first_sample); }        // [num_seqs]
  /// [num_seqs]: a chain has as many drafts, a tree as many levels.
  int32_t* num_depths(const WantedDrafts& wanted) {
    return makes_trees() ? ints(block_.num_depths) : wanted.num_drafts;
  }

  const int depth_, top_k_;  // top_k 1: a chain
  const int first_draft_row_;

 private:
  int32_t* ints(size_t place) { return this->template at<int32_t>(place); }

  struct Places {
    size_t head_row, sample_row, first_sample, num_depths, chosen, logits;
  };
  Places block_{};
};

}  // namespace openspec
