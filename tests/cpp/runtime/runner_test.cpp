#include "runtime/runner.h"

#include "check_test.h"
#include "core/check.h"
#include "runtime/runner_testing.h"

using namespace openspec;
using testing::Ids;
using testing::Job;
using testing::load_random_weights;
using testing::ScriptedDrafter;
using testing::TreeDrafter;

namespace {

constexpr int kVocab = 61;

RunnerConfig small_config() {
  RunnerConfig config;
  config.target = testing::small_target(3, kVocab);
  config.page_size = 4;
  config.max_num_seqs = 6;
  config.max_model_len = 96;
  config.max_num_batched_tokens = 128;
  config.max_num_logits_rows = 5;  // fewer than a step samples, so that blocks are crossed
  config.num_threads = 2;
  config.num_speculative_tokens = 4;
  return config;
}

Ids random_prompt(int seed, int length) { return testing::random_prompt(seed, length, kVocab); }

/// Runs the jobs together with prefill chunks of `chunk` tokens; returns each one's output.
std::vector<Ids> run(Runner& runner, const std::vector<Job>& jobs, int chunk, int max_drafts) {
  std::vector<int> slots;
  std::vector<bool> done(jobs.size(), false);
  for (const Job& job : jobs) {
    slots.push_back(
        runner.add_sequence(job.prompt, static_cast<int>(job.prompt.size()), job.params, {}));
  }
  std::vector<Ids> outputs(jobs.size());
  for (size_t num_done = 0; num_done < jobs.size();) {
    std::vector<SpanRequest> requests;
    std::vector<size_t> job_of;
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (done[i]) continue;
      const SequenceTable& table = runner.table();
      const int left = table.num_tokens(slots[i]) - table.kv_len(slots[i]);
      const int room = runner.config().max_model_len - table.num_tokens(slots[i]);
      requests.push_back({slots[i], std::min(left, chunk), std::min(max_drafts, room - 1)});
      job_of.push_back(i);
    }
    auto lease = runner.reserve(requests);
    runner.launch(*lease);
    const std::vector<SpanResult> results = runner.collect(*lease);
    runner.commit(*lease);
    runner.check_integrity();
    for (size_t k = 0; k < results.size(); ++k) {
      const size_t i = job_of[k];
      outputs[i].insert(outputs[i].end(), results[k].token_ids.begin(), results[k].token_ids.end());
      const SequenceTable& table = runner.table();
      if (!results[k].token_ids.empty()) {
        CHECK_EQ(table.num_tokens(slots[i]), table.kv_len(slots[i]) + 1);
      }
      if (results[k].finish != FinishReason::kRunning) {
        runner.remove_sequence(slots[i]);
        done[i] = true;
        ++num_done;
      }
    }
  }
  runner.check_integrity();
  return outputs;
}

std::vector<Job> mixed_jobs() {
  std::vector<Job> jobs;
  for (int i = 0; i < 5; ++i) {
    Job job{random_prompt(i, 9 + 5 * i), {}};
    job.params.max_tokens = 20 + i;
    job.params.seed = static_cast<uint64_t>(100 + i);
    if (i % 2 == 1) job.params.temperature = 0.9f;
    if (i == 2) job.params.frequency_penalty = 0.7f;
    if (i == 3) job.params.top_k = 8;
    if (i == 4) job.params.repetition_penalty = 1.3f;
    jobs.push_back(job);
  }
  return jobs;
}

std::vector<Ids> plain(const std::vector<Job>& jobs) {
  Runner runner(small_config(), 200);
  load_random_weights(runner);
  return run(runner, jobs, 64, 0);
}

}  // namespace

TEST(output_does_not_depend_on_chunks_batch_or_threads) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  for (int chunk : {1, 3, 7}) {
    RunnerConfig config = small_config();
    config.num_threads = chunk;
    Runner runner(config, 200);
    load_random_weights(runner);
    CHECK(run(runner, jobs, chunk, 0) == expected);
  }
  for (size_t i = 0; i < jobs.size(); ++i) {
    Runner runner(small_config(), 50);
    load_random_weights(runner);
    CHECK_EQ(run(runner, {jobs[i]}, 64, 0)[0], expected[i]);
  }
}

