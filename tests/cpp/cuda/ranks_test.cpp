// The whole step on two GPUs that share the target, and on four where there are so many: the text,
// the log-probabilities and the logits are those of one GPU, bit for bit, on all; and what one of
// them cannot do ends the engine.

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "cuda/cuda_testing.h"
#include "cuda/schedule_testing.h"
#include "runtime/device/device_step.h"

using namespace openspec;
using testing::check_same;
using testing::config_of;
using testing::Job;
using testing::kVocab;
using testing::make_runner;
using testing::Output;
using testing::random_prompt;
using testing::Schedule;

namespace {

// Before CUDA is used: a kernel that is loaded late would wait for one that waits for it.
const int loads_eagerly = setenv("CUDA_MODULE_LOADING", "EAGER", 1);
testing::NeedsDevice needs_device;
/// On one device a kernel that waits for the other rank may keep what that rank's kernel needs.
const std::vector<int> rank_counts = [] {
  const int num_devices = device::count();
  if (num_devices >= 4) return std::vector<int>{2, 4};
  if (num_devices >= 2) return std::vector<int>{2};
  std::printf("skipped: one CUDA device\n");
  std::exit(77);
}();

RunnerConfig shared(RunnerConfig config, int num_ranks = 2) {
  config.tensor_parallel_size = num_ranks;
  return config;
}

/// The stage of the last rank.
std::string last_of(int num_ranks) { return "rank " + std::to_string(num_ranks - 1); }

DeviceStep& device_step(Runner& runner) { return dynamic_cast<DeviceStep&>(runner.backend()); }

/// Every rank has chosen what the first one has.
void check_outcomes(Runner& runner, const StepLease& lease) {
  RankTeam& ranks = device_step(runner).ranks();
  const RunnerConfig& config = runner.config();
  const size_t first =
      static_cast<size_t>(lease.ring_index) * static_cast<size_t>(config.max_num_seqs);
  const size_t most = 1 + most_drafts(config);
  const StepOutcomeArrays& expected = ranks.first().arrays().outcome;
  CHECK_EQ(ranks.size(), config.tensor_parallel_size);
  for (int rank = 1; rank < ranks.size(); ++rank) {
    const StepOutcomeArrays& found = ranks[rank].arrays().outcome;
    CHECK(found.outcomes != expected.outcomes);
    for (size_t i = first; i < first + lease.requests.size(); ++i) {
      CHECK(std::memcmp(&found.outcomes[i], &expected.outcomes[i], sizeof(StepOutcome)) == 0);
      const auto num_tokens = static_cast<size_t>(expected.outcomes[i].num_tokens);
      CHECK(std::memcmp(found.tokens + i * most, expected.tokens + i * most,
                        num_tokens * sizeof(int32_t)) == 0);
    }
  }
}

std::vector<Output> run_alike(Runner& runner, const std::vector<Job>& jobs,
                              const Schedule& schedule) {
  return testing::run(runner, jobs, schedule,
                      [&](const StepLease& lease) { check_outcomes(runner, lease); });
}

std::vector<Output> on_one(const RunnerConfig& config, const std::vector<Job>& jobs,
                           const Schedule& schedule) {
  return testing::run(*make_runner(config), jobs, schedule);
}

/// A step of one sequence's whole prompt, which must fit; its lease is given up.
void run_prompt(Runner& runner, const testing::Ids& prompt) {
  const auto length = static_cast<int>(prompt.size());
  const int slot = runner.add_sequence(prompt, length, {}, {});
  const std::vector<SpanRequest> request{{slot, length, 0}};
  const auto lease = runner.reserve(request);
  runner.launch(*lease);
  runner.collect(*lease);
}

RunnerConfig long_config() {
  RunnerConfig config = testing::small_device_config();
  config.max_num_batched_tokens = 1200;
  config.max_model_len = 1300;
  config.max_num_logits_rows = 256;
  return config;
}

using Bits = std::vector<uint32_t>;
Bits bits_of(const std::vector<float>& values) {
  Bits found(values.size());
  std::memcpy(found.data(), values.data(), values.size() * sizeof(float));
  return found;
}

}  // namespace

TEST(texts_are_those_of_one_device) {
  CHECK_EQ(loads_eagerly, 0);
  const std::vector<Job> jobs = testing::mixed_device_jobs();
  for (const std::string& method : testing::methods()) {
    RunnerConfig config = config_of(method);
    config.adaptive = false;
    const Schedule schedule{.chunk = 64, .max_drafts = config.max_draft_tokens};
    const std::vector<Output> expected = on_one(config, jobs, schedule);
    for (const int num_ranks : rank_counts) {
      const auto runner = make_runner(shared(config, num_ranks));
      CHECK_EQ(runner->num_steps_ahead(), 1);
      for (const int chunk : {64, 5}) {
        Schedule other = schedule;
        other.chunk = chunk;
        check_same(run_alike(*runner, jobs, other), expected);
      }
      CHECK_GT(runner->prefixes().num_found(), 0);
    }
  }
}

