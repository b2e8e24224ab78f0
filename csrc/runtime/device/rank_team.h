#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/thread_team.h"
#include "kernels/common/device.h"
#include "model/targets/device_exchange.h"
#include "runtime/device/rank_step.h"

namespace openspec {

/// The ranks of a step, each on its device and called by a thread of its own: the first by that of
/// the caller, which is all there is where nobody shares the target.
///
/// What a rank enqueues may wait for what all others enqueue. So a step is begun by all at once,
/// and while they are at it none takes memory or records. Where one cannot do its part the waits of
/// all end, and nothing can follow: every later call throws the same.
class RankTeam {
 public:
  /// `contexts` by rank; `exchange`: null with one.
  RankTeam(const std::vector<StepContext>& contexts, DeviceExchange* exchange,
           const StepInputs& inputs, const GraphBook& book);
  /// Nothing runs from then on: a step that was given up may use what goes next, on any device.
  void end();

  int size() const { return static_cast<int>(ranks_.size()); }
  RankStep& operator[](int rank) { return *ranks_[as_index(rank)]; }
  RankStep& first() { return *ranks_.front(); }
  const RankStep& first() const { return *ranks_.front(); }

  /// Calls body(rank) for all ranks, of nothing that waits for others.
  template <typename Body>
  void each(const Body& body) {
    threads_.run([&](int number) {
      const auto use = use_device(number);
      body((*this)[number]);
    });
  }
  /// Calls body(rank) for all ranks, which enqueues a part of a step.
  template <typename Body>
  void enqueue(const Body& body) {
    if (exchange_ == nullptr) {
      body(first());
      return;
    }
    check();
    const auto attempt = [&](int number) {
      try {
        const auto use = use_device(number);
        enter(number);
        body((*this)[number]);
      } catch (const std::exception& error) {
        give_up(number, error);
      }
    };
    try {
      threads_.run(attempt);
    } catch (const DeviceError& error) {
      failure_ = error.what();
      throw;
    }
  }
  /// Once the weights are there: each rank launches all it will, and records it.
  void prepare();

  /// Returns when the step with the ring's entry has ended on all ranks.
  void await(int entry) const;
  /// Returns when all that was enqueued has ended.
  void synchronize() const;
  /// Throws DeviceError if the ranks have given up.
  void check() const;

 private:
  std::optional<device::Use> use_device(int number) const {
    if (exchange_ == nullptr) return std::nullopt;
    return std::optional<device::Use>(std::in_place, exchange_->device(number));
  }
  /// The stage of this name, "rank 0" for the first.
  void enter(int number) const;
  /// The rank cannot do its part of a step: throws what to say of it.
  [[noreturn]] void give_up(int number, const std::exception& error);

  DeviceExchange* exchange_;
  std::vector<std::unique_ptr<RankStep>> ranks_;
  ThreadTeam threads_;
  std::string failure_;  // why they have given up; empty: they have not
};

}  // namespace openspec