TEST(output_does_not_depend_on_drafts_right_wrong_or_absurd) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  // Knows each job's whole text; from there: right, right for a while, wrong, no tokens at all.
  const auto oracle = [&](std::span<const int32_t> known, int count) {
    for (size_t i = 0; i < jobs.size(); ++i) {
      Ids text = jobs[i].prompt;
      text.insert(text.end(), expected[i].begin(), expected[i].end());
      if (text.size() < known.size() || !std::equal(known.begin(), known.end(), text.begin()))
        continue;
      const size_t end = std::min(text.size(), known.size() + static_cast<size_t>(count));
      return Ids(text.begin() + static_cast<std::ptrdiff_t>(known.size()),
                 text.begin() + static_cast<std::ptrdiff_t>(end));
    }
    return Ids{};
  };
  using Script = std::function<Ids(std::span<const int32_t>, int)>;
  const std::vector<Script> scripts{
      oracle,
      [&](std::span<const int32_t> known, int count) {
        Ids draft = oracle(known, count);
        if (draft.size() > 2) draft[known.size() % 3] = static_cast<int32_t>(known.size() % kVocab);
        return draft;
      },
      [](std::span<const int32_t> known, int count) {
        return Ids(static_cast<size_t>(count), known.back());
      },
      [](std::span<const int32_t>, int) {
        return Ids{3, -1, kVocab, INT32_MAX, INT32_MIN, 5, 5, 5};
      },
      [](std::span<const int32_t>, int) -> Ids { throw std::runtime_error("no drafts today"); },
  };
  for (size_t k = 0; k < scripts.size(); ++k) {
    for (bool adaptive : {false, true}) {
      RunnerConfig config = small_config();
      config.adaptive = adaptive;
      Runner runner(config, 200, std::make_unique<ScriptedDrafter>(scripts[k]));
      load_random_weights(runner);
      if (adaptive) CHECK(!runner.measure_step_times(0.2).empty());
      CHECK(run(runner, jobs, 5, 4) == expected);
      if (k == 0 && !adaptive) CHECK_LT(runner.stats().num_steps, 20);
      CHECK_EQ(runner.stats().num_drafter_failures > 0, k == 4);
    }
  }
}

TEST(trees_change_no_text_and_leave_the_kv_of_plain_decoding) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  const auto oracle = [&](std::span<const int32_t> known, int count) {
    for (size_t i = 0; i < jobs.size(); ++i) {
      Ids text = jobs[i].prompt;
      text.insert(text.end(), expected[i].begin(), expected[i].end());
      if (text.size() < known.size() || !std::equal(known.begin(), known.end(), text.begin()))
        continue;
      const size_t end = std::min(text.size(), known.size() + static_cast<size_t>(count / 3));
      return Ids(text.begin() + static_cast<std::ptrdiff_t>(known.size()),
                 text.begin() + static_cast<std::ptrdiff_t>(end));
    }
    return Ids{};
  };
  const auto run_with = [&](const std::function<Ids(std::span<const int32_t>, int)>& script,
                            int max_drafts, int& num_steps) {
    RunnerConfig config = small_config();
    config.num_speculative_tokens = 16;
    config.adaptive = false;
    config.enable_prefix_caching = false;
    auto drafter = std::make_unique<TreeDrafter>(script);
    TreeDrafter& observer = *drafter;
    observer.width = static_cast<size_t>(2 * config.target.hidden_size);
    Runner runner(config, 200, std::move(drafter));
    load_random_weights(runner);
    runner.set_capture({0, 2});
    CHECK(run(runner, jobs, 5, max_drafts) == expected);
    CHECK_EQ(runner.stats().num_drafter_failures, 0);
    num_steps = static_cast<int>(runner.stats().num_steps);
    return observer.seen;
  };
  int num_plain_steps = 0, num_steps = 0;
  const auto plain_rows = run_with(oracle, 0, num_plain_steps);
  for (const int max_drafts : {16, 14, 4}) {
    CHECK(run_with(oracle, max_drafts, num_steps) == plain_rows);
    CHECK_LT(num_steps, num_plain_steps);
  }
  // No token at all ends the tree.
  const auto half_right = [&](std::span<const int32_t> known, int count) {
    Ids tokens = oracle(known, count);
    if (known.size() % 2 == 0 && tokens.size() > 1) tokens[1] = -5;
    return tokens;
  };
  CHECK(run_with(half_right, 16, num_steps) == plain_rows);
}

