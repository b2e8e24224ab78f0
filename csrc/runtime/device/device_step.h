#pragma once

#include <optional>
#include <span>
#include <vector>

#include "kernels/common/device.h"
#include "runtime/device/device_buffers.h"
#include "runtime/device/graph_book.h"
#include "runtime/device/masked.h"
#include "runtime/device/mirror.h"
#include "runtime/device/probe.h"
#include "runtime/device/ring.h"
#include "runtime/device/stages.h"
#include "runtime/drafting/drafter_source.h"
#include "runtime/step/step_backend.h"

namespace openspec {

/// The step on CUDA: a kernel that takes the input from pinned memory, one graph launch, and an
/// outcome that the device writes into a ring there. The device holds the sequence table that
/// counts. The host's own lags: it holds the results collected so far, so the next step can be
/// launched before this one is known. GraphBook says which steps are graphs; any other goes op by
/// op through the same code. A step with a grammar in it takes three launches (MaskedSteps). In
/// builds without CUDA there is none.
class DeviceStep final : public StepBackend {
 public:
  explicit DeviceStep(StepContext context);
  ~DeviceStep() override;

  int num_steps_ahead() const override { return stages_.proposes_on_host() ? 0 : 1; }
  void prepare() override;
  void await_slot(int slot) override { mirror_.await(slot); }
  void add_sequence(int slot) override { mirror_.add(slot); }
  void restore_sequence(int slot) override;
  void copy(void* to, const void* from, size_t bytes) override {
    device::copy_on_device(to, from, bytes, stream_.handle());
  }
  void synchronize() override { device::synchronize(stream_.handle()); }
  void launch(StepLease& lease) override;
  void collect(StepLease& lease) override;
  std::optional<double> draft_seconds(const StepLease& lease) const override;
  std::vector<StepKind> step_kinds() const override { return book_.step_kinds(); }
  size_t num_needed_kinds() const override { return step_kinds().size(); }
  int most_sized_rows() const override { return book_.most_sized_rows(); }
  double time_step(const StepKind& kind, std::span<const int> slots) override;
  void set_capture(std::vector<int> layers) override;
  std::vector<float> last_logits() override { return probe_.logits(); }
  std::vector<float> last_features() override {
    return probe_.features(static_cast<int>(capture_layers_.size()));
  }
  std::vector<Draft> last_drafts() override { return probe_.drafts(); }

 private:
  /// Returns whether any of the drafts that go with the input is a tree.
  bool propose_on_host(const StepLease& lease);
  /// The step that serves the lease best, with at least the rows that its known tokens need.
  StepShape choose_shape(StepLease& lease, bool host_has_trees);
  int num_samples_of(const StepLease& lease, const StepShape& shape) const;
  /// The drafter learns from the rows that wait, where they cannot wait longer.
  void teach_kept(StepLease& lease, const StepShape& shape);
  StepHeader write_input(const StepLease& lease, const StepShape& shape);
  /// Starts the step whose input is the header and the ring's entry. With `masked`, the lease, it
  /// has rows that a grammar limits.
  void start(int entry, const StepHeader& header, const StepShape& shape, int num_samples,
             const StepLease* masked = nullptr);
  /// A recorded shape that does what is to be timed, or the step as it is.
  StepShape timed_shape(const StepKind& kind, int context) const;

  GraphBook book_;
  device::Stream stream_;
  DeviceBuffers arrays_;
  StepRing ring_;
  DeviceMirror mirror_;
  DeviceStages stages_;
  MaskedSteps masked_;
  DeviceProbe probe_;
  DrafterSource host_drafter_;  // of a drafter that works on the host
  StepGraphs graphs_;
  int num_kept_steps_ = 0;  // since the drafter has learned from all rows
};

}  // namespace openspec
