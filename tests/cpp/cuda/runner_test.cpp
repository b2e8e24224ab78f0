// The whole step on the GPU, with the host one step ahead: the text must not depend on batch,
// chunks, drafts, prefix hits, removals or failures, log-probabilities included, bit for bit.

#include "runtime/runner.h"

#include <algorithm>
#include <deque>
#include <optional>

#include "cuda/cuda_testing.h"
#include "runtime/runner_testing.h"

using namespace openspec;
using testing::Ids;
using testing::Job;
using testing::load_random_weights;
using testing::random_prompt;
using testing::Script;
using testing::ScriptedDrafter;

namespace {

testing::NeedsDevice needs_device;

constexpr int kVocab = 544;

RunnerConfig small_config() {
  RunnerConfig config;
  config.target.hidden_size = 320;
  config.target.vocab_size = kVocab;
  config.target.tie_word_embeddings = true;
  config.target.layers.assign(3, {testing::attention_of(4, 2, 128), DenseMlpSpec{608}});
  config.device = Device::kCuda;
  config.dtype = DType::kBF16;
  config.page_size = 16;
  config.max_num_seqs = 8;
  config.max_model_len = 384;
  config.max_num_batched_tokens = 512;
  config.max_num_logits_rows = 64;
  config.max_draft_tokens = 4;
  return config;
}

// Drafts as trees.
const std::string kTrees = "eagle3 trees", kBlockTrees = "dflash trees",
                  kPairTrees = "dspark trees";

std::vector<std::string> methods() {
  std::vector<std::string> names = drafter_names();
  names.push_back(kTrees);
  names.push_back(kBlockTrees);
  names.push_back(kPairTrees);
  return names;
}

RunnerConfig config_of(const std::string& method) {
  if (method == kTrees) {
    RunnerConfig config = config_of("eagle3");
    config.max_draft_tokens = 9;
    config.draft_depth = 4;
    config.method_options["draft_top_k"] = int64_t{3};
    return config;
  }
  if (method == kBlockTrees || method == kPairTrees) {
    RunnerConfig config = config_of(method == kBlockTrees ? "dflash" : "dspark");
    config.max_draft_tokens = 20;
    config.draft_depth = 7;
    config.method_options["draft_top_k"] = int64_t{4};
    return config;
  }
  RunnerConfig config = small_config();
  config.method = method;
  if (method == "none") config.max_draft_tokens = 0;
  const bool is_block = method == "dflash" || method == "dspark";
  if (is_block || method == "eagle3" || method == "peagle") {
    HeadSpec& head = config.head.emplace();
    head.capture_layers = {0, 1, 2};
    head.layers.assign(method == "eagle3" ? 1 : 2, config.target.layers[0]);
    for (LayerSpec& layer : head.layers) {
      std::get<AttentionSpec>(layer.mixer).has_qk_norm = is_block;
    }
    head.draft_vocab_size = is_block ? kVocab : 272;
    head.has_head = head.has_token_map = !is_block;
    if (method != "eagle3") head.mask_token = kVocab - 1;
    if (is_block) {
      config.max_draft_tokens = 7;
      head.block_size = 8;
    }
    if (method == "dspark") {
      head.anchor_drafts = true;
      head.markov_rank = 64;
      head.has_confidence = true;
      head.confidence_sees_token = true;
    }
  }
  return config;
}

struct Output {
  Ids tokens;
  std::vector<float> logprobs;
  bool operator==(const Output&) const = default;
};

struct Schedule {
  int chunk = 64;
  int max_drafts = 0;
  int ahead = 1;          // at most what the runner allows
  int remove_every = 0;   // gives up a random sequence now and then, and starts it again
  int abandon_every = 0;  // closes all open leases now and then, as after a failure
};

/// Runs all jobs together under a schedule.
std::vector<Output> run(Runner& runner, const std::vector<Job>& jobs, const Schedule& schedule) {
  struct State {
    int slot = -1, num_planned = 0, num_choosing = 0, generation = 0;
    bool is_done = false;
  };
  struct Open {
    std::unique_ptr<StepLease> lease;
    std::vector<size_t> job_of;
    std::vector<int> generation_of;
  };
  std::vector<State> states(jobs.size());
  std::vector<Output> outputs(jobs.size());
  std::deque<Open> open;
  const auto start = [&](size_t i) {
    Ids known = jobs[i].prompt;
    known.insert(known.end(), outputs[i].tokens.begin(), outputs[i].tokens.end());
    states[i].slot =
        runner.add_sequence(known, static_cast<int>(jobs[i].prompt.size()), jobs[i].params, {});
    states[i].num_planned = runner.table().kv_len(states[i].slot);
    states[i].num_choosing = 0;
    ++states[i].generation;
  };
  for (size_t i = 0; i < jobs.size(); ++i) start(i);
  const auto finish_oldest = [&] {
    Open step = std::move(open.front());
    open.pop_front();
    const std::vector<SpanResult> results = runner.collect(*step.lease);
    runner.commit(*step.lease);
    for (size_t k = 0; k < results.size(); ++k) {
      const size_t i = step.job_of[k];
      State& state = states[i];
      if (state.is_done || state.generation != step.generation_of[k]) continue;
      if (step.lease->is_sampled[k]) --state.num_choosing;
      const SpanResult& result = results[k];
      outputs[i].tokens.insert(outputs[i].tokens.end(), result.token_ids.begin(),
                               result.token_ids.end());
      for (const TokenLogprobs& entry : result.logprobs) {
        outputs[i].logprobs.insert(outputs[i].logprobs.end(), entry.logprobs.begin(),
                                   entry.logprobs.end());
      }
      if (result.finish != FinishReason::kRunning) {
        runner.remove_sequence(state.slot);
        state.is_done = true;
      }
    }
  };
  std::mt19937 random(5);
  for (int step = 1;; ++step) {
    std::vector<SpanRequest> requests;
    Open next;
    for (size_t i = 0; i < jobs.size(); ++i) {
      State& state = states[i];
      if (state.is_done) continue;
      const int num_known = static_cast<int>(jobs[i].prompt.size() + outputs[i].tokens.size());
      const int num_out = static_cast<int>(outputs[i].tokens.size()) + state.num_choosing;
      if (num_out >= jobs[i].params.max_tokens) continue;
      const bool decodes = state.num_planned + 1 >= num_known;
      const int count = decodes ? 1 : std::min(schedule.chunk, num_known - state.num_planned);
      requests.push_back({state.slot, count, schedule.max_drafts});
      state.num_planned += count;
      next.job_of.push_back(i);
      next.generation_of.push_back(state.generation);
    }
    if (!requests.empty()) {
      next.lease = runner.reserve(requests);
      for (size_t k = 0; k < requests.size(); ++k) {
        states[next.job_of[k]].num_choosing += next.lease->is_sampled[k];
      }
      runner.launch(*next.lease);
      open.push_back(std::move(next));
    }
    if (open.empty()) break;
    if (schedule.abandon_every > 0 && step % schedule.abandon_every == 0) {
      while (!open.empty()) open.pop_back();
      for (State& state : states) {
        if (state.is_done) continue;
        state.num_planned = runner.table().kv_len(state.slot);
        state.num_choosing = 0;
      }
      continue;
    }
    if (schedule.remove_every > 0 && step % schedule.remove_every == 0) {
      const size_t i = random() % jobs.size();
      if (!states[i].is_done) {
        runner.remove_sequence(states[i].slot);
        start(i);
      }
    }
    const int ahead = std::min(schedule.ahead, runner.num_steps_ahead());
    if (static_cast<int>(open.size()) > ahead || requests.empty()) finish_oldest();
    // Planned lengths follow what was accepted.
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (states[i].is_done) continue;
      const int num_known = static_cast<int>(jobs[i].prompt.size() + outputs[i].tokens.size());
      states[i].num_planned = std::max(
          states[i].num_planned, std::min(num_known - 1, runner.table().kv_len(states[i].slot)));
    }
  }
  runner.check_integrity();
  return outputs;
}

