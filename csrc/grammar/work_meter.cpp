#include "grammar/work_meter.h"

#include <work.h>

#include <limits>

#include "core/thread_pool.h"

namespace openspec {

namespace {

// The clock is a system call, and these take about as long as some tens of masks' cheapest steps.
constexpr int64_t kUnitsBetweenLooks = 1024;

thread_local const WorkMeter* meter = nullptr;

}  // namespace

const char* WorkStopped::what() const noexcept { return "work on a grammar was stopped"; }

WorkMeter::WorkMeter(double seconds, const std::atomic<bool>* is_unwanted)
    : begin_(processor_seconds()), most_(seconds), is_unwanted_(is_unwanted) {
  meter = this;
  xgrammar::work_left = 0;
}

WorkMeter::~WorkMeter() {
  meter = nullptr;
  xgrammar::work_left = 0;
}

double WorkMeter::seconds() const { return processor_seconds() - begin_; }

void WorkMeter::check() const {
  const bool is_unwanted = is_unwanted_ != nullptr && is_unwanted_->load(std::memory_order_relaxed);
  if (is_unwanted || seconds() > most_) throw WorkStopped();
}

}  // namespace openspec

namespace xgrammar {

__thread int64_t work_left = 0;

void SpendMoreWork() {
  if (openspec::meter == nullptr) {
    work_left = std::numeric_limits<int64_t>::max() / 2;
    return;
  }
  work_left = openspec::kUnitsBetweenLooks;
  openspec::meter->check();
}

}  // namespace xgrammar
