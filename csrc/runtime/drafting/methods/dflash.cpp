#include "model/heads/dflash.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "kernels/ops.h"
#include "runtime/drafting/network_drafter.h"

namespace openspec {
namespace {

constexpr int kMaxBlock = 64;
constexpr int kSuccessorsAtOnce = 256;

MarkovKind markov_kind_of(const std::string& name) {
  if (name == "gated") return MarkovKind::kGated;
  if (name == "rnn") return MarkovKind::kRecurrent;
  OPENSPEC_CHECK_ARG(name == "vanilla", "markov_head ", name, " is not known");
  return MarkovKind::kPlain;
}

/// Drafts a whole block in one pass: chains, or with draft_top_k above 1 trees from the marginals
/// of its rows. With a Markov head the drafts of a chain are chosen one after another, each
/// knowing the one before, and a tree's nodes are scored by what stands before them; both among the
/// best tokens of every position, but for drafts whose whole distribution counts. A selector does
/// the same among as many candidates as it was trained with, whom noise does not choose.
/// Chains with a Markov head choose among its successors, too.
///
/// Its state per sequence: entries in the page pool for what is committed. A block's own entries,
/// from the last known token's on, are no more than its drafts will take and are overwritten.
class DFlashDrafter final : public HeadDrafter<DFlash> {
 public:
  explicit DFlashDrafter(const DrafterConfig& config)
      : HeadDrafter(config),
        depth_(config.draft_depth),
        top_k_(config.integer("draft_top_k", 1, 1, kMaxTopDrafts)),
        first_draft_row_(config.flag("anchor_drafts", false) ? 0 : 1) {
    const int block_size = config.integer("block_size", 0, 2, kMaxBlock);
    const int most = block_size - first_draft_row_;
    OPENSPEC_CHECK_ARG(depth_ >= 1 && depth_ <= most, "draft_depth must be in [1, ", most,
                       "], the drafts of a block of ", block_size, ", got ", depth_);
    OPENSPEC_CHECK_ARG(config.max_draft_tokens <= (makes_trees() ? kMaxBlockTreeNodes : most),
                       "a tree of ", config.max_draft_tokens, " drafts, at most ",
                       kMaxBlockTreeNodes);
    mask_token_ = config.integer("mask_token", -1, 0, config.target.vocab_size - 1);
    head_ = {draft_model_config()};
    head_.num_layers = config.integer("num_layers", 0, 1, 64);
    head_.is_causal = config.flag("is_causal", false);
    head_.sliding_is_causal = config.flag("sliding_is_causal", false);
    head_.window_follows_rows = config.flag("window_follows_rows", false);
    for (const char kind : config.text("layer_sights", "")) {
      head_.slides.push_back(kind == 's');  // else f: it sees the full context
    }
    head_.has_head = config.flag("has_head", false);
    head_.markov_rank = config.integer("markov_rank", 0, 0, 1 << 24);
    head_.markov_kind = markov_kind_of(config.text("markov_head", "vanilla"));
    head_.conv_group = config.integer("conv_group", 0, 0, 1 << 24);
    head_.selector_rank = config.integer("selector_rank", 0, 0, 1 << 24);
    selector_top_k_ = config.integer("selector_top_k", 0, 0, kMaxTopDrafts);
    head_.has_confidence = config.flag("has_confidence", false);
    head_.confidence_sees_token = config.flag("confidence_sees_token", false);
    head_.validate();
    OPENSPEC_CHECK_ARG(!weighs_states() || !makes_trees(),
                       "trees need pairs of tokens, and this Markov head knows more than pairs");
    check_selector();
    declare_trees(top_k_, head_);
    needs_.has_scores = head_.has_confidence;
    plan();
    declare_head(head_.num_layers, limits());
  }

  DraftLogits draft_logits() override {
    return kept_logits(at<float>(at_.logits), head_.draft_vocab_size,
                       at<int32_t>(at_.first_sample));
  }

