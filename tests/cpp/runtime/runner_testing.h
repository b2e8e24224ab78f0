#pragma once

/// What the tests of the runner share, on the CPU and on CUDA.

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "check_test.h"
#include "runtime/runner.h"

namespace openspec::testing {

using Ids = std::vector<int32_t>;

/// For the CPU.
inline TargetConfig small_target(int num_layers, int vocab_size) {
  TargetConfig target = {.hidden_size = 48,
                         .num_layers = num_layers,
                         .num_q_heads = 4,
                         .num_kv_heads = 2,
                         .head_dim = 32,
                         .intermediate_size = 80,
                         .vocab_size = vocab_size,
                         .rms_norm_eps = 1e-6f,
                         .tie_word_embeddings = true,
                         .inv_freq = {},
                         .rope_scale = 1.0f};
  for (int i = 0; i < 16; ++i) {
    target.inv_freq.push_back(std::pow(10000.0f, -static_cast<float>(i) / 16.0f));
  }
  return target;
}

inline void load_random_weights(Weights& weights, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (const TensorSpec& spec : weights.expected_tensors()) {
    if (spec.is_token_map) {
      // Every second token or so: entry i stands for token 2 i.
      std::vector<int64_t> offsets(static_cast<size_t>(spec.shape[0]));
      for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = static_cast<int64_t>(i);
      weights.load_offsets(spec.name, offsets);
      continue;
    }
    const bool is_norm = spec.shape.size() == 1;
    int64_t count = 1;
    for (int64_t size : spec.shape) count *= size;
    std::vector<uint16_t> data(static_cast<size_t>(count));
    for (uint16_t& value : data) {
      const float real = is_norm ? 1.0f : 0.4f * normal(random);
      value = static_cast<uint16_t>(std::bit_cast<uint32_t>(real) >> 16);
    }
    weights.load(spec.name, data.data(), data.size() * 2, DType::kBF16);
  }
}

inline void load_random_weights(Runner& runner) {
  load_random_weights(runner.target().weights(), 11);
  if (runner.drafter().weights() != nullptr) load_random_weights(*runner.drafter().weights(), 12);
  runner.finish_loading();
}

/// Proposes what a table of known continuations says, right or wrong.
class ScriptedDrafter final : public Drafter {
 public:
  explicit ScriptedDrafter(std::function<Ids(std::span<const int32_t>, int)> script)
      : script_(std::move(script)) {
    needs_.num_speculative_tokens = 4;
  }
  const DrafterNeeds& needs() const override { return needs_; }
  void propose_on_host(const SequenceTable& table, std::span<const ProposeRequest> requests,
                       std::span<Draft> drafts) override {
    for (size_t i = 0; i < requests.size(); ++i) {
      for (int32_t token : script_(table.tokens(requests[i].slot), requests[i].num_wanted)) {
        drafts[i].append(token);
      }
    }
  }
  void observe(std::span<const CommittedRows> rows) override {
    for (const CommittedRows& row : rows) num_observed += static_cast<int>(row.tokens.size());
  }
  int num_observed = 0;

 private:
  DrafterNeeds needs_;
  std::function<Ids(std::span<const int32_t>, int)> script_;
};

/// Hides what a script says among siblings that are wrong.
class TreeDrafter final : public Drafter {
 public:
  explicit TreeDrafter(std::function<Ids(std::span<const int32_t>, int)> script)
      : script_(std::move(script)) {
    needs_.num_speculative_tokens = 16;
  }
  const DrafterNeeds& needs() const override { return needs_; }
  void propose_on_host(const SequenceTable& table, std::span<const ProposeRequest> requests,
                       std::span<Draft> drafts) override {
    for (size_t i = 0; i < requests.size(); ++i) {
      const std::span<const int32_t> known = table.tokens(requests[i].slot);
      int32_t above = -1;
      for (int32_t token : script_(known, requests[i].num_wanted)) {
        const size_t place = (known.size() + drafts[i].tokens.size()) % 3;
        for (size_t k = 0; k < 3; ++k) {
          drafts[i].tokens.push_back(k == place ? token : token ^ static_cast<int32_t>(k + 1));
          drafts[i].parents.push_back(above);
        }
        above = drafts[i].size() - 3 + static_cast<int32_t>(place);
      }
    }
  }
  /// Tokens and features of all committed rows.
  void observe(std::span<const CommittedRows> committed) override {
    for (const CommittedRows& part : committed) {
      const auto* features = static_cast<const float*>(part.features);
      for (size_t i = 0; i < part.tokens.size(); ++i) {
        const auto row = static_cast<size_t>(part.rows[i]);
        seen[{part.slot, part.first_position + static_cast<int>(i)}] = {
            part.tokens[i], features == nullptr ? 0.0f : features[row * width]};
      }
    }
  }
  std::map<std::pair<int, int>, std::pair<int32_t, float>> seen;
  size_t width = 0;

 private:
  DrafterNeeds needs_;
  std::function<Ids(std::span<const int32_t>, int)> script_;
};

struct Job {
  Ids prompt;
  SequenceParams params;
};

inline Ids random_prompt(int seed, int length, int vocab_size) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  Ids tokens;
  for (int i = 0; i < length; ++i) {
    tokens.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(vocab_size)));
  }
  return tokens;
}

/// Runs the jobs together; returns each one's output.
inline std::vector<Ids> run(Runner& runner, const std::vector<Job>& jobs, int chunk) {
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
    int rows_left = runner.config().max_num_batched_tokens;
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (done[i]) continue;
      const SequenceTable& table = runner.table();
      const int num_left = table.num_tokens(slots[i]) - table.kv_len(slots[i]);
      const int num_new = std::min({num_left, chunk, rows_left});
      if (num_new == 0) continue;
      rows_left -= num_new;
      const int room = runner.config().max_model_len - table.num_tokens(slots[i]) - 1;
      const int num_drafts =
          std::max(0, std::min({runner.config().num_speculative_tokens, room, rows_left}));
      rows_left -= num_drafts;
      requests.push_back({slots[i], num_new, num_drafts});
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
      if (results[k].finish == FinishReason::kRunning) continue;
      runner.remove_sequence(slots[i]);
      done[i] = true;
      ++num_done;
    }
  }
  runner.check_integrity();
  CHECK_EQ(runner.stats().num_drafter_failures, 0);
  return outputs;
}

/// Greedy and sampled, of several lengths.
inline std::vector<Job> mixed_jobs(int max_tokens, int vocab_size) {
  std::vector<Job> jobs;
  for (int i = 0; i < 6; ++i) {
    Job job{random_prompt(i, 9 + 5 * i, vocab_size), {}};
    job.params.max_tokens = max_tokens + i;
    job.params.seed = static_cast<uint64_t>(100 + i);
    job.params.num_speculative_tokens = 4;
    if (i % 2 == 1) job.params.temperature = 0.9f;
    if (i == 3) job.params.top_k = 8;
    jobs.push_back(job);
  }
  return jobs;
}

}  // namespace openspec::testing
