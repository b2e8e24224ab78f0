#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace openspec {

/// Draft tokens of one sequence. `parents[i]` is the draft that draft i follows, -1 the last known
/// token; a parent comes before its children. A chain has parents -1, 0, 1, ...
struct Draft {
  std::vector<int32_t> tokens;
  std::vector<int32_t> parents;
  // By draft, the drafter's logarithm of the probability that it and all before it are accepted,
  // never rising; empty: it has none.
  std::vector<float> scores;

  int size() const { return static_cast<int>(tokens.size()); }
  /// Appends `token` after the last draft.
  void append(int32_t token) {
    parents.push_back(size() - 1);
    tokens.push_back(token);
  }
  /// Appends the drafts [first, first + count) of arrays. Without `parent_of` they are a chain;
  /// without `score_of` they have no scores.
  void append(const int32_t* token_of, const int32_t* parent_of, const float* score_of,
              size_t first, int count);
  /// Keeps the first `count` drafts.
  void truncate(int count) {
    tokens.resize(static_cast<size_t>(count));
    parents.resize(static_cast<size_t>(count));
    if (!scores.empty()) scores.resize(static_cast<size_t>(count));
  }
};

/// One sequence's share of a step.
struct Span {
  int slot = 0;
  int num_new_tokens = 0;  // known tokens without KV that this step computes
  int kv_len = 0;          // tokens whose KV is committed
  int num_tokens = 0;      // known tokens
  Draft draft;

  /// Whether the span reaches the last known token, so that a next token is chosen.
  bool is_sampled() const { return kv_len + num_new_tokens == num_tokens; }
  int num_rows() const { return num_new_tokens + draft.size(); }
};

/// The rows of a step, laid out span after span: known tokens, then drafts. See
/// kernels/common/rows.h for the meaning of the arrays.
struct RowLayout {
  std::vector<int32_t> token, position, span, parent;
  std::vector<int64_t> kv_slot;
  std::vector<int32_t> span_begin, span_kv_len, span_seq;
  // Rows whose logits are wanted, span by span: the last known token and the drafts of sampled
  // spans, and rows that score prompt tokens.
  std::vector<int32_t> sample_row;
  std::vector<int32_t> score_token;   // the prompt token that follows, or -1: choose
  std::vector<int32_t> sample_begin;  // [num_spans + 1] first entry of each span in sample_row
  std::vector<int32_t> first_choice;  // [num_spans] entry of the last known token; -1: none

  int num_rows() const { return static_cast<int>(token.size()); }
  void clear();
  /// Appends a span. `tokens` is the sequence's history, `pages` its page table row. Rows from
  /// `score_from` on (position) up to `prompt_len - 1` score the prompt token that follows them.
  void append(const Span& span, std::span<const int32_t> tokens, std::span<const int32_t> pages,
              int page_size, int score_from, int prompt_len);
};

/// The accepted run of one span: walks from the last known token to the child that equals the
/// token chosen there, as long as there is one.
///
/// `chosen[0]` belongs to the last known token and `chosen[1 + i]` to draft i; -1: nothing was
/// chosen there. Returns the accepted drafts (indices, in order); the token chosen at the last of
/// them, if any was, ends the run.
std::vector<int32_t> accept_drafts(const Draft& draft, std::span<const int32_t> chosen);

/// The drafts (indices, in order) that a run of chosen tokens went along, as far as it did: among
/// siblings that are equal the first.
std::vector<int32_t> drafts_of_run(const Draft& draft, std::span<const int32_t> tokens);

/// What the choices say of the drafts on offer, of which the first `num_granted` had rows: at how
/// many depths, from the first on, a draft can be compared with the choice, and at how many of
/// these one of the siblings is right. One depth more than had rows can be judged, for the choice
/// is known where the last of them ends. Where nothing was chosen, nothing is judged.
struct DraftJudgement {
  int num_judged = 0, num_right = 0;
};
DraftJudgement judge_drafts(const Draft& offered, int num_granted, std::span<const int32_t> chosen);

}  // namespace openspec
