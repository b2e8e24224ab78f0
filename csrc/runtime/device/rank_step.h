#pragma once

#include <vector>

#include "kernels/common/device.h"
#include "runtime/device/device_buffers.h"
#include "runtime/device/graph_book.h"
#include "runtime/device/mirror.h"
#include "runtime/device/rank_masks.h"
#include "runtime/device/stages.h"
#include "runtime/step/step_backend.h"

namespace openspec {

/// A step as it was decided; all ranks are told the same. Its input is in the header's entry of the
/// ring.
struct StepOrder {
  StepHeader header;
  StepShape shape;
  int num_samples = 1;
  // Before it the drafter learns from rows of so many of the input's kept_slots, which waited for
  // so many steps.
  int num_kept_slots = 0, num_kept_steps = 0;
};

/// A rank's part of steps: the stream, the memory and the graphs of its device, and what is
/// enqueued there. Made and called with the device current; what one rank enqueues may wait for the
/// others.
class RankStep {
 public:
  RankStep(StepContext context, const StepInputs& inputs, const GraphBook& book);

  void set_capture(const std::vector<int>& layers) { stages_.set_capture(layers); }
  /// Launches all that steps consist of once, and records graphs of the book's shapes.
  void prepare();
  /// Launches what is not recorded: what only some steps begin with, and steps of several sizes.
  void launch_others();
  void refresh_drafter() { context_.drafter.refresh(stages_.exec()); }
  void exchange_drafter() { context_.drafter.exchange(stages_.exec()); }
  bool has_graphs() const { return !graphs_.empty(); }

  /// A step is begun, run and ended. A step with a grammar in it is run by MaskedSteps.
  void begin(const StepOrder& order);
  void run(const StepOrder& order);
  void end(const StepOrder& order);
  void start(const StepOrder& order) {
    begin(order);
    run(order);
    end(order);
  }

  /// Returns when the step with the ring's entry has ended.
  void await(int entry) const { ended_[as_index(entry)].wait(); }
  /// That the device worked on an ended step.
  double seconds(int entry) const {
    return ended_[as_index(entry)].seconds_since(begun_[as_index(entry)]);
  }
  void synchronize() const { device::synchronize(stream_.handle()); }
  void copy(void* to, const void* from, size_t bytes) const {
    device::copy_on_device(to, from, bytes, stream_.handle());
  }

  const StepContext& context() const { return context_; }
  void* stream() const { return stream_.handle(); }
  const DeviceBuffers& arrays() const { return arrays_; }
  Buffer& memory() { return arrays_.memory(); }
  DeviceMirror& mirror() { return mirror_; }
  DeviceStages& stages() { return stages_; }
  const DeviceStages& stages() const { return stages_; }
  RankMasks& masks() { return masks_; }

 private:
  const StepContext context_;
  const StepInputs& inputs_;
  const GraphBook& book_;
  device::Stream stream_;
  DeviceBuffers arrays_;
  DeviceMirror mirror_;
  DeviceStages stages_;
  RankMasks masks_;
  std::vector<device::Event> begun_, ended_;  // by entry of the ring
  StepGraphs graphs_;
};

}  // namespace openspec
