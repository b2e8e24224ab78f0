#pragma once

#include <span>

#include "runtime/device/device_buffers.h"
#include "runtime/device/rank_team.h"
#include "runtime/state/lease.h"
#include "runtime/state/sequence_table.h"

namespace openspec {

/// Steps under way: the entry that each has of the rings in pinned memory, and what it left there.
/// All ranks leave the same; that of the first counts.
class StepRing {
 public:
  StepRing(const RunnerConfig& config, const SequenceTable& table, const StepInputs& inputs,
           RankTeam& ranks)
      : config_(config),
        table_(table),
        inputs_(inputs),
        ranks_(ranks),
        out_(ranks.first().arrays().outcome) {}

  /// The next step's entry. Waits for the step that had it before, which was given up: any other is
  /// collected.
  int take();
  /// Waits for the step before the entry's.
  void await_before(int entry) const;
  void await(int entry) const { ranks_.await(entry); }

  /// What the host writes for the entry's step.
  const StepInputArrays& input(int entry) const { return inputs_[entry]; }

  // Of a step that has ended.
  const StepOutcome& outcome(int entry, size_t span) const {
    return out_.outcomes[place(entry, span)];
  }
  /// The tokens that a sequence got.
  std::span<const int32_t> tokens(int entry, size_t span) const;
  SpanResult result(const StepLease& lease, size_t span) const;

 private:
  /// Among the outcomes of all entries.
  size_t place(int entry, size_t span) const {
    return as_index(entry) * as_index(config_.max_num_seqs) + span;
  }
  SpanDetail detail(const SpanResult& result, size_t place) const;
  TokenLogprobs logprobs(int entry, int sample, int num_best) const;

  const RunnerConfig& config_;
  const SequenceTable& table_;
  const StepInputs& inputs_;
  RankTeam& ranks_;
  const StepOutcomeArrays& out_;
  int next_ = 0;
};

}  // namespace openspec
