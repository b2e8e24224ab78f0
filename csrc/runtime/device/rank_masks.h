#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <span>

#include "kernels/common/device.h"
#include "runtime/device/graph_book.h"
#include "runtime/device/stages.h"

namespace openspec {

using StepGraphs = std::map<StepShape, device::Graph>;

/// A rank's part of steps with a grammar in them (MaskedSteps): its graphs of the three launches,
/// and its copy of the masks. Graphs are recorded and memory is taken before the launches: what
/// these enqueue may wait for other ranks.
class RankMasks {
 public:
  RankMasks(const RunnerConfig& config, const GraphBook& book, DeviceStages& stages, void* stream)
      : config_(config), book_(book), stages_(stages), stream_(stream) {}

  /// For the first two launches.
  void prepare(const StepShape& shape);
  void propose(const StepShape& shape);
  /// The rows are laid out.
  void note_laid_out() { is_laid_out_.record(stream_); }
  void await_laid_out() const { is_laid_out_.wait(); }
  void score(const StepShape& shape);
  /// For the third, with so many bytes of masks.
  void prepare_choice(const StepShape& shape, size_t mask_bytes);
  /// `masks` and `samples`, see ChooseParams, lie in pinned memory.
  void choose(const StepShape& shape, int num_samples, std::span<const std::byte> masks,
              std::span<const std::byte> samples);
  void clear_graphs();

 private:
  /// Records what `enqueue` launches, all of which has run before as a part of the shape's own
  /// graph; where the shape has none, there is nothing to record.
  void record(StepGraphs& graphs, const StepShape& shape, const std::function<void()>& enqueue);
  void run(const StepGraphs& graphs, const StepShape& shape, const std::function<void()>& enqueue);
  void enqueue_choices(const StepShape& shape, int num_samples);

  const RunnerConfig& config_;
  const GraphBook& book_;
  DeviceStages& stages_;
  void* stream_;
  Buffer mask_words_, sample_mask_;  // on the device, see ChooseParams
  device::Event is_laid_out_, is_uploaded_;
  device::Stream uploads_;  // beside the forward pass
  StepGraphs draft_graphs_, score_graphs_, choice_graphs_;
};

}  // namespace openspec
