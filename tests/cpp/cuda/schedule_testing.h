#pragma once

/// Runners on CUDA and schedules under which they run ahead of what is known.

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "runtime/runner_testing.h"

namespace openspec::testing {

inline constexpr int kVocab = 544;

inline RunnerConfig small_device_config() {
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
inline const std::string kTrees = "eagle3 trees", kBlockTrees = "dflash trees",
                         kPairTrees = "dspark trees";

inline std::vector<std::string> methods() {
  std::vector<std::string> names = drafter_names();
  names.push_back(kTrees);
  names.push_back(kBlockTrees);
  names.push_back(kPairTrees);
  return names;
}

inline RunnerConfig config_of(const std::string& method) {
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
  RunnerConfig config = small_device_config();
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
  if (method == "mtp") {
    HeadSpec& head = config.head.emplace();
    head.layers = {config.target.layers[0]};
    head.capture_layers = {2};
    head.captures_normed = true;
    head.draft_vocab_size = kVocab;
    head.has_head = false;
  }
  if (method == "draft_model") {
    HeadSpec& head = config.head.emplace();
    head.model.emplace(config.target);
    head.model->hidden_size = 192;
    head.model->layers.assign(2, {testing::attention_of(2, 1, 128), DenseMlpSpec{416}});
    head.layers = head.model->layers;
    head.draft_vocab_size = kVocab;
    head.has_embedding = true;
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

using LookAtStep = std::function<void(const StepLease&)>;

/// Runs all jobs together under a schedule; `look` is called for each step that was collected.
inline std::vector<Output> run(Runner& runner, const std::vector<Job>& jobs,
                               const Schedule& schedule, const LookAtStep& look = {}) {
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
    if (look) look(*step.lease);
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

inline std::vector<Job> mixed_device_jobs() {
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

inline std::unique_ptr<Runner> make_runner(RunnerConfig config,
                                           std::unique_ptr<Drafter> drafter = nullptr) {
  auto runner = std::make_unique<Runner>(config, 256, std::move(drafter));
  load_random_weights(*runner);
  return runner;
}

inline void check_same(const std::vector<Output>& outputs, const std::vector<Output>& expected) {
  CHECK_EQ(outputs.size(), expected.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    CHECK_EQ(outputs[i].tokens, expected[i].tokens);
    CHECK(outputs[i].logprobs == expected[i].logprobs);
  }
}

}  // namespace openspec::testing
