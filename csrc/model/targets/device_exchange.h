#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "model/targets/target.h"
#include "model/weights/buffer.h"

namespace openspec {

class SumExchange;

/// The exchange of the ranks among which a target is shared on CUDA, each on a device of its own:
/// memory of each for what others send, and what tells that one of them did not come in time.
class DeviceExchange {
 public:
  /// `devices`: of each rank of `whole`, the first ones unless given; they reach each other's
  /// memory from then on. A rank waits `deadline_ns` for the others at most. Throws ArgumentError
  /// naming what cannot be and the remedy.
  explicit DeviceExchange(const TargetSetup& whole, std::vector<int> devices = {},
                          uint64_t deadline_ns = kExchangeDeadlineNs);
  ~DeviceExchange();
  DeviceExchange(const DeviceExchange&) = delete;
  DeviceExchange& operator=(const DeviceExchange&) = delete;

  int size() const { return static_cast<int>(devices_.size()); }
  int device(int rank) const { return devices_.at(static_cast<size_t>(rank)); }
  SumExchange& rank(int rank);
  /// As SumExchange::give_area of the rank.
  void give_area(int rank, void* data, size_t bytes);

  /// Ends all waits of all ranks, now and from here on: one of them cannot do its part.
  void fail();
  /// Throws DeviceError if a rank waited in vain; what passes have computed is wrong then, and
  /// nothing may go on.
  void check() const;
  /// When nothing runs: begins anew, as if nothing had been sent and nobody had failed.
  void clear();

 private:
  class Rank;

  std::vector<int> devices_;
  uint64_t deadline_ns_;
  Buffer faults_, off_;  // of each rank, and what fail() writes to all; both in pinned memory
  std::vector<std::unique_ptr<Rank>> ranks_;
};

/// Bytes that a DeviceExchange takes on each device. Throws ArgumentError if they are too many.
size_t device_exchange_bytes(const TargetSetup& whole);

/// The ranks among which `whole` is shared, each on its device of the exchange. All run the same
/// passes in the same order, each on a stream of its device, called by a thread of which that is
/// the current device.
std::vector<std::unique_ptr<TargetModel>> make_ranks(const TargetSetup& whole,
                                                     DeviceExchange& exchange);

}  // namespace openspec
