#pragma once

#include <memory>
#include <vector>

#include "core/thread_pool.h"
#include "runtime/device/rank_team.h"
#include "runtime/device/ring.h"
#include "runtime/drafting/grammar_source.h"
#include "runtime/drafting/row_masks.h"

namespace openspec {

/// Steps with a grammar in them, in three launches: drafts and rows; the forward pass, while the
/// host fills the masks of the rows; and the choices. Also what grammars offer before. The masks
/// are those of all ranks, whose rows are the first one's.
///
/// The host is a step ahead, but once the rows are laid out, what came of the step before is in its
/// ring, for the device works in order. So each state follows its sequence's tokens before they are
/// collected, and whatever becomes of a step, the next one brings the states back to what counts.
class MaskedSteps {
 public:
  MaskedSteps(const StepContext& context, const StepRing& ring, RankTeam& ranks);

  static bool has_masks(const StepLease& lease, const SequenceTable& table);
  /// Fills lease.offers: what the grammars leave no choice of, where it pays to wait for the step
  /// before.
  void offer(StepLease& lease);
  /// The lease's step as it was decided.
  void start(const StepLease& lease, const StepOrder& order);

  void note_launched(const StepLease& lease);
  void note_collected(const StepLease& lease);
  /// All that was launched is given up.
  void forget_launched() { launched_.clear(); }

 private:
  struct LaunchedSpan {
    int entry = 0;
    size_t span = 0;
    int slot = 0;
    uint64_t serial = 0;
  };
  /// Started at the first use.
  ThreadPool& threads();
  /// The committed ones, and those of steps that are not collected yet included.
  std::vector<int32_t> known_tokens(int slot) const;
  void lay_out(RankStep& rank, const StepLease& lease, const StepOrder& order);
  /// Takes memory for what is downloaded of the shape's rows.
  void prepare_rows(const StepShape& shape);
  void download_rows(RankStep& rank);
  void fill_masks(const StepLease& lease, int num_samples);

  const StepContext& context_;
  const StepRing& ring_;
  RankTeam& ranks_;
  GrammarSource committed_, known_;      // after the committed tokens, and after all
  std::vector<LaunchedSpan> launched_;   // of sequences with a grammar, until they are collected
  std::unique_ptr<ThreadPool> threads_;  // for the work of grammars
  RowMasks masks_;                       // pinned
  Buffer samples_, laid_out_;            // pinned: the masks of samples, and what is downloaded
  size_t laid_out_spans_ = 0;            // room for spans in it
  bool laid_out_trees_ = false;          // whether it has parents
};

}  // namespace openspec
