#include "model/heads/dflash.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "kernels/ops.h"
#include "runtime/drafting/one_pass_drafter.h"

namespace openspec {
namespace {

constexpr int kMaxBlock = 64;
constexpr int kSuccessorsAtOnce = 256;
constexpr int kSuccessorsInAStep = 64;  // after other weights came

/// Drafts a whole block in one pass: chains, or with draft_top_k above 1 trees from the marginals
/// of its rows. With a Markov head the drafts of a chain are chosen one after another, each
/// knowing the one before, and a tree's nodes are scored by what stands before them; both among the
/// best tokens of every position, but for drafts whose whole distribution counts. A selector does
/// the same among as many candidates as it was trained with, whom noise does not choose.
/// Chains with a Markov head choose among its successors, too.
///
/// Its state per sequence: entries in the page pool for what is committed.
class DFlashDrafter final : public OnePassDrafter<HeadDrafter<DFlash>> {
 public:
  explicit DFlashDrafter(const RunnerConfig& config)
      : OnePassDrafter(config, config.the_head().anchor_drafts ? 0 : 1) {
    OPENSPEC_CHECK_ARG(head_.block_size >= 2 && head_.block_size <= kMaxBlock,
                       "block_size must be in [2, ", kMaxBlock, "], got ", head_.block_size);
    const int most = head_.block_size - first_draft_row_;
    OPENSPEC_CHECK_ARG(depth_ >= 1 && depth_ <= most, "draft_depth must be in [1, ", most,
                       "], the drafts of a block of ", head_.block_size, ", got ", depth_);
    OPENSPEC_CHECK_ARG(config.max_draft_tokens <= (makes_trees() ? kMaxBlockTreeNodes : most),
                       "a tree of ", config.max_draft_tokens, " drafts, at most ",
                       kMaxBlockTreeNodes);
    head_.validate();
    check_selector();
    declare_trees(top_k_, head_.draft_vocab_size);
    needs_.has_scores = head_.has_confidence;
    plan();
    declare_head(limits());
  }

  void prepare(const ExecContext& exec) override {
    if (!has_successors()) return;
    if (exec.device == Device::kCpu) {  // where they are needed: see BlockPathParams
      std::fill_n(at<int32_t>(at_.successors), int64_t{head_.vocab_size} * kNumSuccessors, -1);
      return;
    }
    upload_counts(exec);
    for (int token = 0; token < head_.vocab_size; token += kSuccessorsAtOnce) {
      find_successors(exec, token, kSuccessorsAtOnce);
    }
    device::synchronize(exec.stream);
  }
  bool observe(std::span<const int32_t>) override {
    return has_successors() && next_successors_ < head_.vocab_size;
  }
  void refresh(const ExecContext& exec) override {
    find_successors(exec, next_successors_, kSuccessorsInAStep);
    next_successors_ += kSuccessorsInAStep;
  }

  void learn(const ExecContext& exec, const TableView& table, const CommittedStep& step) override {
    void* features = at<void>(at_.features);
    const DraftRows rows =
        extend_rows(exec, table, step, features, head_.num_captures * head_.hidden_size);
    if (rows.num_rows > 0) model_->extend(exec, rows.batch(), features, kv_);
  }

 private:
  struct Places {
    size_t features, hidden, outputs;
    size_t step_sample, confidence;  // with a Markov head
    size_t successors, every, one, none;
    size_t pair_ranks, pair_scores;  // of trees whose nodes know the one before
    size_t factors, greedy;          // with a selector
  };

  /// Successors of the weights before are tokens to try as well: on a device they are found anew
  /// over many steps.
  void take_over(const ExecContext& exec) override {
    if (exec.device == Device::kCpu) prepare(exec);
    next_successors_ = exec.device == Device::kCpu ? head_.vocab_size : 0;
  }

