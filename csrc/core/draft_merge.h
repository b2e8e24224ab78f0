#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "core/copied_drafts.h"
#include "core/put_first.h"
#include "core/row_layout.h"

namespace openspec {

/// Who drafts, in the order in which drafts are merged: the first that has any leads. Where both
/// the text's own past and the drafter have drafts, one of them is taken.
enum DraftSourceId : uint8_t { kGrammarDrafts, kCopiedDrafts, kDrafterDrafts, kNumDraftSources };
template <typename T>
using BySource = std::array<T, kNumDraftSources>;

/// What came of one source's drafts of a sequence and step.
struct DraftCounts {
  int num_offered = 0;
  int num_drafts = 0;                 // that had rows, or that the sequence's grammar refused
  int num_accepted = 0;               // among the chosen tokens
  int num_judged = 0, num_right = 0;  // see DraftJudgement
};

/// What followed an earlier place that is like the end of the text.
struct CopiedDraft {
  std::vector<int32_t> tokens;
  int match_len = 0;  // tokens that are alike; 0: there is no such place
  CopyOpinion opinion = kNoOpinion;

  int copy_class() const { return openspec::copy_class(match_len, opinion); }
};

/// What a step tells of a copy, whether it was verified or not: the run of chosen tokens is known.
struct CopyJudgement {
  int copy_class = -1;  // -1: there is none
  int num_judged = 0, num_right = 0;
};
CopyJudgement judge_copy(const CopiedDraft& copied, std::span<const int32_t> run);

/// The drafts of a sequence, by all sources: those of the first come first, as a chain where others
/// follow.
struct MergedDraft {
  Draft draft;
  BySource<int> num_offered{};  // of `draft`
  BySource<int> num_refused{};  // of those that were added, what a grammar took out before
  CopiedDraft copied;           // taken or not

  /// Adds what a source offers, less what a grammar refused; sources come in their order. Of a
  /// source after one that has drafts, what follows these counts.
  void add(DraftSourceId source, Draft offered, int num_refused = 0);
  /// Takes out what the text's own past has to offer, which is last: it stays to be judged.
  void drop_copied();
  /// Deals counts of the whole draft out to its sources.
  BySource<DraftCounts> deal(const DraftCounts& all) const;
};

}  // namespace openspec
