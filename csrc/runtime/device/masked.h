#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/common/device.h"
#include "runtime/device/graph_book.h"
#include "runtime/device/ring.h"
#include "runtime/device/stages.h"
#include "runtime/drafting/grammar_source.h"
#include "runtime/drafting/row_masks.h"

namespace openspec {

using StepGraphs = std::map<StepShape, device::Graph>;

/// Steps with a grammar in them, in three launches: drafts and rows; the forward pass, while the
/// host fills the masks of the rows; and the choices. Also what grammars offer before.
///
/// The host is a step ahead, but once the rows are laid out, what came of the step before is in its
/// ring, for the device works in order. So each state follows its sequence's tokens before they are
/// collected, and whatever becomes of a step, the next one brings the states back to what counts.
class MaskedSteps {
 public:
  MaskedSteps(const StepContext& context, const GraphBook& book, const DeviceBuffers& arrays,
              const StepRing& ring, DeviceStages& stages, void* stream);

  static bool has_masks(const StepLease& lease, const SequenceTable& table);
  /// Fills lease.offers: what the grammars leave no choice of, where it pays to wait for the step
  /// before.
  void offer(StepLease& lease);
  /// The step, from its proposals on.
  void run(const StepLease& lease, const StepShape& shape, int num_samples);

  void note_launched(const StepLease& lease);
  void note_collected(const StepLease& lease);
  /// All that was launched is given up.
  void forget_launched() { launched_.clear(); }
  void clear_graphs();

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
  /// The graph of the shape, recorded at its first use; where the shape has none, `enqueue` itself.
  void run_part(StepGraphs& graphs, const StepShape& shape, const std::function<void()>& enqueue);
  void download_rows(const StepShape& shape);
  void fill_masks(const StepLease& lease, int num_samples);
  void upload_masks();

  const StepContext& context_;
  const GraphBook& book_;
  const DeviceBuffers& arrays_;
  const StepRing& ring_;
  DeviceStages& stages_;
  void* stream_;
  GrammarSource committed_, known_;      // after the committed tokens, and after all
  std::vector<LaunchedSpan> launched_;   // of sequences with a grammar, until they are collected
  std::unique_ptr<ThreadPool> threads_;  // for the work of grammars
  RowMasks masks_;                       // pinned
  Buffer mask_words_, sample_mask_;      // on the device, see ChooseParams
  Buffer sample_staging_, laid_out_;     // pinned: sample_mask_, and what download_rows brings
  size_t laid_out_spans_ = 0;            // room for spans in it
  bool laid_out_trees_ = false;          // whether it has parents
  device::Event is_laid_out_, is_uploaded_;
  device::Stream uploads_;  // beside the forward pass
  StepGraphs draft_graphs_, score_graphs_, choice_graphs_;
};

}  // namespace openspec
