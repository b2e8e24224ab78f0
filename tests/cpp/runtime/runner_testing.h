#pragma once

/// What the tests of the runner share, on the CPU and on CUDA.

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check_test.h"
#include "model/targets/shared_tensors.h"
#include "model/targets/target.h"
#include "model/weights/weights.h"
#include "runtime/runner.h"

namespace openspec::testing {

using Ids = std::vector<int32_t>;
/// What follows known tokens, at most so many.
using Script = std::function<Ids(std::span<const int32_t>, int)>;

/// Attention with RoPE of base 10000.
inline AttentionSpec attention_of(int num_q_heads, int num_kv_heads, int head_dim) {
  AttentionSpec attention;
  attention.num_q_heads = num_q_heads;
  attention.num_kv_heads = num_kv_heads;
  attention.head_dim = head_dim;
  for (int i = 0; i < head_dim / 2; ++i) {
    attention.inv_freq.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / head_dim)));
  }
  return attention;
}

/// For the CPU.
inline TargetSpec small_target(int num_layers, int vocab_size) {
  TargetSpec target;
  target.hidden_size = 48;
  target.vocab_size = vocab_size;
  target.tie_word_embeddings = true;
  target.layers.assign(static_cast<size_t>(num_layers), {attention_of(4, 2, 32), DenseMlpSpec{80}});
  return target;
}

/// A head on the states of three of the four layers of such a target.
inline HeadSpec small_head(int num_layers, int draft_vocab_size, bool has_qk_norm) {
  AttentionSpec attention = attention_of(6, 3, 32);
  attention.has_qk_norm = has_qk_norm;
  HeadSpec head;
  head.layers.assign(static_cast<size_t>(num_layers), {attention, DenseMlpSpec{112}});
  head.capture_layers = {0, 2, 3};
  head.draft_vocab_size = draft_vocab_size;
  return head;
}

/// For the CPU, without a method.
inline RunnerConfig small_config(int num_layers, int vocab_size) {
  RunnerConfig config;
  config.target = small_target(num_layers, vocab_size);
  config.page_size = 4;
  config.max_num_seqs = 6;
  config.max_model_len = 96;
  config.max_num_batched_tokens = 128;
  config.max_num_logits_rows = 5;  // fewer than a step samples, so that blocks are crossed
  config.num_threads = 2;
  return config;
}

inline RunnerConfig with_option(RunnerConfig config, const std::string& name,
                                const DrafterOption& value) {
  config.method_options[name] = value;
  return config;
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
  for (Weights* weights : runner.target_weights()) load_random_weights(*weights, 11);
  for (Weights* weights : runner.draft_weights()) load_random_weights(*weights, 12);
  runner.finish_loading();
}

/// Proposes what a table of known continuations says, right or wrong.
class ScriptedDrafter final : public Drafter {
 public:
  explicit ScriptedDrafter(Script script, bool is_costly = false) : script_(std::move(script)) {
    needs_.is_costly = is_costly;
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
  void learn(const ExecContext&, const TableView&, const CommittedStep& step) override {
    num_observed += step.num_committed;
  }
  int num_observed = 0;

 private:
  DrafterNeeds needs_;
  Script script_;
};

/// Hides what a script says among siblings that are wrong.
class TreeDrafter final : public Drafter {
 public:
  explicit TreeDrafter(Script script) : script_(std::move(script)) {}
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
  void learn(const ExecContext&, const TableView&, const CommittedStep& step) override {
    const auto* features = static_cast<const float*>(step.features);
    for (int span = 0; span < step.rows.num_spans; ++span) {
      for (int i = 0; i < step.num_computed[span]; ++i) {
        const int at = step.rows.span_begin[span] + i;
        const int row = step.committed_row == nullptr ? at : step.committed_row[at];
        seen[{step.rows.span_seq[span], step.rows.span_kv_len[span] + i}] = {
            step.rows.row_token[row], features[static_cast<size_t>(row) * width]};
      }
    }
  }
  std::map<std::pair<int, int>, std::pair<int32_t, float>> seen;
  size_t width = 0;

