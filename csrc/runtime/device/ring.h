#pragma once

#include <span>
#include <vector>

#include "kernels/common/device.h"
#include "runtime/device/device_buffers.h"
#include "runtime/state/lease.h"
#include "runtime/state/sequence_table.h"

namespace openspec {

/// Steps under way: the entry that each has of the rings in pinned memory, when the device began
/// and ended it, and what it left there.
class StepRing {
 public:
  StepRing(const RunnerConfig& config, const SequenceTable& table, const DeviceBuffers& arrays);

  /// The next step's entry. Waits for the step that had it before, which was given up: any other is
  /// collected.
  int take();
  /// Waits for the step before the entry's.
  void await_before(int entry) const;
  void await(int entry) const { ended_[as_index(entry)].wait(); }
  /// Marks where on the stream the entry's step begins and ends.
  void begin(int entry, void* stream) { begun_[as_index(entry)].record(stream); }
  void end(int entry, void* stream) { ended_[as_index(entry)].record(stream); }
  /// That the device worked on an ended step.
  double seconds(int entry) const {
    return ended_[as_index(entry)].seconds_since(begun_[as_index(entry)]);
  }

  /// What the host writes for the entry's step.
  const StepInputArrays& input(int entry) const { return arrays_.host_input[as_index(entry)]; }

  // Of a step that has ended.
  const StepOutcome& outcome(int entry, size_t span) const {
    return arrays_.outcome.outcomes[place(entry, span)];
  }
  /// The tokens that a sequence got.
  std::span<const int32_t> tokens(int entry, size_t span) const;
  SpanResult result(const StepLease& lease, size_t span) const;

 private:
  /// Among the outcomes of all entries.
  size_t place(int entry, size_t span) const {
    return as_index(entry) * as_index(config_.max_num_seqs) + span;
  }
  SpanDetail detail(const SpanResult& result, size_t place) const;
  TokenLogprobs logprobs(int entry, int sample, int num_best) const;

  const RunnerConfig& config_;
  const SequenceTable& table_;
  const DeviceBuffers& arrays_;
  std::vector<device::Event> begun_, ended_;
  int next_ = 0;
};

}  // namespace openspec
