#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "runtime/device/device_buffers.h"
#include "runtime/device/graph_book.h"
#include "runtime/device/masked.h"
#include "runtime/device/mirror.h"
#include "runtime/device/probe.h"
#include "runtime/device/rank_team.h"
#include "runtime/device/ring.h"
#include "runtime/drafting/drafter_source.h"
#include "runtime/step/step_backend.h"

namespace openspec {

/// The step on CUDA: a kernel that takes the input from pinned memory, one graph launch, and an
/// outcome that the device writes into a ring there. The device holds the sequence table that
/// counts. The host's own lags: it holds the results collected so far, so the next step can be
/// launched before this one is known. GraphBook says which steps are graphs; any other goes op by
/// op through the same code. A step with a grammar in it takes three launches (MaskedSteps). Where
/// several devices share the target, what is decided here each of them does (RankTeam). In builds
/// without CUDA there is none.
class DeviceStep final : public StepBackend {
 public:
  /// `contexts` by rank; `exchange`: null with one.
  DeviceStep(const std::vector<StepContext>& contexts, DeviceExchange* exchange);
  ~DeviceStep() override;

  int num_steps_ahead() const override { return proposes_on_host() ? 0 : 1; }
  void prepare() override { ranks_.prepare(); }
  void refresh_drafter() override {
    ranks_.each([](RankStep& rank) { rank.refresh_drafter(); });
  }
  void exchange_drafter() override {
    ranks_.each([](RankStep& rank) { rank.exchange_drafter(); });
  }
  void await_slot(int slot) override;
  void add_sequence(int slot) override;
  void restore_sequence(int slot) override;
  void remember(int slot) override;
  void forget_answers() override;
  void copy(void* to, const void* from, size_t bytes) override;
  void synchronize() override { ranks_.synchronize(); }
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
  const void* features_on_device() const override {
    return ranks_.first().stages().captured().data();
  }
  std::vector<Draft> last_drafts() override { return probe_.drafts(); }

  /// For tests.
  RankTeam& ranks() { return ranks_; }
  DeviceProbe& probe() { return probe_; }

 private:
  bool proposes_on_host() const { return ranks_.first().stages().proposes_on_host(); }
  /// Returns whether any of the drafts that go with the input is a tree.
  bool propose_on_host(const StepLease& lease);
  /// The step that serves the lease best, with at least the rows that its known tokens need.
  StepShape choose_shape(StepLease& lease, bool host_has_trees);
  int num_samples_of(const StepLease& lease, const StepShape& shape) const;
  /// The drafter learns from the rows that wait, where they cannot wait longer.
  void teach_kept(StepLease& lease, StepOrder& order);
  /// Drafts that get rows of each span that has any, were all to get as many.
  static int row_share(const StepLease& lease, int num_rows);
  StepHeader write_input(const StepLease& lease, const StepShape& shape);
  /// A recorded shape that does what is to be timed, or the step as it is.
  StepShape timed_shape(const StepKind& kind, int context) const;

  GraphBook book_;
  StepInputs inputs_;
  RankTeam ranks_;
  StepRing ring_;
  TableUpdates updates_;
  // What is given up may be so because a device fails, so no device is called then: the next step
  // writes their pages of states.
  std::vector<int> restored_;
  MaskedSteps masked_;
  DeviceProbe probe_;
  DrafterSource host_drafter_;                           // of a drafter that works on the host
  std::array<int, StepInputs::kRing> num_samples_ = {};  // enqueued, by entry of the ring
  std::optional<ExpertCounts> experts_before_;           // up to the step that was collected last
  int num_kept_steps_ = 0;  // since the drafter has learned from all rows
};

}  // namespace openspec