 private:
  DrafterNeeds needs_;
  Script script_;
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

/// Knows the jobs' whole texts.
inline Script oracle_of(const std::vector<Job>& jobs, const std::vector<Ids>& outputs) {
  std::vector<Ids> texts;
  for (size_t i = 0; i < jobs.size(); ++i) {
    texts.push_back(jobs[i].prompt);
    texts.back().insert(texts.back().end(), outputs[i].begin(), outputs[i].end());
  }
  return [texts](std::span<const int32_t> known, int count) {
    for (const Ids& text : texts) {
      if (text.size() < known.size() || !std::equal(known.begin(), known.end(), text.begin())) {
        continue;
      }
      const auto begin = text.begin() + static_cast<std::ptrdiff_t>(known.size());
      return Ids(begin, begin + std::min<std::ptrdiff_t>(count, text.end() - begin));
    }
    return Ids{};
  };
}

/// Right, right for a while, wrong, no tokens at all; the last one throws.
inline std::vector<Script> scripts_of(const Script& oracle, int vocab_size) {
  return {
      oracle,
      [=](std::span<const int32_t> known, int count) {
        Ids draft = oracle(known, count);
        if (draft.size() > 2) {
          draft[known.size() % 3] =
              static_cast<int32_t>(known.size() % static_cast<size_t>(vocab_size));
        }
        return draft;
      },
      [](std::span<const int32_t> known, int count) {
        return Ids(static_cast<size_t>(count), known.back());
      },
      [=](std::span<const int32_t>, int) {
        return Ids{3, -1, vocab_size, INT32_MAX, INT32_MIN, 5, 5, 5};
      },
      [](std::span<const int32_t>, int) -> Ids { throw std::runtime_error("no drafts today"); },
  };
}

/// Runs the jobs together with prefill chunks of `chunk` tokens; returns each one's output.
/// `max_drafts`: -1: as configured.
inline std::vector<Ids> run(Runner& runner, const std::vector<Job>& jobs, int chunk,
                            int max_drafts = -1, bool drafter_fails = false) {
  const SequenceTable& table = runner.table();
  const RunnerConfig& config = runner.config();
  if (max_drafts < 0) max_drafts = config.max_draft_tokens;
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
    int rows_left = config.max_num_batched_tokens;
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (done[i]) continue;
      const int num_left = table.num_tokens(slots[i]) - table.kv_len(slots[i]);
      const int num_new = std::min({num_left, chunk, rows_left});
      if (num_new == 0) continue;
      rows_left -= num_new;
      const int room = config.max_model_len - table.num_tokens(slots[i]) - 1;
      const int num_drafts = std::max(0, std::min({max_drafts, room, rows_left}));
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
      const Ids& tokens = results[k].token_ids;
      outputs[i].insert(outputs[i].end(), tokens.begin(), tokens.end());
      if (!tokens.empty()) CHECK_EQ(table.num_tokens(slots[i]), table.kv_len(slots[i]) + 1);
      if (results[k].finish == FinishReason::kRunning) continue;
      runner.remove_sequence(slots[i]);
      done[i] = true;
      ++num_done;
    }
  }
  runner.check_integrity();
  CHECK_EQ(runner.stats().num_drafter_failures > 0, drafter_fails);
  return outputs;
}

/// Greedy and sampled, of several lengths.
inline std::vector<Job> mixed_jobs(int max_tokens, int vocab_size) {
  std::vector<Job> jobs;
  for (int i = 0; i < 6; ++i) {
    Job job{random_prompt(i, 9 + 5 * i, vocab_size), {}};
    job.params.max_tokens = max_tokens + i;
    job.params.seed = static_cast<uint64_t>(100 + i);
    if (i % 2 == 1) job.params.temperature = 0.9f;
    if (i == 2) job.params.frequency_penalty = 0.7f;
    if (i == 3) job.params.top_k = 8;
    if (i == 4) job.params.repetition_penalty = 1.3f;
    jobs.push_back(job);
  }
  return jobs;
}

/// The jobs' outputs without drafts, from random weights.
inline std::vector<Ids> plain(const RunnerConfig& config, const std::vector<Job>& jobs) {
  Runner runner(config, 300);
  load_random_weights(runner);
  return run(runner, jobs, 64, 0);
}

/// What a runner of its own, with random weights, makes of the jobs under each size of chunks; from
/// the second on with prefix hits.
inline void check_texts(const RunnerConfig& config, int num_pages, const std::vector<Job>& jobs,
                        const std::vector<Ids>& expected, const std::vector<int>& chunks) {
  Runner runner(config, num_pages);
  load_random_weights(runner);
  if (config.adaptive) runner.measure_step_times(0.2);
  for (const int chunk : chunks) CHECK_EQ(run(runner, jobs, chunk), expected);
}

struct PromptScores {
  Ids tokens;
  std::vector<float> logprobs;
};

/// Runs one prompt in chunks.
inline PromptScores score_prompt(Runner& runner, const Job& job, int chunk) {
  const int length = static_cast<int>(job.prompt.size());
  const int slot = runner.add_sequence(job.prompt, length, job.params, {});
  PromptScores scores;
  while (runner.table().num_tokens(slot) == length) {
    const std::vector<SpanRequest> request{
        {slot, std::min(chunk, length - runner.table().kv_len(slot)), 0}};
    auto lease = runner.reserve(request);
    runner.launch(*lease);
    const SpanResult result = runner.collect(*lease)[0];
    runner.commit(*lease);
    for (const TokenLogprobs& entry : result.prompt_logprobs) {
      CHECK_EQ(static_cast<int>(entry.token_ids.size()), job.params.num_prompt_logprobs + 1);
      scores.tokens.push_back(entry.token_ids[0]);
      scores.logprobs.insert(scores.logprobs.end(), entry.logprobs.begin(), entry.logprobs.end());
    }
    if (job.params.num_logprobs >= 0) CHECK_EQ(result.logprobs.size(), result.token_ids.size());
  }
  return scores;
}

}  // namespace openspec::testing
