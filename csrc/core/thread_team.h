#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/spin.h"

namespace openspec {

/// Runs the parts of one work side by side, each on a thread of its own that is always the same:
/// part 0 on the calling thread. One part may wait for what another does.
class ThreadTeam {
 public:
  /// `size` counts the caller: 1 means no threads.
  explicit ThreadTeam(int size);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  /// Calls `body(part)` for every part, which may throw: the first error is thrown when all are
  /// done. Not reentrant.
  template <typename Body>
  void run(const Body& body) {
    if (threads_.empty()) {
      body(0);
      return;
    }
    run([](const void* context, int part) { (*static_cast<const Body*>(context))(part); }, &body);
  }

 private:
  using Trampoline = void (*)(const void* context, int part);

  void run(Trampoline call, const void* context);
  void run_part(int part);
  void work(int part);

  Trampoline call_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<uint32_t> turn_{0};  // of works, and one more at the end
  std::atomic<int> num_left_{0};   // parts of the turn that other threads have yet to end
  bool is_over_ = false;
  std::mutex mutex_;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

}  // namespace openspec
