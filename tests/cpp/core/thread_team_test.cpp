#include "core/thread_team.h"

#include <chrono>
#include <stdexcept>
#include <string>

#include "check_test.h"

using namespace openspec;

TEST(a_part_is_always_run_by_the_same_thread) {
  for (const int size : {1, 2, 4, 8}) {
    ThreadTeam team(size);
    CHECK_EQ(team.size(), size);
    std::vector<std::thread::id> thread_of(static_cast<size_t>(size));
    team.run([&](int part) { thread_of[static_cast<size_t>(part)] = std::this_thread::get_id(); });
    CHECK(thread_of[0] == std::this_thread::get_id());
    for (int round = 0; round < 2000; ++round) {
      // Awake and asleep.
      if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      std::vector<int> runs(static_cast<size_t>(size), 0);
      team.run([&](int part) {
        const auto i = static_cast<size_t>(part);
        runs[i] += thread_of[i] == std::this_thread::get_id() ? 1 : 100;
      });
      for (const int times : runs) CHECK_EQ(times, 1);
    }
  }
}

TEST(parts_wait_for_each_other) {
  ThreadTeam team(3);
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> num_here{0};
    team.run([&](int) {
      ++num_here;
      while (num_here.load() < 3) std::this_thread::yield();
    });
  }
}

TEST(the_first_error_is_thrown_when_all_are_done) {
  ThreadTeam team(4);
  for (int failing = 0; failing < 4; ++failing) {
    std::atomic<int> num_done{0};
    std::atomic<bool> has_failed{false};
    const auto work = [&](int part) {
      if (part == failing) {
        has_failed = true;
        throw std::runtime_error("broken " + std::to_string(part));
      }
      while (!has_failed.load()) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ++num_done;
    };
    CHECK_THROWS(team.run(work), std::runtime_error, "broken " + std::to_string(failing));
    CHECK_EQ(num_done.load(), 3);
    team.run([&](int) { ++num_done; });
    CHECK_EQ(num_done.load(), 7);
  }
}

TEST(teams_end_at_once_after_use) {
  for (int round = 0; round < 2000; ++round) {
    ThreadTeam team(1 + round % 4);
    std::atomic<int> sum{0};
    if (round % 3 > 0) team.run([&](int part) { sum += part; });
    CHECK_EQ(sum.load(), round % 3 > 0 ? (round % 4) * (round % 4 + 1) / 2 : 0);
  }
}
