// The whole step on the GPU, with the host one step ahead: the text must not depend on batch,
// chunks, drafts, prefix hits, removals or failures, log-probabilities included, bit for bit.

#include "runtime/runner.h"

#include <algorithm>

#include "cuda/cuda_testing.h"
#include "cuda/schedule_testing.h"

using namespace openspec;
using testing::check_same;
using testing::config_of;
using testing::Ids;
using testing::Job;
using testing::kVocab;
using testing::make_runner;
using testing::methods;
using testing::Output;
using testing::random_prompt;
using testing::run;
using testing::Schedule;
using testing::Script;
using testing::ScriptedDrafter;
using testing::small_device_config;

namespace {

testing::NeedsDevice needs_device;

/// Each job alone, one step at a time.
std::vector<Output> plain(const std::vector<Job>& jobs) {
  std::vector<Output> outputs;
  RunnerConfig config = small_device_config();
  config.enable_prefix_caching = false;
  const auto runner = make_runner(config);
  for (const Job& job : jobs) outputs.push_back(run(*runner, {job}, {.chunk = 300, .ahead = 0})[0]);
  return outputs;
}

Script oracle_of(const std::vector<Job>& jobs, const std::vector<Output>& expected) {
  std::vector<Ids> texts;
  for (const Output& output : expected) texts.push_back(output.tokens);
  return testing::oracle_of(jobs, texts);
}

}  // namespace

TEST(text_does_not_depend_on_batch_chunks_or_running_ahead) {
  const std::vector<Job> jobs = testing::mixed_device_jobs();
  const std::vector<Output> expected = plain(jobs);
  for (const Output& output : expected) CHECK_GT(output.tokens.size(), 20);
  for (int chunk : {1, 7, 16, 64}) {
    for (int ahead : {0, 1}) {
      const auto runner = make_runner(small_device_config());
      check_same(run(*runner, jobs, {.chunk = chunk, .ahead = ahead}), expected);
      // Once more, from the prefix cache.
      check_same(run(*runner, jobs, {.chunk = chunk, .ahead = ahead}), expected);
      CHECK_GT(runner->prefixes().num_found(), 0);
    }
  }
}

TEST(text_does_not_depend_on_drafts_from_the_device) {
  const std::vector<Job> jobs = testing::mixed_device_jobs();
  const std::vector<Output> expected = plain(jobs);
  for (const std::string& method : methods()) {
    if (method == "none") continue;
    for (bool adaptive : {false, true}) {
      RunnerConfig config = config_of(method);
      config.adaptive = adaptive;
      const auto runner = make_runner(config);
      if (adaptive) CHECK(!runner->measure_step_times(1.0).empty());
      for (int chunk : {5, 64}) {
        const Schedule schedule{.chunk = chunk, .max_drafts = config.max_draft_tokens};
        check_same(run(*runner, jobs, schedule), expected);
      }
    }
  }
}

TEST(text_does_not_depend_on_drafts_from_the_host) {
  const std::vector<Job> jobs = testing::mixed_device_jobs();
  const std::vector<Output> expected = plain(jobs);
  const std::vector<Script> scripts = testing::scripts_of(oracle_of(jobs, expected), kVocab);
  for (size_t k = 0; k < scripts.size(); ++k) {
    RunnerConfig config = small_device_config();
    config.adaptive = false;
    const auto runner = make_runner(config, std::make_unique<ScriptedDrafter>(scripts[k]));
    CHECK_EQ(runner->num_steps_ahead(), 0);
    check_same(run(*runner, jobs, {.chunk = 64, .max_drafts = 4}), expected);
    CHECK_EQ(runner->stats().num_drafter_failures > 0, k == 4);
    if (k == 0) CHECK_LT(runner->stats().num_steps, 30);
  }
}

// The right drafts among wrong siblings: what is accepted does not lie behind what is known.
TEST(text_does_not_depend_on_trees_from_the_host) {
  const std::vector<Job> jobs = testing::mixed_device_jobs();
  const std::vector<Output> expected = plain(jobs);
  for (int chunk : {5, 64}) {
    RunnerConfig config = small_device_config();
    config.adaptive = false;
    config.max_draft_tokens = 16;
    auto drafter = std::make_unique<testing::TreeDrafter>(oracle_of(jobs, expected));
    const auto runner = make_runner(config, std::move(drafter));
    check_same(run(*runner, jobs, {.chunk = chunk, .max_drafts = 16}), expected);
    if (chunk == 64) CHECK_LT(runner->stats().num_steps, 30);
  }
}