std::vector<Job> mixed_jobs() {
  std::vector<Job> jobs;
  for (int i = 0; i < 7; ++i) {
    Job job{random_prompt(i, 9 + 37 * i, kVocab), {}};
    // Repeats, so that lookups find something.
    if (i % 2 == 0) job.prompt.insert(job.prompt.end(), job.prompt.begin(), job.prompt.end());
    if (job.prompt.size() > 300) job.prompt.resize(300);
    job.params.max_tokens = 40 + i;
    job.params.seed = static_cast<uint64_t>(100 + i);
    job.params.num_logprobs = i % 3;
    if (i % 2 == 1) job.params.temperature = 0.9f;
    if (i == 2) job.params.frequency_penalty = 0.7f;
    if (i == 3) job.params.top_k = 8;
    if (i == 4) job.params.repetition_penalty = 1.3f;
    if (i == 5) job.params.top_p = 0.8f;
    if (i == 6) {  // most of what the text has said so far must not come again behind itself
      job.params.num_bad_words = kVocab / 2;
      std::vector<int32_t>& words = job.params.lists.bad_words;
      for (int w = 1; w <= kVocab / 2; ++w) words.push_back(kVocab / 2 + 2 * w);
      for (int w = 0; w < kVocab / 2; ++w) words.insert(words.end(), {w, (7 * w + 3) % kVocab});
    }
    jobs.push_back(job);
  }
  return jobs;
}