TEST(prefix_hit_equals_miss) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  Runner runner(small_config(), 200);
  load_random_weights(runner);
  CHECK(run(runner, jobs, 64, 0) == expected);
  CHECK_EQ(runner.prefix_cache_stats().second, 0);
  CHECK(run(runner, jobs, 64, 0) == expected);
  CHECK_GT(runner.prefix_cache_stats().second, 0);
}

TEST(prefix_is_not_shared_across_salts) {
  Runner runner(small_config(), 50);
  load_random_weights(runner);
  const Job job{random_prompt(1, 17), {}};
  run(runner, {job}, 64, 0);
  const std::vector<uint8_t> salt{1};
  const int slot = runner.add_sequence(job.prompt, 17, job.params, salt);
  CHECK_EQ(runner.table().kv_len(slot), 0);
  const int other = runner.add_sequence(job.prompt, 17, job.params, {});
  CHECK_EQ(runner.table().kv_len(other), 16);
}

TEST(observer_sees_every_committed_row_once) {
  const std::vector<Job> jobs = mixed_jobs();
  RunnerConfig config = small_config();
  config.enable_prefix_caching = false;
  auto drafter = std::make_unique<ScriptedDrafter>([](std::span<const int32_t> known, int count) {
    return Ids(static_cast<size_t>(count), known.back());
  });
  const ScriptedDrafter& observer = *drafter;
  Runner runner(config, 200, std::move(drafter));
  load_random_weights(runner);
  const std::vector<Ids> outputs = run(runner, jobs, 5, 4);
  int expected = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    expected += static_cast<int>(jobs[i].prompt.size() + outputs[i].size()) - 1;
  }
  CHECK_EQ(observer.num_observed, expected);
}

TEST(failure_in_any_stage_loses_nothing) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  for (const std::string stage : {"reserve", "propose", "score", "choose", "accept", "commit"}) {
    RunnerConfig config = small_config();
    config.enable_prefix_caching = false;
    Runner runner(config, 60);
    load_random_weights(runner);
    const Job& job = jobs[3];
    const int slot =
        runner.add_sequence(job.prompt, static_cast<int>(job.prompt.size()), job.params, {});
    Ids output;
    for (int step = 0; runner.table().num_tokens(slot) <
                       static_cast<int>(job.prompt.size()) + job.params.max_tokens;
         ++step) {
      const int left = runner.table().num_tokens(slot) - runner.table().kv_len(slot);
      const std::vector<SpanRequest> request{{slot, left, 4}};
      const int num_free = runner.num_free_pages();
      bool failed = false;
      runner.set_stage_hook([&](const char* now) {
        if (step % 3 == 1 && !failed && stage == now) {
          failed = true;
          throw std::runtime_error("injected");
        }
      });
      while (true) {
        try {
          auto lease = runner.reserve(request);
          runner.launch(*lease);
          const Ids tokens = runner.collect(*lease)[0].token_ids;
          runner.commit(*lease);
          output.insert(output.end(), tokens.begin(), tokens.end());
          break;
        } catch (const std::runtime_error&) {
          CHECK_EQ(runner.num_free_pages(), num_free);
          runner.check_integrity();
        }
      }
      CHECK_EQ(failed, step % 3 == 1);
    }
    CHECK_EQ(output, expected[3]);
    runner.remove_sequence(slot);
    CHECK_EQ(runner.num_free_pages(), 60);
  }
}

TEST(too_few_pages_take_nothing) {
  Runner runner(small_config(), 4);
  load_random_weights(runner);
  const Ids prompt = random_prompt(1, 20);
  const int slot = runner.add_sequence(prompt, 20, {}, {});
  const std::vector<SpanRequest> request{{slot, 20, 0}};
  CHECK_EQ(runner.num_pages_needed(slot, 20), 5);
  CHECK_THROWS(runner.reserve(request), OutOfPages, "needs 5 pages");
  CHECK_EQ(runner.num_free_pages(), 4);
}

