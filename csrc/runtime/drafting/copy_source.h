#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/drafting/answer_memory.h"
#include "runtime/drafting/copy_lookup.h"
#include "runtime/drafting/draft_source.h"
#include "runtime/drafting/runner_config.h"
#include "runtime/state/sequence_table.h"

namespace openspec {

/// What is sought for RunnerConfig::max_copied_drafts, on either device.
CopyLookup copy_lookup_of(const RunnerConfig& config);

/// Offers copies of the sequences' own past, and of recent answers, beside a drafter.
class CopySource final : public DraftSource {
 public:
  CopySource(const RunnerConfig& config, const SequenceTable& table, const ExecContext& exec);

  DraftSourceId id() const override { return kCopiedDrafts; }
  void offer(std::span<const ProposeRequest> wanted, std::span<Draft> drafts) override;
  /// Of wanted[i] of the last offer, the length of the match; 0: there is none.
  int match_len(size_t i) const { return lookup_.match_len()[i]; }
  AnswerMemory& answers() { return answers_; }

 private:
  const int max_drafts_;
  const SequenceTable& table_;
  const ExecContext& exec_;
  CopyLookup lookup_;
  AnswerMemory answers_;
  std::vector<uint64_t> owners_;
  std::vector<int32_t> seq_, num_wanted_, drafts_, num_drafts_;
};

}  // namespace openspec