  void check_selector() const {
    OPENSPEC_CHECK_ARG(head_.selector_top_k <= kMaxTopDrafts, "selector_top_k must be at most ",
                       kMaxTopDrafts, ", got ", head_.selector_top_k);
    OPENSPEC_CHECK_ARG(has_selector() == (head_.selector_top_k > 0),
                       "selector_rank and selector_top_k belong together");
    if (!has_selector()) return;
    OPENSPEC_CHECK_ARG(!keeps_logits(),
                       "acceptance by rejection needs the chances of all tokens, a selector knows "
                       "those of its candidates alone");
    OPENSPEC_CHECK_ARG(
        top_k_ <= head_.selector_top_k && head_.selector_top_k <= head_.draft_vocab_size,
        "draft_top_k ", top_k_, " of a selector's ", head_.selector_top_k, " candidates");
  }
  bool has_markov() const { return head_.markov_rank > 0; }
  bool has_selector() const { return head_.selector_rank > 0; }
  /// Whether a draft hangs on the one before.
  bool has_pairs() const { return has_markov() || has_selector(); }
  /// The best tokens of a position among which drafts are looked for; 0: all are.
  int num_candidates() const {
    if (has_selector()) return head_.selector_top_k;
    if (makes_trees()) return top_k_;
    if (!has_markov() || keeps_logits()) return 0;
    return std::min(kMaxTopDrafts, head_.draft_vocab_size);
  }
  /// Whether drafts are chosen among those that the one before makes likely, too.
  bool has_successors() const {
    return has_markov() && num_candidates() > 0 && !makes_trees() &&
           head_.draft_vocab_size >= kNumSuccessors;
  }
  void propose_blocks(const ExecContext& exec, const TableView& table,
                      const WantedDrafts& wanted) override {
    const Room room = room_of(exec, wanted);
    const DraftRows rows = make_rows(exec, table, wanted, room, /*mask_source=*/-1);
    if (room.num_samples == 0) return;
    void* outputs = at<void>(at_.outputs);
    const Sight whole = sight_of(exec, table, rows, wanted.expected_kv_len);
    const Sight sliding =
        head_window() == 0 ? whole : sliding_sight_of(exec, table, rows, wanted.expected_kv_len);
    model_->forward(exec, whole, sliding, kv_, target_.embedding, at<void>(at_.hidden));
    copy_rows(exec, head_row(), at<void>(at_.hidden), outputs, room.num_samples, head_.hidden_size);
    model_->logits(exec, target_.head, outputs, room.num_samples, logits());
    if (num_candidates() > 0) {
      // What stands before a first draft is known: any token may follow.
      if (has_markov()) add_markov(exec, table, wanted, num_depths(wanted), 0);
      find_candidates(exec, table, rows, room.num_samples);
    }
    if (has_selector()) {
      model_->weigh_pairs(exec, outputs, room.num_samples, at<void>(at_.factors));
    }
    if (makes_trees()) {
      if (has_pairs()) score_pairs(exec, table, wanted);
      grow_trees(exec, wanted, num_candidates(),
                 has_pairs() ? at<int32_t>(at_.pair_ranks) : nullptr,
                 has_pairs() ? at<float>(at_.pair_scores) : nullptr);
      return;
    }
    if (!has_pairs()) {
      draw_drafts(exec, table, rows, room.num_samples);
    } else if (num_candidates() == 0) {
      choose_one_after_another(exec, table, wanted, rows);
    } else {
      find_path(exec, table, wanted);
    }
    const bool has_scores = wanted.scores != nullptr && head_.has_confidence;
    if (has_scores) judge(exec, table, wanted);
    store_chains(exec, wanted, has_scores ? at<float>(at_.confidence) : nullptr);
  }

  /// Each draft, of all tokens, with what the Markov head adds after the one before.
  void choose_one_after_another(const ExecContext& exec, const TableView& table,
                                const WantedDrafts& wanted, const DraftRows& rows) {
    for (int depth = 0; depth < depth_; ++depth) {
      add_markov(exec, table, wanted, wanted.num_drafts, depth);
      draw_drafts(exec, table, rows, wanted.num_seqs, at<int32_t>(at_.step_sample));
    }
  }

  /// Of every token, once, on a device: what its pairs are worth with all others, and the best.
  void upload_counts(const ExecContext& exec) {
    std::vector<int32_t> every(static_cast<size_t>(successor_rows())), one(every.size(), 1);
    std::iota(every.begin(), every.end(), 0);
    const size_t bytes = every.size() * sizeof(int32_t);
    device::copy_to_device(at<int32_t>(at_.every), every.data(), bytes, exec.stream);
    device::copy_to_device(at<int32_t>(at_.one), one.data(), bytes, exec.stream);
  }
  int successor_rows() const { return std::min(most_rows(), kSuccessorsAtOnce); }

  /// Of `most` tokens from `first` on, as many as there are.
  void find_successors(const ExecContext& exec, int first, int most) {
    const TokenPairs pairs = model_->markov_pairs();
    const auto* zeros = at<int32_t>(at_.none);
    const int end = std::min(first + most, head_.vocab_size);
    for (int token = first; token < end; token += successor_rows()) {
      const int count = std::min(successor_rows(), end - token);
      device::fill_zero(logits(), static_cast<size_t>(count) * logits_bytes(), exec.stream);
      ops::block_step(exec, {.table = {},
                             .first_sample = at<int32_t>(at_.every),
                             .num_drafts = at<int32_t>(at_.one),
                             .num_seqs = count,
                             .pairs = pairs,
                             .states = row_of(pairs.first, token, pairs.rank),
                             .logits = logits(),
                             .sample = chosen()});
      find_best(exec, {},
                {.rows = {.num_rows = 1,
                          .num_spans = 1,
                          .row_position = zeros,
                          .row_span = zeros,
                          .span_seq = zeros},
                 .sample_row = zeros,
                 .num_samples = count,
                 .logits = logits(),
                 .vocab_size = head_.draft_vocab_size,
                 .token_of = token_of(),
                 .sampling = at<SamplingParams>(at_.none),
                 .ignores_filters = true,
                 .top_k = kNumSuccessors,
                 .tokens = at<int32_t>(at_.successors) + int64_t{token} * kNumSuccessors});
    }
  }