TEST(planned_steps_have_the_text_of_one_device) {
  const std::vector<Job> jobs = testing::mixed_device_jobs();
  for (const char* method : {"ngram", "eagle3"}) {
    const RunnerConfig config = config_of(method);
    const Schedule schedule{.chunk = 64, .max_drafts = config.max_draft_tokens};
    const std::vector<Output> expected = on_one(config, jobs, schedule);
    for (const int num_ranks : rank_counts) {
      const auto runner = make_runner(shared(config, num_ranks));
      CHECK(!runner->measure_step_times(0.5).empty());
      check_same(run_alike(*runner, jobs, schedule), expected);
    }
  }
}

TEST(drafts_from_the_host_go_to_all) {
  const std::vector<Job> jobs = testing::mixed_device_jobs();
  RunnerConfig config = testing::small_device_config();
  config.adaptive = false;
  config.max_draft_tokens = 16;
  const Schedule schedule{.chunk = 64, .max_drafts = 16};
  const std::vector<Output> expected =
      on_one(config_of("none"), jobs, {.chunk = 64, .max_drafts = 0});
  std::vector<testing::Ids> texts;
  for (const Output& output : expected) texts.push_back(output.tokens);
  auto drafter = std::make_unique<testing::TreeDrafter>(testing::oracle_of(jobs, texts));
  const auto runner = make_runner(shared(config), std::move(drafter));
  check_same(run_alike(*runner, jobs, schedule), expected);
  CHECK_LT(runner->stats().num_steps, 30);
}

TEST(removal_and_abandoned_steps_change_nothing) {
  const std::vector<Job> jobs = testing::mixed_device_jobs();
  for (const char* method : {"none", "ngram", "eagle3"}) {
    RunnerConfig config = config_of(method);
    config.adaptive = false;
    const int max_drafts = config.max_draft_tokens;
    const std::vector<Output> expected =
        on_one(config, jobs, {.chunk = 33, .max_drafts = max_drafts});
    for (const Schedule& schedule :
         {Schedule{.chunk = 33, .max_drafts = max_drafts, .remove_every = 3},
          Schedule{.chunk = 9, .max_drafts = max_drafts, .remove_every = 5, .abandon_every = 7}}) {
      const auto runner = make_runner(shared(config));
      const std::vector<Output> outputs = testing::run(*runner, jobs, schedule);
      for (size_t i = 0; i < jobs.size(); ++i) CHECK_EQ(outputs[i].tokens, expected[i].tokens);
      CHECK_EQ(runner->num_free_pages(), 256);
    }
  }
}

// Rows of all ranks, rows that have owners, and slices of these.
TEST(prompts_have_the_logits_of_one_device_on_all) {
  const auto whole = make_runner(long_config());
  for (const int num_ranks : rank_counts) {
    const auto runner = make_runner(shared(long_config(), num_ranks));
    for (Runner* each : {whole.get(), runner.get()}) each->set_capture({0, 2});
    DeviceProbe& probe = device_step(*runner).probe();
    for (const int length : {1, 7, 100, 256, 300, 512, 513, 1100}) {
      const testing::Ids prompt = random_prompt(length, length, kVocab);
      run_prompt(*whole, prompt);
      const Bits expected = bits_of(whole->backend().last_logits());
      const Bits captured = bits_of(whole->backend().last_features());
      CHECK(!expected.empty() && !captured.empty());
      run_prompt(*runner, prompt);
      for (int rank = 0; rank < num_ranks; ++rank) {
        probe.look_at(device_step(*runner).ranks()[rank]);
        CHECK(bits_of(runner->backend().last_logits()) == expected);
        CHECK(bits_of(runner->backend().last_features()) == captured);
      }
      for (Runner* each : {whole.get(), runner.get()}) {
        for (const int slot : each->table().slots_in_use()) each->remove_sequence(slot);
      }
    }
  }
}

TEST(long_prompts_have_the_text_of_one_device) {
  std::vector<Job> jobs;
  for (int i = 0; i < 3; ++i) {
    Job job{random_prompt(40 + i, 700 + 250 * i, kVocab), {}};
    job.params.max_tokens = 20;
    job.params.num_logprobs = 2;
    if (i == 1) job.params.temperature = 0.8f;
    jobs.push_back(job);
  }
  const Schedule schedule{.chunk = 390, .max_drafts = 4};
  RunnerConfig config = long_config();
  config.method = "ngram";
  config.adaptive = false;
  const std::vector<Output> expected = on_one(config, jobs, schedule);
  for (const int num_ranks : rank_counts) {
    check_same(run_alike(*make_runner(shared(config, num_ranks)), jobs, schedule), expected);
  }
}