  void propose(const ExecContext& exec, const TableView& table,
               const WantedDrafts& wanted) override {
    // In a device's one pass blocks are cut to the rows that a step can take; on the host all rows
    // are of use, in as many passes as they need.
    const int seqs_per_pass =
        exec.device == Device::kCuda ? wanted.num_seqs : std::max(1, most_rows() / block_rows());
    for (int first = 0; first < wanted.num_seqs; first += seqs_per_pass) {
      propose_blocks(exec, table,
                     wanted.part(first, std::min(seqs_per_pass, wanted.num_seqs - first)));
    }
  }

  void prepare(const ExecContext& exec) override {
    if (!has_successors()) return;
    if (exec.device == Device::kCpu) {  // where they are needed: see BlockPathParams
      std::fill_n(at<int32_t>(at_.successors), int64_t{head_.vocab_size} * kNumSuccessors, -1);
      return;
    }
    find_successors(exec);
  }

  void learn(const ExecContext& exec, const TableView& table, const CommittedStep& step) override {
    void* features = at<void>(at_.features);
    const DraftRows rows =
        extend_rows(exec, table, step, features, head_.num_captures * head_.hidden_size);
    if (rows.num_rows > 0) model_->extend(exec, rows.batch(), features, kv_);
  }

 private:
  struct Places {
    size_t head_row, sample_row, first_sample, num_depths, chosen, features, hidden, outputs,
        logits;
    size_t step_sample, confidence;  // with a Markov head
    size_t successors, every, one, none;
    size_t states, memory;           // of a Markov head that knows more than pairs
    size_t pair_ranks, pair_scores;  // of trees whose nodes know the one before
    size_t factors, greedy;          // with a selector
  };
  /// Rows of blocks and those that tell drafts, at most.
  struct Room {
    int num_rows = 0, num_samples = 0;
  };

  void check_selector() const {
    OPENSPEC_CHECK_ARG(has_selector() == (selector_top_k_ > 0),
                       "selector_rank and selector_top_k belong together");
    if (!has_selector()) return;
    OPENSPEC_CHECK_ARG(!keeps_logits(),
                       "acceptance by rejection needs the chances of all tokens, a selector knows "
                       "those of its candidates alone");
    OPENSPEC_CHECK_ARG(top_k_ <= selector_top_k_ && selector_top_k_ <= head_.draft_vocab_size,
                       "draft_top_k ", top_k_, " of a selector's ", selector_top_k_, " candidates");
  }
  bool makes_trees() const { return top_k_ > 1; }
  bool has_markov() const { return head_.markov_rank > 0; }
  /// Whether a bias depends on more than the token before.
  bool weighs_states() const { return head_.markov_kind != MarkovKind::kPlain; }
  bool has_selector() const { return head_.selector_rank > 0; }
  /// Whether a draft hangs on the one before.
  bool has_pairs() const { return has_markov() || has_selector(); }
  /// The best tokens of a position among which drafts are looked for; 0: all are.
  int num_candidates() const {
    if (has_selector()) return selector_top_k_;
    if (makes_trees()) return top_k_;
    if (!has_markov() || keeps_logits() || weighs_states()) return 0;
    return std::min(kMaxTopDrafts, head_.draft_vocab_size);
  }
  /// Whether drafts are chosen among those that the one before makes likely, too.
  bool has_successors() const {
    return has_markov() && num_candidates() > 0 && !makes_trees() &&
           head_.draft_vocab_size >= kNumSuccessors;
  }
  int block_rows() const { return depth_ + first_draft_row_; }
  int most_rows() const { return std::min(limits().max_rows, limits().max_logits_rows); }
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

