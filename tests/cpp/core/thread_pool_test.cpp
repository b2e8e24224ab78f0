#include "core/thread_pool.h"

#include <atomic>
#include <chrono>
#include <vector>

#include "check_test.h"
#include "core/check.h"

using namespace openspec;

TEST(every_iteration_runs_exactly_once) {
  for (int num_threads : {1, 2, 3, 8}) {
    ThreadPool pool(num_threads);
    for (int round = 0; round < 500; ++round) {
      const int count = round % 67;
      std::vector<int> runs(static_cast<size_t>(count), 0);
      pool.parallel_for(count, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
      for (int times : runs) CHECK_EQ(times, 1);
    }
  }
}

TEST(workers_wake_after_sleeping) {
  ThreadPool pool(4);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::vector<int> runs(100, 0);
    pool.parallel_for(100, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
    for (int times : runs) CHECK_EQ(times, 1);
  }
}

TEST(back_to_back_loops_do_not_mix) {
  ThreadPool pool(4);
  std::vector<int64_t> sums(32, 0);
  for (int round = 0; round < 20000; ++round) {
    const int count = 2 + round % 31;
    pool.parallel_for(count, [&](int64_t i) { sums[static_cast<size_t>(i)] += round; });
  }
  // Iteration i runs in the rounds with 2 + round % 31 > i.
  for (int i = 0; i < 32; ++i) {
    int64_t expected = 0;
    for (int round = 0; round < 20000; ++round) expected += 2 + round % 31 > i ? round : 0;
    CHECK_EQ(sums[static_cast<size_t>(i)], expected);
  }
}

// A worker that misses the end sleeps for ever: the test then hangs until its time limit. Without
// the order in ThreadPool::work() that came within 3000 pools of four threads on two cores.
TEST(pools_end_at_once_after_use) {
  for (int round = 0; round < 10000; ++round) {
    ThreadPool pool(2 + round % 5);
    std::atomic<int> sum = 0;
    pool.parallel_for(round % 7, [&](int64_t i) { sum += static_cast<int>(i); });
    const int count = round % 7;
    CHECK_EQ(sum.load(), count * (count - 1) / 2);
  }
}

TEST(thread_count_is_checked) { CHECK_THROWS(ThreadPool(0), ArgumentError, "num_threads"); }
