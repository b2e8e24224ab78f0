#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "core/draft_merge.h"
#include "core/page_pool.h"
#include "core/row_layout.h"
#include "grammar/grammar_work.h"
#include "kernels/common/exec.h"
#include "kernels/common/expert_counts.h"

namespace openspec {

/// Times of steps.
using Clock = std::chrono::steady_clock;
inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// What the scheduler asks of a step for one sequence.
struct SpanRequest {
  int slot = 0;
  int num_new_tokens = 0;  // known tokens without KV to compute: 1 in decode
  int max_drafts = 0;
};

/// A step to be timed: so many sequences, each with its share of the rows.
struct StepKind {
  int num_seqs = 1, num_rows = 1;
  bool proposes = false;  // with a costly drafter at work for all of them
  bool operator==(const StepKind&) const = default;
};

/// Tokens of made-up sequences, each another one: equal rows would all go to the same experts.
constexpr int32_t made_up_token(int number, int vocab_size) {
  return static_cast<int32_t>(int64_t{number} * 7919 % vocab_size);
}

/// What a step of one kind took, and to how many experts of a layer its rows went.
struct TimedStep {
  StepKind kind;
  double seconds = 0.0;
  double num_experts = 0.0;
};

/// Log-probabilities of one token: entry 0 is the token itself, then the best in falling order.
struct TokenLogprobs {
  std::vector<int32_t> token_ids;
  std::vector<float> logprobs;
  int rank = 0;  // 1: the most likely
};

enum class FinishReason : uint8_t { kRunning, kStop, kLength };

/// What a step did for a sequence, and what it took.
struct SpanDetail {
  Draft draft;                    // what had rows
  std::vector<int32_t> accepted;  // of these, the drafts among the chosen tokens, in order
  // Of the whole step:
  int num_rows = 0, num_seqs = 0;
  double seconds = 0.0;  // since the step before it was collected, or since its launch
  double device_seconds = 0.0;
  std::optional<double> draft_seconds;  // of these, for proposing; none: not known
  // Of each rank on a device of its own, that it waited for others; of device_seconds.
  std::vector<double> wait_seconds;
};

/// What one sequence gets from a step. One that reaches its last known token gets tokens, unless
/// its grammar's mask was not there: then it sits the step out, and computes that token again.
struct SpanResult {
  int slot = 0;
  std::vector<int32_t> token_ids;  // chosen, cut after the first stop id or at the budget
  FinishReason finish = FinishReason::kRunning;
  int num_computed = 0;  // tokens whose KV becomes committed
  int num_draft_tokens = 0;
  int num_accepted_tokens = 0;          // drafts among token_ids
  BySource<DraftCounts> by_source{};    // of these, and what the step tells about the sources
  CopyJudgement copied;                 // of a copy on offer, verified or not
  std::vector<TokenLogprobs> logprobs;  // of token_ids, if asked for
  std::vector<TokenLogprobs>
      prompt_logprobs;               // of the prompt tokens after the chunk's rows, if asked for
  std::optional<SpanDetail> detail;  // of a step that chose tokens, if asked for
  bool is_held = false;    // the next mask is made beside the steps; see GrammarPlace::is_away
  GrammarFailure failure;  // the sequence cannot go on

  void count_drafts(const BySource<DraftCounts>& counts) {
    by_source = counts;
    for (const DraftCounts& source : counts) {
      num_draft_tokens += source.num_drafts;
      num_accepted_tokens += source.num_accepted;
    }
  }
};

/// One optimistic transaction: pages for the worst case, the rows, and what came of them. Nothing
/// outside the lease changes before commit; a lease that ends without one gives its pages back.
struct StepLease {
  StepLease() = default;
  StepLease(const StepLease&) = delete;
  StepLease& operator=(const StepLease&) = delete;
  ~StepLease() { close(); }

  std::vector<SpanRequest> requests;
  std::vector<uint64_t> serials;  // by span: which occupant of the slot is meant
  std::vector<bool> is_sampled;   // by span: whether it reaches the last known token
  std::vector<PageLease> pages;   // by span
  // By span: pages for a base to fold into (SlotBases), or none; once the step is laid out, how
  // many blocks its base holds then. A made-up step has neither.
  std::vector<PageLease> bases;
  std::vector<int> num_folded;
  // By span: the position of its first row; of a decode step after another one, at least.
  std::vector<int> first_position;
  int place = 0;  // among the steps under way, see Sequences::begin
  std::vector<SpanResult> results;
  std::vector<GrammarFailure> failures;  // by span; empty: there are none
  bool has_proposed = false;             // the drafter was asked, whatever it offered
  // By span, before the row budget: what sources on the host offer.
  std::vector<MergedDraft> offers;

  // The host's own step.
  std::vector<Span> spans;
  RowLayout layout;
  std::vector<int32_t> chosen;              // [num_samples]
  std::vector<int32_t> logprob_ids, ranks;  // [num_samples, 1 + kMaxLogprobs], [num_samples]
  std::vector<float> logprobs;              // [num_samples, 1 + kMaxLogprobs]
  std::vector<int32_t> committed_row;       // [layout.num_rows()], see ExtendRowsParams

  /// What the row budget expects of the step; no seconds: nothing was measured.
  struct Plan {
    bool proposes = false;  // with a costly drafter at work
    bool samples = false;   // most of its sequences
    int num_drafts = 0;
    double tokens = 0.0, seconds = 0.0;
  };
  Plan plan;

  int num_rows = 0;            // laid out, at most
  double seconds = 0.0;        // that the device worked on it
  double draft_seconds = 0.0;  // of these, for proposing; the host's own step
  ExpertCounts experts;        // that it went to
  // Of each rank on a device of its own.
  std::vector<ExchangeCounts> exchange;
  Clock::time_point launched_at;
  // Steps up to this one, each with a row of a sequence at most, from whose rows the drafter has
  // yet to learn.
  int num_waiting = 0;
  int ring_index = 0;  // a device step's place in its rings

  enum class State : uint8_t { kReserved, kLaunched, kClosed };
  State state = State::kReserved;

  /// Told when a lease ends without a commit, newest lease first.
  std::function<void(StepLease&)> on_abandon;

  void close() {
    if (state != State::kClosed && on_abandon) on_abandon(*this);
    pages.clear();
    bases.clear();
    state = State::kClosed;
  }
};

}  // namespace openspec
