// Sequences with a running state: the text is that of plain evaluation whatever is drafted,
// accepted, given up, preempted or found in the prefix cache.

#include <functional>

#include "check_test.h"
#include "core/check.h"
#include "runtime/running_target.h"

using namespace openspec;
using testing::Chances;
using testing::Ids;
using testing::Job;
using testing::RandomSchedule;
using testing::running_config;
using testing::running_runner;
using testing::RunningJobs;

TEST(text_is_that_of_plain_evaluation_under_chains) {
  testing::check_all_schedules(Device::kCpu, /*makes_trees=*/false, /*has_entries=*/false);
}

TEST(text_is_that_of_plain_evaluation_under_trees) {
  testing::check_all_schedules(Device::kCpu, /*makes_trees=*/true, /*has_entries=*/false);
}

TEST(text_is_that_of_plain_evaluation_where_the_last_cached_token_runs_again) {
  testing::check_all_schedules(Device::kCpu, /*makes_trees=*/true, /*has_entries=*/true);
}

TEST(text_is_that_of_plain_evaluation_where_sequences_sit_steps_out) {
  testing::check_holds(Device::kCpu, /*makes_trees=*/false);
  testing::check_holds(Device::kCpu, /*makes_trees=*/true);
}

TEST(every_part_of_chains_and_trees_of_every_length_may_be_accepted) {
  testing::check_every_acceptance(Device::kCpu, /*width=*/1);
  testing::check_every_acceptance(Device::kCpu, /*width=*/3);
}

TEST(a_failure_in_any_stage_leaves_states_as_they_were) {
  const RunningJobs work(6);
  for (const char* failing : {"propose", "score", "choose", "accept", "collect", "commit"}) {
    const auto runner = running_runner(running_config(Device::kCpu, 4),
                                       std::make_unique<testing::RunningDrafter>(true, false));
    int countdown = 3;
    runner->set_stage_hook([&](const std::string& stage) {
      if (stage == failing && --countdown == 0) {
        countdown = 3;
        throw std::runtime_error("not today");
      }
    });
    std::vector<int> slots;
    std::vector<Ids> outputs(work.jobs.size());
    for (const Job& job : work.jobs) {
      slots.push_back(
          runner->add_sequence(job.prompt, static_cast<int>(job.prompt.size()), job.params, {}));
    }
    int num_failed = 0;
    for (size_t num_done = 0; num_done < slots.size();) {
      std::vector<SpanRequest> requests;
      for (const int slot : slots) {
        if (slot < 0) continue;
        const int num_left = runner->table().num_tokens(slot) - runner->table().kv_len(slot);
        requests.push_back({slot, std::min(num_left, 45), 4});
      }
      const auto lease = runner->reserve(requests);
      try {
        runner->launch(*lease);
        runner->collect(*lease);
        runner->commit(*lease);
      } catch (const std::runtime_error&) {
        ++num_failed;
        continue;
      }
      for (const SpanResult& result : lease->results) {
        const auto i =
            static_cast<size_t>(std::find(slots.begin(), slots.end(), result.slot) - slots.begin());
        outputs[i].insert(outputs[i].end(), result.token_ids.begin(), result.token_ids.end());
        if (result.finish == FinishReason::kRunning) continue;
        CHECK_EQ(outputs[i], work.expected[i]);
        runner->remove_sequence(result.slot);
        slots[i] = -1;
        ++num_done;
      }
    }
    CHECK_GT(num_failed, 3);
  }
}

namespace {

/// Tokens of `prompt` that come from the prefix cache; its text is checked.
int64_t num_found(Runner& runner, const Ids& prompt) {
  const int64_t before = runner.prefixes().num_found();
  Job job{prompt, {}};
  job.params.max_tokens = 6;
  CHECK_EQ(testing::run(runner, {job}, 256)[0], testing::evaluated(prompt, 3, 6));
  return runner.prefixes().num_found() - before;
}

}  // namespace

TEST(a_prefix_is_found_where_it_has_pages_and_a_snapshot) {
  RunnerConfig config = running_config(Device::kCpu, 0);
  config.max_num_seqs = 1;  // hence two snapshots
  const auto runner = running_runner(config);
  const Ids prompt = testing::random_prompt(1, 61, testing::kRunningVocab);
  CHECK_EQ(num_found(*runner, prompt), 0);
  // At the snapshot of the prompt's last full page, and before it only pages.
  CHECK_EQ(num_found(*runner, prompt), 60);
  CHECK_EQ(num_found(*runner, Ids(prompt.begin(), prompt.begin() + 50)), 0);
  // The second to come that way has made a snapshot there.
  CHECK_EQ(num_found(*runner, Ids(prompt.begin(), prompt.begin() + 50)), 48);

  // Others take the snapshots; the pages stay.
  const size_t num_pages = runner->prefixes().published_hashes().size();
  for (int seed = 2; seed < 4; ++seed) {
    num_found(*runner, testing::random_prompt(seed, 33, testing::kRunningVocab));
  }
  CHECK_GT(runner->prefixes().published_hashes().size(), num_pages);
  CHECK_EQ(num_found(*runner, prompt), 0);
  CHECK_EQ(num_found(*runner, prompt), 60);
  runner->prefixes().reset();
  CHECK_EQ(num_found(*runner, prompt), 0);
}

TEST(within_a_long_prompt_there_is_a_snapshot_every_8192_tokens) {
  RunnerConfig config = running_config(Device::kCpu, 0);
  config.max_model_len = 18000;
  const auto runner = running_runner(config, nullptr, /*num_pages=*/20000);
  const Ids prompt = testing::random_prompt(1, 17000, testing::kRunningVocab);
  const auto first = [&](int length) { return Ids(prompt.begin(), prompt.begin() + length); };
  CHECK_EQ(num_found(*runner, prompt), 0);
  CHECK_EQ(num_found(*runner, first(8192)), 0);  // one token at least runs
  CHECK_EQ(num_found(*runner, first(8193)), 8192);
  CHECK_EQ(num_found(*runner, first(16000)), 8192);
  CHECK_EQ(num_found(*runner, prompt), 16996);
}

TEST(a_target_without_state_has_none) {
  RunnerConfig config = running_config(Device::kCpu, 4);
  const size_t state_bytes = plan_memory(config).state_bytes;
  // Two records are read, a page fits beside a step's rows; what is saved, and snapshots.
  const size_t record_bytes = 3 * 16, num_slots = 6, ring = 2 + 4 + 5;
  CHECK_EQ(state_bytes, num_slots * (ring + 2 + 2 * 2) * record_bytes);
  config.enable_prefix_caching = false;
  CHECK_EQ(plan_memory(config).state_bytes, num_slots * (ring + 2) * record_bytes);
  config.target.kind = "dense";
  CHECK_EQ(plan_memory(config).state_bytes, 0);
  config.target.kind = "sparse";
  CHECK_THROWS(plan_memory(config), ArgumentError,
               "no kind of target is called sparse; there are: dense");
}