TEST(stop_inside_an_accepted_run_ends_it) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  Job job = jobs[0];
  const int32_t stop = expected[0][5];
  const auto first = std::find(expected[0].begin(), expected[0].end(), stop);
  job.params.stop_ids = {stop};
  Ids text = job.prompt;
  text.insert(text.end(), expected[0].begin(), expected[0].end());
  RunnerConfig config = small_config();
  Runner runner(config, 60, std::make_unique<ScriptedDrafter>([&](auto known, int count) {
                  const size_t end =
                      std::min(text.size(), known.size() + static_cast<size_t>(count));
                  return Ids(text.begin() + static_cast<std::ptrdiff_t>(known.size()),
                             text.begin() + static_cast<std::ptrdiff_t>(end));
                }));
  load_random_weights(runner);
  CHECK_EQ(run(runner, {job}, 64, 4)[0], Ids(expected[0].begin(), first + 1));
}

TEST(budget_inside_an_accepted_run_ends_it) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  Ids text = jobs[0].prompt;
  text.insert(text.end(), expected[0].begin(), expected[0].end());
  for (int max_tokens = 1; max_tokens < 12; ++max_tokens) {
    Job job = jobs[0];
    job.params.max_tokens = max_tokens;
    Runner runner(small_config(), 60, std::make_unique<ScriptedDrafter>([&](auto known, int count) {
                    const size_t end =
                        std::min(text.size(), known.size() + static_cast<size_t>(count));
                    return Ids(text.begin() + static_cast<std::ptrdiff_t>(known.size()),
                               text.begin() + static_cast<std::ptrdiff_t>(end));
                  }));
    load_random_weights(runner);
    CHECK_EQ(run(runner, {job}, 64, 4)[0],
             Ids(expected[0].begin(), expected[0].begin() + max_tokens));
  }
}

TEST(context_limit_ends_a_sequence) {
  Job job{random_prompt(5, 90), {}};
  job.params.max_tokens = 1000;
  Runner runner(small_config(), 60);
  load_random_weights(runner);
  CHECK_EQ(run(runner, {job}, 64, 4)[0].size(), 6);
}

TEST(prompt_logprobs_cover_the_prompt_in_any_chunking) {
  Job job{random_prompt(5, 23), {}};
  job.params.num_prompt_logprobs = 2;
  job.params.num_logprobs = 3;
  std::vector<float> expected;
  for (int chunk : {64, 1, 6}) {
    Runner runner(small_config(), 60);
    load_random_weights(runner);
    const int slot = runner.add_sequence(job.prompt, 23, job.params, {});
    std::vector<float> values;
    Ids scored;
    while (runner.table().num_tokens(slot) == 23) {
      const std::vector<SpanRequest> request{
          {slot, std::min(chunk, 23 - runner.table().kv_len(slot)), 0}};
      auto lease = runner.reserve(request);
      runner.launch(*lease);
      const SpanResult result = runner.collect(*lease)[0];
      runner.commit(*lease);
      for (const TokenLogprobs& entry : result.prompt_logprobs) {
        CHECK_EQ(entry.token_ids.size(), 3);
        scored.push_back(entry.token_ids[0]);
        values.insert(values.end(), entry.logprobs.begin(), entry.logprobs.end());
      }
      CHECK_EQ(result.logprobs.size(), result.token_ids.size());
    }
    CHECK_EQ(scored, Ids(job.prompt.begin() + 1, job.prompt.end()));
    if (expected.empty()) expected = values;
    CHECK(values == expected);
  }
}

TEST(impossible_requests_are_refused) {
  Runner runner(small_config(), 10);
  load_random_weights(runner);
  CHECK_THROWS(runner.add_sequence(Ids{kVocab}, 1, {}, {}), ArgumentError, "vocabulary");
  CHECK_THROWS(runner.add_sequence(random_prompt(1, 96), 96, {}, {}), ArgumentError, "context");
  CHECK_THROWS(runner.remove_sequence(3), ArgumentError, "slot 3");
  CHECK_THROWS(make_drafter("unheard of", {}), ArgumentError, "there are");
  RunnerConfig config = small_config();
  config.target.num_q_heads = 3;
  CHECK_THROWS(Runner(config, 10), ArgumentError, "multiple");
}