  void propose_blocks(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted) {
    const Room room = room_of(exec, wanted);
    const DraftRows rows = draft_rows(room.num_rows, wanted.num_seqs);
    // How many drafts a chain has is settled here, a tree has as many levels.
    int32_t* num_depths = makes_trees() ? at<int32_t>(at_.num_depths) : wanted.num_drafts;
    ops::block_rows(exec, {.table = table,
                           .seq = wanted.seq,
                           .num_wanted = wanted.num_wanted,
                           .num_seqs = wanted.num_seqs,
                           .max_depth = depth_,
                           .first_draft_row = first_draft_row_,
                           .mask_token = mask_token_,
                           .page_size = config_.page_size,
                           .out = rows,
                           .num_samples = room.num_samples,
                           .head_row = at<int32_t>(at_.head_row),
                           .sample_row = at<int32_t>(at_.sample_row),
                           .first_sample = at<int32_t>(at_.first_sample),
                           .num_drafts = num_depths});
    set_last_logits(at<float>(at_.logits), room.num_samples);
    if (room.num_samples == 0) return;
    void* outputs = at<void>(at_.outputs);
    const Sight whole = sight_of(exec, table, rows, wanted.expected_kv_len);
    const Sight sliding =
        head_.slides.empty() ? whole : sliding_sight_of(exec, table, rows, wanted.expected_kv_len);
    model_->forward(exec, whole, sliding, kv_, target_->embedding, at<void>(at_.hidden));
    copy_rows(exec, at<int32_t>(at_.head_row), at<void>(at_.hidden), outputs, room.num_samples,
              head_.hidden_size);
    model_->logits(exec, target_->head, outputs, room.num_samples, at<float>(at_.logits));
    if (num_candidates() > 0) {
      // What stands before a first draft is known: any token may follow.
      if (has_markov()) add_markov(exec, table, wanted, num_depths, 0);
      find_candidates(exec, table, rows, room);
    }
    if (has_selector()) {
      model_->weigh_pairs(exec, outputs, room.num_samples, at<void>(at_.factors));
    }
    if (makes_trees()) {
      grow_trees(exec, table, wanted);
      return;
    }
    if (!has_pairs()) {
      choose(exec, table, rows, nullptr, room.num_samples);
    } else if (num_candidates() == 0) {
      choose_one_after_another(exec, table, wanted, rows);
    } else {
      find_path(exec, table, wanted);
    }
    const bool has_scores = wanted.scores != nullptr && head_.has_confidence;
    if (has_scores) judge(exec, table, wanted);
    ops::store_blocks(exec, {.chosen = at<int32_t>(at_.chosen),
                             .confidence = has_scores ? at<float>(at_.confidence) : nullptr,
                             .first_sample = at<int32_t>(at_.first_sample),
                             .num_drafts = wanted.num_drafts,
                             .num_seqs = wanted.num_seqs,
                             .max_drafts = wanted.max_drafts,
                             .drafts = wanted.drafts,
                             .scores = wanted.scores});
  }

  /// Draws the drafts of `samples`, or of the first `num_samples` there are.
  void choose(const ExecContext& exec, const TableView& table, const DraftRows& rows,
              const int32_t* samples, int num_samples) {
    draw(exec, table,
         {.rows = rows.batch(),
          .sample_row = at<int32_t>(at_.sample_row),
          .num_samples = num_samples,
          .samples = samples,
          .logits = at<float>(at_.logits),
          .vocab_size = head_.draft_vocab_size,
          .token_of = token_of(),
          .chosen = at<int32_t>(at_.chosen)});
  }

  /// Each draft, of all tokens, with what the Markov head adds behind the one before.
  void choose_one_after_another(const ExecContext& exec, const TableView& table,
                                const WantedDrafts& wanted, const DraftRows& rows) {
    for (int depth = 0; depth < depth_; ++depth) {
      add_markov(exec, table, wanted, wanted.num_drafts, depth);
      choose(exec, table, rows, at<int32_t>(at_.step_sample), wanted.num_seqs);
    }
  }

