#pragma once

#include <atomic>
#include <exception>

namespace openspec {

/// Work on a grammar ended before its time: what it may take is used up, or nobody wants it. The
/// state that it was done on is of no use any more.
class WorkStopped final : public std::exception {
 public:
  const char* what() const noexcept override;
};

/// Bounds the processor time of what this thread does on grammars while the meter lives: beyond it,
/// GrammarState's functions throw WorkStopped. One at a time on a thread.
class WorkMeter {
 public:
  /// `is_unwanted`, unless null, stops the work at any time.
  explicit WorkMeter(double seconds, const std::atomic<bool>* is_unwanted = nullptr);
  ~WorkMeter();
  WorkMeter(const WorkMeter&) = delete;
  WorkMeter& operator=(const WorkMeter&) = delete;

  /// Of processor time, since the meter was made.
  double seconds() const;
  /// Throws WorkStopped where the work is to end.
  void check() const;

 private:
  const double begin_, most_;
  const std::atomic<bool>* is_unwanted_;
};

}  // namespace openspec
