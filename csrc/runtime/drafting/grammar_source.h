#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "runtime/drafting/draft_source.h"
#include "runtime/state/sequence_table.h"

namespace openspec {

/// Offers what the grammars of sequences leave no choice of. How often they do is learned at each
/// look (SourceEstimate::availability).
class GrammarSource final : public DraftSource {
 public:
  /// Prompt and output of a slot's sequence, as far as it is to be read.
  using KnownTokens = std::function<std::vector<int32_t>(int slot)>;
  /// States are independent, so sequences are shared among the threads.
  GrammarSource(SequenceTable& table, KnownTokens known, std::function<ThreadPool&()> threads)
      : table_(table), known_(std::move(known)), threads_(std::move(threads)) {}

  DraftSourceId id() const override { return kGrammarDrafts; }
  /// Leaves the states of the grammars after the known tokens. Sequences without one are offered
  /// nothing, nor are those whose grammar the step has no time for.
  void offer(std::span<const ProposeRequest> wanted, std::span<Draft> drafts) override;

 private:
  SequenceTable& table_;
  KnownTokens known_;
  std::function<ThreadPool&()> threads_;
};

}  // namespace openspec
