#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace openspec {

/// Of the calling thread, in seconds: what its work takes, however busy the machine is.
double processor_seconds();

/// Runs loops on a fixed set of threads; the calling thread takes part.
///
/// Iterations are claimed one by one, so a descheduled worker never holds the others up for more
/// than the iteration it has in hand. Which thread runs an iteration never changes a result:
/// every op writes each output element from exactly one iteration.
class ThreadPool {
 public:
  /// `num_threads` counts the caller: 1 means no workers.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls `body(i)` for every i in [0, count); returns when all are done. `body` must not throw.
  /// Not reentrant: one loop at a time.
  template <typename Body>
  void parallel_for(int64_t count, const Body& body) {
    if (count <= 1 || workers_.empty()) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    run(
        count, [](const void* context, int64_t i) { (*static_cast<const Body*>(context))(i); },
        &body);
  }
  /// Calls `body(i)` for every i in [0, count), which may throw: of the errors, that of the
  /// smallest i is thrown when all are done.
  template <typename Body>
  void try_parallel_for(size_t count, const Body& body) {
    std::vector<std::exception_ptr> errors(count);
    parallel_for(static_cast<int64_t>(count), [&](int64_t i) {
      try {
        body(static_cast<size_t>(i));
      } catch (...) {
        errors[static_cast<size_t>(i)] = std::current_exception();
      }
    });
    for (const std::exception_ptr& error : errors) {
      if (error != nullptr) std::rethrow_exception(error);
    }
  }

 private:
  using Trampoline = void (*)(const void* context, int64_t i);

  void run(int64_t count, Trampoline call, const void* context);
  void work();
  void drain();

  std::vector<std::thread> workers_;
  // epoch | number of iterations | next iteration: one value, so that a claim is decided by one
  // atomic addition and a late worker can never mistake one loop's index for another's.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> num_done_{0};
  std::atomic<Trampoline> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
  uint64_t epoch_ = 0;
  std::atomic<uint32_t> generation_{0};  // raised for each loop; sleeping workers wait on it
  std::atomic<int> num_asleep_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace openspec