TEST(a_rank_that_fails_ends_the_engine) {
  const int num_ranks = rank_counts.back();
  for (const std::string& failing : {std::string("rank 0"), last_of(num_ranks)}) {
    const auto runner = make_runner(shared(testing::small_device_config(), num_ranks));
    run_prompt(*runner, random_prompt(1, 20, kVocab));
    runner->set_stage_hook([&](const char* stage) {
      if (stage == failing) throw std::runtime_error("broken");
    });
    const std::string said = "could not do its part of a step; the engine ends: broken";
    CHECK_THROWS(run_prompt(*runner, random_prompt(2, 20, kVocab)), DeviceError, said);
    runner->set_stage_hook(nullptr);
    CHECK_THROWS(run_prompt(*runner, random_prompt(3, 20, kVocab)), DeviceError, said);
    CHECK_THROWS(runner->check_integrity(), DeviceError, said);
  }
}

TEST(a_call_that_fails_ends_the_engine_or_the_request) {
  const auto start = [] {
    return make_runner(shared(testing::small_device_config(), rank_counts.back()));
  };
  const auto runner = start();
  device::fail_check(0);
  run_prompt(*runner, random_prompt(1, 20, kVocab));
  const int64_t num_calls = device::fail_check(0);
  CHECK_GT(num_calls, 20);
  for (int64_t call = 1; call <= num_calls; call += 1 + num_calls / 12) {
    const auto other = start();
    device::fail_check(call);
    CHECK_THROWS(run_prompt(*other, random_prompt(1, 20, kVocab)), DeviceError,
                 "a failure that a test asked for");
    device::fail_check(0);
  }
}

TEST(a_rank_that_is_late_ends_the_engine_in_time) {
  const int num_ranks = rank_counts.back();
  for (const std::string& late : {std::string("rank 0"), last_of(num_ranks)}) {
    RunnerConfig config = shared(testing::small_device_config(), num_ranks);
    config.exchange_deadline_s = 0.2;
    const auto runner = make_runner(config);
    run_prompt(*runner, random_prompt(1, 20, kVocab));
    runner->set_stage_hook([&](const char* stage) {
      if (stage == late) std::this_thread::sleep_for(std::chrono::seconds(1));
    });
    const auto begin = std::chrono::steady_clock::now();
    CHECK_THROWS(run_prompt(*runner, random_prompt(2, 20, kVocab)), DeviceError,
                 "waited 0.2 s for another GPU's part of a step; the engine ends");
    CHECK_THROWS(run_prompt(*runner, random_prompt(3, 20, kVocab)), DeviceError, "the engine ends");
    CHECK_THROWS(runner->check_integrity(), DeviceError, "the engine ends");
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    CHECK_LT(taken.count(), 5.0);
  }
}

TEST(steps_count_rounds_and_waits) {
  using std::chrono::milliseconds;
  constexpr auto kDelay = milliseconds(50);
  const RunnerConfig config = testing::small_device_config();
  const auto whole = make_runner(config);
  run_prompt(*whole, random_prompt(1, 20, kVocab));
  CHECK(whole->stats().exchange.empty());

  const int num_ranks = rank_counts.back();
  const auto runner = make_runner(shared(config, num_ranks));
  runner->measure_step_times(0.05);
  const auto step = [&](int seed) {
    const std::vector<ExchangeCounts> before = runner->stats().exchange;
    run_prompt(*runner, random_prompt(seed, 20, kVocab));
    std::vector<ExchangeCounts> counts = runner->stats().exchange;
    CHECK_EQ(counts.size(), static_cast<size_t>(num_ranks));
    for (size_t rank = 0; rank < before.size(); ++rank) {
      counts[rank].num_rounds -= before[rank].num_rounds;
      counts[rank].wait_ns -= before[rank].wait_ns;
    }
    return counts;
  };
  const auto delay_ns = static_cast<uint64_t>(std::chrono::nanoseconds(kDelay).count());
  for (const int late : {0, num_ranks - 1}) {
    runner->set_stage_hook(nullptr);
    step(2);
    runner->set_stage_hook([&](const char* stage) {
      if (stage == "rank " + std::to_string(late)) std::this_thread::sleep_for(kDelay);
    });
    const std::vector<ExchangeCounts> counts = step(3);
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto [num_rounds, wait_ns] = counts[static_cast<size_t>(rank)];
      CHECK_EQ(num_rounds, static_cast<uint64_t>(2 * config.target.num_layers()));
      CHECK_EQ(wait_ns > delay_ns / 2, rank != late);
      CHECK_LT(wait_ns, 10 * delay_ns);
    }
  }
}

TEST(a_drafter_for_one_device_is_refused) {
  class OnDevice final : public Drafter {
   public:
    const DrafterNeeds& needs() const override { return needs_; }
    bool works_on_arrays() const override { return true; }

   private:
    DrafterNeeds needs_;
  };
  CHECK_THROWS(Runner(shared(testing::small_device_config()), 256, std::make_unique<OnDevice>()),
               ArgumentError, "each needs a drafter of its own");
}