  /// Of every token, once, on a device: what its pairs are worth with all others, and the best.
  void find_successors(const ExecContext& exec) {
    const TokenPairs pairs = model_->markov_pairs();
    const int room = std::min(most_rows(), kSuccessorsAtOnce);
    std::vector<int32_t> every(static_cast<size_t>(room)), one(every.size(), 1);
    std::iota(every.begin(), every.end(), 0);
    const size_t bytes = every.size() * sizeof(int32_t);
    device::copy_to_device(at<int32_t>(at_.every), every.data(), bytes, exec.stream);
    device::copy_to_device(at<int32_t>(at_.one), one.data(), bytes, exec.stream);
    const auto* zeros = at<int32_t>(at_.none);
    for (int token = 0; token < head_.vocab_size; token += room) {
      const int count = std::min(room, head_.vocab_size - token);
      float* logits = at<float>(at_.logits);
      device::fill_zero(logits, static_cast<size_t>(count) * logits_bytes(), exec.stream);
      ops::block_step(exec, {.table = {},
                             .first_sample = at<int32_t>(at_.every),
                             .num_drafts = at<int32_t>(at_.one),
                             .num_seqs = count,
                             .pairs = pairs,
                             .states = row_of(pairs.first, token, pairs.rank),
                             .dtype = DType::kBF16,
                             .logits = logits,
                             .sample = at<int32_t>(at_.chosen)});
      find_best(exec, {},
                {.rows = {.num_rows = 1,
                          .num_spans = 1,
                          .row_position = zeros,
                          .row_span = zeros,
                          .span_seq = zeros},
                 .sample_row = zeros,
                 .num_samples = count,
                 .logits = logits,
                 .vocab_size = head_.draft_vocab_size,
                 .token_of = token_of(),
                 .sampling = at<SamplingParams>(at_.none),
                 .ignores_filters = true,
                 .top_k = kNumSuccessors,
                 .tokens = at<int32_t>(at_.successors) + int64_t{token} * kNumSuccessors});
    }
    device::synchronize(exec.stream);
  }

  void add_markov(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted,
                  const int32_t* num_drafts, int depth) {
    if (weighs_states()) {
      ops::pair_states(exec, {.table = table,
                              .seq = wanted.seq,
                              .first_sample = at<int32_t>(at_.first_sample),
                              .num_drafts = num_drafts,
                              .num_seqs = wanted.num_seqs,
                              .depth = depth,
                              .chosen = at<int32_t>(at_.chosen),
                              .pairs = model_->markov_pairs(),
                              .outputs = at<void>(at_.outputs),
                              .width = head_.hidden_size,
                              .is_recurrent = head_.markov_kind == MarkovKind::kRecurrent,
                              .weight = model_->tensors().markov_weight,
                              .bias = model_->tensors().markov_bias,
                              .memory = at<float>(at_.memory),
                              .dtype = config_.dtype,
                              .states = at<void>(at_.states)});
    }
    ops::block_step(exec, {.table = table,
                           .seq = wanted.seq,
                           .first_sample = at<int32_t>(at_.first_sample),
                           .num_drafts = num_drafts,
                           .num_seqs = wanted.num_seqs,
                           .depth = depth,
                           .chosen = at<int32_t>(at_.chosen),
                           .pairs = model_->markov_pairs(),
                           .states = weighs_states() ? at<void>(at_.states) : nullptr,
                           .dtype = config_.dtype,
                           .logits = at<float>(at_.logits),
                           .sample = at<int32_t>(at_.step_sample)});
  }

