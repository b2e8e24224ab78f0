#pragma once

#include <atomic>
#include <chrono>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace openspec {

inline void cpu_relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Looks whether `is_done` for 30 us: longer than the gap between two ops of a step and shorter
/// than that between two steps, so that an idle engine burns no core. Returns what it said last.
template <typename IsDone>
bool spin_until(const IsDone& is_done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(30);
  bool found = is_done();
  while (!found && std::chrono::steady_clock::now() < deadline) {
    for (int i = 0; i < 16 && !found; ++i) {
      cpu_relax();
      found = is_done();
    }
  }
  return found;
}

/// Waits until `value` is another than `old`, which who changes it notifies.
template <typename T>
void await_change(const std::atomic<T>& value, T old) {
  if (!spin_until([&] { return value.load(std::memory_order_acquire) != old; })) value.wait(old);
}

}  // namespace openspec
