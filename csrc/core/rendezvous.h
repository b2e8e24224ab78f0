#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

namespace openspec {

/// Where threads that do parts of one work wait for each other, again and again. One that fails
/// lets the others go, who then fail as well.
class Rendezvous {
 public:
  /// What `wait` throws in the threads beside the one that failed.
  struct Failed {};

  explicit Rendezvous(int num_threads) : num_threads_(num_threads) {}

  /// Before a work's threads begin.
  void begin() {
    num_waiting_ = 0;
    error_ = nullptr;
    has_failed_ = false;
  }
  /// Returns when all threads have come.
  void wait() {
    const uint32_t turn = turn_.load();
    if (num_waiting_.fetch_add(1) + 1 == num_threads_) {
      num_waiting_.store(0);
      release();
    }
    while (!has_failed_.load() && turn_.load() == turn) turn_.wait(turn);
    if (has_failed_.load()) throw Failed();
  }
  /// A thread's work has failed.
  void fail(std::exception_ptr error) {
    {
      const std::lock_guard lock(mutex_);
      if (error_ == nullptr) error_ = std::move(error);
    }
    has_failed_.store(true);
    release();
  }
  /// After all threads have ended: throws the first error there was.
  void check() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  void release() {
    turn_.fetch_add(1);
    turn_.notify_all();
  }

  const int num_threads_;
  std::atomic<int> num_waiting_{0};
  std::atomic<uint32_t> turn_{0};
  std::atomic<bool> has_failed_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace openspec