std::unique_ptr<Runner> make_runner(RunnerConfig config,
                                    std::unique_ptr<Drafter> drafter = nullptr) {
  auto runner = std::make_unique<Runner>(config, 256, std::move(drafter));
  load_random_weights(*runner);
  return runner;
}

/// Each job alone, one step at a time.
std::vector<Output> plain(const std::vector<Job>& jobs) {
  std::vector<Output> outputs;
  RunnerConfig config = small_config();
  config.enable_prefix_caching = false;
  const auto runner = make_runner(config);
  for (const Job& job : jobs) outputs.push_back(run(*runner, {job}, {.chunk = 300, .ahead = 0})[0]);
  return outputs;
}

void check_same(const std::vector<Output>& outputs, const std::vector<Output>& expected) {
  CHECK_EQ(outputs.size(), expected.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    CHECK_EQ(outputs[i].tokens, expected[i].tokens);
    CHECK(outputs[i].logprobs == expected[i].logprobs);
  }
}

Script oracle_of(const std::vector<Job>& jobs, const std::vector<Output>& expected) {
  std::vector<Ids> texts;
  for (const Output& output : expected) texts.push_back(output.tokens);
  return testing::oracle_of(jobs, texts);
}

}  // namespace

TEST(text_does_not_depend_on_batch_chunks_or_running_ahead) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Output> expected = plain(jobs);
  for (const Output& output : expected) CHECK_GT(output.tokens.size(), 20);
  for (int chunk : {1, 7, 16, 64}) {
    for (int ahead : {0, 1}) {
      const auto runner = make_runner(small_config());
      check_same(run(*runner, jobs, {.chunk = chunk, .ahead = ahead}), expected);
      // Once more, from the prefix cache.
      check_same(run(*runner, jobs, {.chunk = chunk, .ahead = ahead}), expected);
      CHECK_GT(runner->prefixes().num_found(), 0);
    }
  }
}

TEST(text_does_not_depend_on_drafts_from_the_device) {
  const std::vector<Job> jobs = mixed_jobs();
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
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Output> expected = plain(jobs);
  const std::vector<Script> scripts = testing::scripts_of(oracle_of(jobs, expected), kVocab);
  for (size_t k = 0; k < scripts.size(); ++k) {
    RunnerConfig config = small_config();
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
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Output> expected = plain(jobs);
  for (int chunk : {5, 64}) {
    RunnerConfig config = small_config();
    config.adaptive = false;
    config.max_draft_tokens = 16;
    auto drafter = std::make_unique<testing::TreeDrafter>(oracle_of(jobs, expected));
    const auto runner = make_runner(config, std::move(drafter));
    check_same(run(*runner, jobs, {.chunk = chunk, .max_drafts = 16}), expected);
    if (chunk == 64) CHECK_LT(runner->stats().num_steps, 30);
  }
}

TEST(removal_and_abandoned_steps_change_nothing) {
  const std::vector<Job> jobs = mixed_jobs();
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
  const std::vector<Job> jobs = mixed_jobs();
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
  const auto runner = make_runner(small_config());
  CHECK_EQ(run(*runner, {job}, {.chunk = 200, .max_drafts = 4})[0].tokens.size(), 4);
}

TEST(prompt_logprobs_cover_the_prompt_in_any_chunking) {
  Job job{random_prompt(5, 200, kVocab), {}};
  job.params.num_prompt_logprobs = 2;
  job.params.max_tokens = 2;
  std::vector<float> expected;
  for (int chunk : {200, 1, 6, 150}) {
    const auto runner = make_runner(small_config());
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
  RunnerConfig config = small_config();
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
