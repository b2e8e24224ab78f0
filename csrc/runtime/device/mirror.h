#pragma once

#include <span>
#include <vector>

#include "kernels/common/device.h"
#include "runtime/device/device_buffers.h"
#include "runtime/state/lease.h"
#include "runtime/state/sequence_table.h"
#include "runtime/state/slot_bases.h"

namespace openspec {

/// What the host's sequence table has that devices do not know yet, for the next step's input:
/// lengths of new sequences and of those that go back, pages of a lease.
class TableUpdates {
 public:
  TableUpdates(const RunnerConfig& config, const SequenceTable& table, const SlotBases& bases)
      : config_(config), table_(table), bases_(bases) {}

  /// The slot has a new sequence.
  void add(int slot);
  /// The lengths become the table's again.
  void restore(int slot);

  /// Whether lengths go back with the next step.
  bool has_restored() const { return has_restored_; }
  /// Whether devices do not know the slot's sequence before the next step.
  bool is_new(int slot) const;
  /// Writes all that changed into a step's input, with the pages of its lease.
  StepHeader write(const StepLease& lease, const StepInputs& inputs) const;
  /// The step with these updates was launched.
  void forget();

 private:
  void update(int slot);

  const RunnerConfig& config_;
  const SequenceTable& table_;
  const SlotBases& bases_;
  std::vector<SlotUpdate> updates_;  // for the next step
  std::vector<int> new_slots_;       // of these
  bool has_restored_ = false;
};

/// A device's copy of the sequence table, as the host writes it: tokens, pages and parameters of
/// new sequences at once, the rest with the next step's input (TableUpdates). From then on the
/// device's copy is the one that counts.
class DeviceMirror {
 public:
  DeviceMirror(const RunnerConfig& config, const SequenceTable& table, const SlotBases& bases,
               const DeviceBuffers& arrays, void* stream);

  /// Returns once the device no longer reads what a sequence in the slot began with.
  void await(int slot) const { slots_[as_index(slot)].uploaded.wait(); }
  void add(int slot);
  void upload_params(int slot);
  void upload_tokens(int slot);
  void upload_pages(int slot, std::span<const PageId> pages);
  /// Where the base of the slot's state lies.
  void upload_base(int slot);

 private:
  /// One slot's sampling parameters: lists on the device, and where the host writes them.
  struct Slot {
    Buffer lists, staging;
    device::Event uploaded;
  };

  const SequenceTable& table_;
  const SlotBases& bases_;
  const DeviceBuffers& arrays_;
  void* stream_;
  std::vector<Slot> slots_;
};

}  // namespace openspec
