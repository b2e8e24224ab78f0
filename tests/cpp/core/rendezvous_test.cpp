#include "core/rendezvous.h"

#include <stdexcept>
#include <vector>

#include "check_test.h"
#include "core/thread_pool.h"

using namespace openspec;

TEST(nobody_goes_on_before_all_have_come) {
  for (const int num_threads : {1, 2, 3, 8}) {
    ThreadPool pool(num_threads);
    Rendezvous rendezvous(num_threads);
    std::vector<int> rounds(static_cast<size_t>(num_threads));
    rendezvous.begin();
    pool.try_parallel_for(rounds.size(), [&](size_t i) {
      for (int round = 1; round <= 300; ++round) {
        rounds[i] = round;
        rendezvous.wait();
        for (const int other : rounds) CHECK_EQ(other, round);
        rendezvous.wait();
      }
    });
    rendezvous.check();
  }
}

TEST(one_that_fails_lets_the_others_go) {
  constexpr size_t kNumThreads = 4;
  ThreadPool pool(kNumThreads);
  Rendezvous rendezvous(kNumThreads);
  for (int time = 0; time < 100; ++time) {
    const size_t failing = static_cast<size_t>(time) % kNumThreads;
    std::vector<int> ends(kNumThreads);  // 1: went on, 2: failed with another
    rendezvous.begin();
    pool.parallel_for(kNumThreads, [&](int64_t number) {
      const auto i = static_cast<size_t>(number);
      try {
        for (int round = 0; round < time % 5; ++round) rendezvous.wait();
        if (i == failing) throw std::runtime_error("broken");
        rendezvous.wait();
        ends[i] = 1;
      } catch (const Rendezvous::Failed&) {
        ends[i] = 2;
      } catch (...) {
        rendezvous.fail(std::current_exception());
      }
    });
    for (size_t i = 0; i < kNumThreads; ++i) CHECK_EQ(ends[i], i == failing ? 0 : 2);
    CHECK_THROWS(rendezvous.check(), std::runtime_error, "broken");
    // And they meet again.
    rendezvous.begin();
    pool.try_parallel_for(kNumThreads, [&](size_t) { rendezvous.wait(); });
    rendezvous.check();
  }
}