TEST(removal_and_abandoned_steps_change_nothing) {
  const std::vector<Job> jobs = testing::mixed_device_jobs();
  const std::vector<Output> expected = plain(jobs);
  for (const std::string& method : methods()) {
    for (const Schedule& schedule :
         {Schedule{.chunk = 33, .remove_every = 3}, Schedule{.chunk = 33, .abandon_every = 3},
          Schedule{.chunk = 9, .remove_every = 5, .abandon_every = 7}}) {
      RunnerConfig config = config_of(method);
      config.adaptive = false;
      const auto runner = make_runner(config);
      Schedule with_drafts = schedule;
      with_drafts.max_drafts = config.max_draft_tokens;
      const std::vector<Output> outputs = run(*runner, jobs, with_drafts);
      for (size_t i = 0; i < jobs.size(); ++i) CHECK_EQ(outputs[i].tokens, expected[i].tokens);
      CHECK_EQ(runner->num_free_pages(), 256);
    }
  }
}

TEST(stop_ids_and_limits_end_a_run_on_the_device) {
  const std::vector<Job> jobs = testing::mixed_device_jobs();
  const std::vector<Output> expected = plain(jobs);
  for (size_t i = 0; i < jobs.size(); ++i) {
    for (size_t at : {size_t{0}, size_t{3}, size_t{17}}) {
      Job job = jobs[i];
      const Ids& text = expected[i].tokens;
      const int32_t stop = text[at];
      const auto first = std::find(text.begin(), text.end(), stop);
      int32_t unused = 0;
      while (std::find(text.begin(), text.end(), unused) != text.end()) ++unused;
      job.params.lists.stop_ids = {unused, stop};
      const auto runner = make_runner(config_of(at == 3 ? "ngram" : "eagle3"));
      CHECK_EQ(run(*runner, {job}, {.chunk = 64, .max_drafts = 4})[0].tokens,
               Ids(text.begin(), first + 1));
      job.params.lists.stop_ids.clear();
      job.params.max_tokens = static_cast<int>(at) + 1;
      CHECK_EQ(run(*runner, {job}, {.chunk = 64, .max_drafts = 4})[0].tokens,
               Ids(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at) + 1));
    }
  }
}

TEST(context_limit_ends_a_sequence) {
  Job job{random_prompt(5, 380, kVocab), {}};
  job.params.max_tokens = 1000;
  const auto runner = make_runner(small_device_config());
  CHECK_EQ(run(*runner, {job}, {.chunk = 200, .max_drafts = 4})[0].tokens.size(), 4);
}

TEST(prompt_logprobs_cover_the_prompt_in_any_chunking) {
  Job job{random_prompt(5, 200, kVocab), {}};
  job.params.num_prompt_logprobs = 2;
  job.params.max_tokens = 2;
  std::vector<float> expected;
  for (int chunk : {200, 1, 6, 150}) {
    const auto runner = make_runner(small_device_config());
    const testing::PromptScores scores = testing::score_prompt(*runner, job, chunk);
    CHECK_EQ(scores.tokens, Ids(job.prompt.begin() + 1, job.prompt.end()));
    if (expected.empty()) expected = scores.logprobs;
    CHECK(scores.logprobs == expected);
  }
}

TEST(logits_are_near_the_cpu_engines) {
  // The same weights and prompt on the CPU in fp32; bf16 activations err by some 2^-8 each.
  const Ids prompt = random_prompt(3, 150, kVocab);
  const auto logits_of = [&](Runner& runner) {
    const int slot = runner.add_sequence(prompt, 150, {}, {});
    const std::vector<SpanRequest> request{{slot, 150, 0}};
    auto lease = runner.reserve(request);
    runner.launch(*lease);
    runner.collect(*lease);
    std::vector<float> logits = runner.backend().last_logits();
    runner.commit(*lease);
    logits.resize(kVocab);
    return logits;
  };
  RunnerConfig config = small_device_config();
  const std::vector<float> on_gpu = logits_of(*make_runner(config));
  config.device = Device::kCpu;
  config.dtype = DType::kF32;
  config.num_threads = 4;
  const std::vector<float> on_cpu = logits_of(*make_runner(config));
  config.dtype = DType::kBF16;
  const std::vector<float> rounded = logits_of(*make_runner(config));
  double error = 0, reference_error = 0, size = 0;
  for (size_t i = 0; i < on_cpu.size(); ++i) {
    error += std::pow(static_cast<double>(on_gpu[i]) - on_cpu[i], 2);
    reference_error += std::pow(static_cast<double>(rounded[i]) - on_cpu[i], 2);
    size += std::pow(static_cast<double>(on_cpu[i]), 2);
  }
  std::printf("relative error: GPU %.5f, CPU in bf16 %.5f\n", std::sqrt(error / size),
              std::sqrt(reference_error / size));
  CHECK_LT(std::sqrt(error), 2 * std::sqrt(reference_error));
}