  void add_markov(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted,
                  const int32_t* num_drafts, int depth) {
    ops::block_step(exec, {.table = table,
                           .seq = wanted.seq,
                           .first_sample = first_sample(),
                           .num_drafts = num_drafts,
                           .num_seqs = wanted.num_seqs,
                           .depth = depth,
                           .chosen = chosen(),
                           .pairs = model_->markov_pairs(),
                           .logits = logits(),
                           .sample = at<int32_t>(at_.step_sample)});
  }

  void judge(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted) {
    const bool sees_token = head_.confidence_sees_token;
    ops::block_confidence(exec, {.table = table,
                                 .seq = wanted.seq,
                                 .first_sample = first_sample(),
                                 .num_drafts = wanted.num_drafts,
                                 .num_seqs = wanted.num_seqs,
                                 .chosen = chosen(),
                                 .outputs = at<void>(at_.outputs),
                                 .states = sees_token ? model_->markov_pairs().first : nullptr,
                                 .weight = model_->tensors().confidence_weight,
                                 .bias = model_->tensors().confidence_bias,
                                 .width = head_.hidden_size,
                                 .state_width = sees_token ? head_.markov_rank : 0,
                                 .dtype = config_.dtype,
                                 .confidence = at<float>(at_.confidence)});
  }

  void find_candidates(const ExecContext& exec, const TableView& table, const DraftRows& rows,
                       int num_samples) {
    TopDraftsParams params = best_of(rows, num_samples, num_candidates());
    if (has_selector()) params.sampling = at<SamplingParams>(at_.greedy);
    params.ignores_filters = has_pairs();
    find_best(exec, table, params);
  }

  TokenPairs pairs() const {
    return has_selector() ? model_->selector_pairs() : model_->markov_pairs();
  }
  PairTerms pair_terms(const TableView& table) {
    if (!has_selector()) return {};
    return {at<void>(at_.factors), config_.dtype, table};
  }

  /// Each draft, of the candidates, with what is added after the one before.
  void find_path(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted) {
    ops::block_path(exec, {.seq = wanted.seq,
                           .first_sample = first_sample(),
                           .num_drafts = wanted.num_drafts,
                           .num_seqs = wanted.num_seqs,
                           .top_k = num_candidates(),
                           .tokens = top_tokens(),
                           .scores = top_scores(),
                           .sampling = sampling(table),
                           .pairs = pairs(),
                           .terms = pair_terms(table),
                           .successors = has_successors() ? at<int32_t>(at_.successors) : nullptr,
                           .logits = logits(),
                           .table = table,
                           .chosen = chosen()});
  }

  /// What the candidates of each depth are worth after each of those before them.
  void score_pairs(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted) {
    ops::block_pairs(exec, {.seq = wanted.seq,
                            .first_sample = first_sample(),
                            .num_depths = num_depths(wanted),
                            .num_seqs = wanted.num_seqs,
                            .max_depth = depth_,
                            .top_k = num_candidates(),
                            .tokens = top_tokens(),
                            .scores = top_scores(),
                            .sampling = sampling(table),
                            .pairs = pairs(),
                            .terms = pair_terms(table),
                            .pair_ranks = at<int32_t>(at_.pair_ranks),
                            .pair_scores = at<float>(at_.pair_scores)});
  }

  void plan() {
    const int seqs = config_.max_num_seqs, samples = most_rows();
    plan_blocks(num_candidates());
    const size_t width = static_cast<size_t>(head_.hidden_size) * dtype_bytes(config_.dtype);
    at_.features = take(limits().max_rows, static_cast<size_t>(head_.num_captures) * width);
    at_.hidden = take(samples, width);
    at_.outputs = take(samples, width);
    if (has_successors()) {
      const int most =
          std::max(samples, static_cast<int>(sizeof(SamplingParams) / sizeof(int32_t)));
      at_.successors = take(head_.vocab_size, kNumSuccessors * sizeof(int32_t));
      for (size_t* array : {&at_.every, &at_.one, &at_.none}) {
        *array = take(most, sizeof(int32_t));
      }
    }
    if (has_markov()) {
      at_.step_sample = take(seqs, sizeof(int32_t));
      at_.confidence = take(samples, sizeof(float));
    }
    if (has_selector()) {
      at_.factors =
          take(samples, static_cast<size_t>(head_.selector_rank) * dtype_bytes(config_.dtype));
      at_.greedy = take(seqs, sizeof(SamplingParams));  // stays zero
    }
    if (makes_trees() && has_pairs()) {
      const int num_pairs = samples * num_candidates() * num_candidates();
      at_.pair_ranks = take(num_pairs, sizeof(int32_t));
      at_.pair_scores = take(num_pairs, sizeof(float));
    }
  }

  Places at_{};
  int next_successors_ = head_.vocab_size;  // of the first token whose are to be found anew
};

const DrafterRegistration kRegistrations[] = {{"dflash", make_drafter_of<DFlashDrafter>},
                                              {"dspark", make_drafter_of<DFlashDrafter>}};

}  // namespace
}  // namespace openspec
