#pragma once

#include <array>
#include <cstdint>

#include "core/put_first.h"
#include "core/row_layout.h"

namespace openspec {

/// Who drafts, in the order in which drafts are merged: the first that has any leads.
enum DraftSourceId : uint8_t { kGrammarDrafts, kDrafterDrafts, kNumDraftSources };
template <typename T>
using BySource = std::array<T, kNumDraftSources>;

/// What came of one source's drafts of a sequence and step.
struct DraftCounts {
  int num_offered = 0;
  int num_drafts = 0;                 // that had rows, or that the sequence's grammar refused
  int num_accepted = 0;               // among the chosen tokens
  int num_judged = 0, num_right = 0;  // see DraftJudgement
};

/// The drafts of a sequence, by all sources: those of the first come first, as a chain where others
/// follow.
struct MergedDraft {
  Draft draft;
  BySource<int> num_offered{};  // of `draft`
  BySource<int> num_refused{};  // that a grammar took out before

  /// Adds what a source offers; sources come in their order. Of a source after one that has drafts,
  /// what follows these counts.
  void add(DraftSourceId source, Draft offered);
  /// Deals counts of the whole draft out to its sources.
  BySource<DraftCounts> deal(const DraftCounts& all) const;
};

}  // namespace openspec
