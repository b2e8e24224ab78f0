#include "core/thread_team.h"

#include "core/check.h"

namespace openspec {

ThreadTeam::ThreadTeam(int size) {
  OPENSPEC_CHECK(size >= 1, "a team of ", size);
  for (int part = 1; part < size; ++part) threads_.emplace_back([this, part] { work(part); });
}

ThreadTeam::~ThreadTeam() {
  is_over_ = true;
  turn_.fetch_add(1);
  turn_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadTeam::run(Trampoline call, const void* context) {
  call_ = call;
  context_ = context;
  num_left_.store(size() - 1);
  turn_.fetch_add(1);
  turn_.notify_all();
  run_part(0);
  for (int left = num_left_.load(); left != 0; left = num_left_.load()) {
    await_change(num_left_, left);
  }
  if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadTeam::run_part(int part) {
  try {
    call_(context_, part);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr) error_ = std::current_exception();
  }
}

void ThreadTeam::work(int part) {
  // A turn begins when all threads have ended the one before, so that none is missed.
  for (uint32_t turn = 0;; ++turn) {
    await_change(turn_, turn);
    if (is_over_) return;
    run_part(part);
    if (num_left_.fetch_sub(1) == 1) num_left_.notify_one();
  }
}

}  // namespace openspec
