#ifdef OPENSPEC_CUDA

#include "runtime/device/rank_team.h"

#include "core/check.h"

namespace openspec {

RankTeam::RankTeam(const std::vector<StepContext>& contexts, DeviceExchange* exchange,
                   const StepInputs& inputs, const GraphBook& book)
    : exchange_(exchange), threads_(static_cast<int>(contexts.size())) {
  for (const StepContext& context : contexts) {
    const auto number = static_cast<int>(ranks_.size());
    const auto use = use_device(number);
    ranks_.push_back(std::make_unique<RankStep>(context, inputs, book));
    if (exchange_ == nullptr) continue;
    Buffer& memory = ranks_.back()->memory();
    exchange_->give_area(number, memory.data(), memory.bytes());
  }
}

void RankTeam::end() {
  if (exchange_ != nullptr) exchange_->fail();
  for (const auto& rank : ranks_) {
    try {
      rank->synchronize();
    } catch (const DeviceError&) {
      // Nothing runs there any more.
    }
  }
}

void RankTeam::prepare() {
  if (exchange_ == nullptr) return first().prepare();
  // A kernel that is launched for the first time may wait for those that run. So none of them waits
  // for other ranks meanwhile, and what they compute is wrong.
  check();
  exchange_->fail();
  each([](RankStep& rank) {
    rank.prepare();
    rank.launch_others();
  });
  exchange_->clear();
}

void RankTeam::await(int entry) const {
  check();
  for (const auto& rank : ranks_) {
    rank->await(entry);
    check();
  }
}

void RankTeam::synchronize() const {
  check();
  for (const auto& rank : ranks_) {
    rank->synchronize();
    check();
  }
}

void RankTeam::check() const {
  if (!failure_.empty()) throw DeviceError(failure_);
  if (exchange_ != nullptr) exchange_->check();
}

void RankTeam::enter(int number) const {
  constexpr const char* kStages[kMaxRanks] = {"rank 0", "rank 1", "rank 2", "rank 3",
                                              "rank 4", "rank 5", "rank 6", "rank 7"};
  ranks_[as_index(number)]->context().enter(kStages[number]);
}

void RankTeam::give_up(int number, const std::exception& error) {
  exchange_->fail();
  detail::fail<DeviceError>("GPU ", exchange_->device(number),
                            " could not do its part of a step; the engine ends: ", error.what());
}

}  // namespace openspec

#endif