  void judge(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted) {
    const bool sees_token = head_.confidence_sees_token;
    ops::block_confidence(exec, {.table = table,
                                 .seq = wanted.seq,
                                 .first_sample = at<int32_t>(at_.first_sample),
                                 .num_drafts = wanted.num_drafts,
                                 .num_seqs = wanted.num_seqs,
                                 .chosen = at<int32_t>(at_.chosen),
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
                       const Room& room) {
    find_best(exec, table,
              {.rows = rows.batch(),
               .sample_row = at<int32_t>(at_.sample_row),
               .num_samples = room.num_samples,
               .logits = at<float>(at_.logits),
               .vocab_size = head_.draft_vocab_size,
               .token_of = token_of(),
               .sampling = has_selector() ? at<SamplingParams>(at_.greedy) : nullptr,
               .ignores_filters = has_pairs(),
               .top_k = num_candidates()});
  }

  TokenPairs pairs() const {
    return has_selector() ? model_->selector_pairs() : model_->markov_pairs();
  }
  PairTerms pair_terms(const TableView& table) {
    if (!has_selector()) return {};
    return {at<void>(at_.factors), config_.dtype, table};
  }

  /// Each draft, of the candidates, with what is added behind the one before.
  void find_path(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted) {
    ops::block_path(exec, {.seq = wanted.seq,
                           .first_sample = at<int32_t>(at_.first_sample),
                           .num_drafts = wanted.num_drafts,
                           .num_seqs = wanted.num_seqs,
                           .top_k = num_candidates(),
                           .tokens = top_tokens(),
                           .scores = top_scores(),
                           .sampling = sampling(table),
                           .pairs = pairs(),
                           .terms = pair_terms(table),
                           .successors = has_successors() ? at<int32_t>(at_.successors) : nullptr,
                           .logits = at<float>(at_.logits),
                           .table = table,
                           .chosen = at<int32_t>(at_.chosen)});
  }

  void grow_trees(const ExecContext& exec, const TableView& table, const WantedDrafts& wanted) {
    if (has_pairs()) {
      ops::block_pairs(exec, {.seq = wanted.seq,
                              .first_sample = at<int32_t>(at_.first_sample),
                              .num_depths = at<int32_t>(at_.num_depths),
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
    ops::block_trees(exec, {.tokens = top_tokens(),
                            .scores = top_scores(),
                            .pair_ranks = has_pairs() ? at<int32_t>(at_.pair_ranks) : nullptr,
                            .pair_scores = has_pairs() ? at<float>(at_.pair_scores) : nullptr,
                            .top_k = num_candidates(),
                            .num_children = top_k_,
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
    const int least = keeps_logits() ? seqs * block_rows() : std::max(seqs, block_rows());
    limits.max_rows = std::max(limits.max_rows, least);
    limits.max_logits_rows = std::max(limits.max_logits_rows, least);
    return limits;
  }

  void plan() {
    const int seqs = config_.max_num_seqs, samples = most_rows();
    const int vocab_size = head_.draft_vocab_size;
    plan_rows(limits().max_rows, block_rows());
    at_.first_sample = take(seqs, sizeof(int32_t));
    at_.num_depths = take(seqs, sizeof(int32_t));
    for (size_t* array : {&at_.head_row, &at_.sample_row, &at_.chosen}) {
      *array = take(samples, sizeof(int32_t));
    }
    const size_t width = static_cast<size_t>(head_.hidden_size) * dtype_bytes(config_.dtype);
    at_.features = take(limits().max_rows, static_cast<size_t>(head_.num_captures) * width);
    at_.hidden = take(samples, width);
    at_.outputs = take(samples, width);
    at_.logits = take(samples, logits_bytes());
    if (num_candidates() == 0) {
      plan_draws(samples, vocab_size);
    } else {
      plan_best(samples, vocab_size, num_candidates());
    }
    if (has_successors()) {
      const int most =
          std::max(samples, static_cast<int>(sizeof(SamplingParams) / sizeof(int32_t)));
      at_.successors = take(head_.vocab_size, kNumSuccessors * sizeof(int32_t));
      for (size_t* array : {&at_.every, &at_.one, &at_.none}) {
        *array = take(most, sizeof(int32_t));
      }
    }
    if (weighs_states()) {
      const auto rank = static_cast<size_t>(head_.markov_rank);
      at_.states = take(seqs, rank * dtype_bytes(config_.dtype));
      at_.memory = take(2 * seqs, rank * sizeof(float));
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

  int depth_, top_k_;  // top_k 1: a chain
  int selector_top_k_ = 0;
  int first_draft_row_;  // 0: the last known token's row tells a draft as well
  int mask_token_ = 0;
  Places at_{};
};

std::unique_ptr<Drafter> make(const DrafterConfig& config) {
  return std::make_unique<DFlashDrafter>(config);
}

const DrafterRegistration kRegistrations[] = {{"dflash", make}, {"dspark", make}};

}  // namespace
}  // namespace openspec
