#include "core/thread_pool.h"

#include <ctime>

#include "core/check.h"
#include "core/spin.h"

namespace openspec {

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

namespace {

constexpr int kIndexBits = 20;
constexpr uint64_t kIndexMask = (uint64_t{1} << kIndexBits) - 1;
constexpr int64_t kMaxCount = int64_t{1} << (kIndexBits - 1);

uint64_t index_of(uint64_t ticket) { return ticket & kIndexMask; }
uint64_t count_of(uint64_t ticket) { return (ticket >> kIndexBits) & kIndexMask; }
bool has_work(uint64_t ticket) { return index_of(ticket) < count_of(ticket); }

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  OPENSPEC_CHECK_ARG(num_threads >= 1 && num_threads <= 1024,
                     "num_threads must be in [1, 1024], got ", num_threads);
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  generation_.fetch_add(1);
  generation_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t count, Trampoline call, const void* context) {
  OPENSPEC_CHECK(count <= kMaxCount, "parallel_for over ", count, " iterations, at most ",
                 kMaxCount);
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  num_done_.store(0, std::memory_order_relaxed);
  ++epoch_;
  ticket_.store((epoch_ << (2 * kIndexBits)) | (static_cast<uint64_t>(count) << kIndexBits),
                std::memory_order_seq_cst);
  generation_.fetch_add(1, std::memory_order_seq_cst);
  if (num_asleep_.load(std::memory_order_seq_cst) > 0) generation_.notify_all();
  drain();
  for (int spins = 0; num_done_.load(std::memory_order_acquire) != count; ++spins) {
    if (spins < 2000) {
      cpu_relax();
    } else {
      std::this_thread::yield();  // more runnable threads than cores
    }
  }
}

void ThreadPool::drain() {
  while (true) {
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if (!has_work(ticket)) return;
    // The claimed iteration keeps its loop alive, so call_ and context_ are that loop's.
    call_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed),
                                          static_cast<int64_t>(index_of(ticket)));
    num_done_.fetch_add(1, std::memory_order_acq_rel);
  }
}

void ThreadPool::work() {
  while (true) {
    // Before the look at stopping_ and at the ticket: what is set after that look raises the
    // generation past `seen`, so that the wait below returns at once.
    const uint32_t seen = generation_.load(std::memory_order_seq_cst);
    if (stopping_.load(std::memory_order_seq_cst)) return;
    // Looking before claiming keeps idle workers from running the index up.
    if (has_work(ticket_.load(std::memory_order_acquire))) {
      drain();
      continue;
    }
    if (spin_until([&] { return has_work(ticket_.load(std::memory_order_acquire)); })) continue;
    num_asleep_.fetch_add(1, std::memory_order_seq_cst);
    generation_.wait(seen, std::memory_order_seq_cst);
    num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace openspec
