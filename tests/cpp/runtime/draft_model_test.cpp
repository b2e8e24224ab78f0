// A small language model with random weights as drafter: the text stays that of plain decoding,
// whatever it drafts.

#include "check_test.h"
#include "core/check.h"
#include "runtime/runner_testing.h"

using namespace openspec;
using testing::check_texts;
using testing::Ids;
using testing::Job;
using testing::mixed_jobs;
using testing::with_option;

namespace {

constexpr int kVocab = 61;

/// Another shape than the target's, with a vocabulary of its own.
HeadSpec small_model(int vocab_size, bool is_tied) {
  AttentionSpec attention = testing::attention_of(3, 1, 32);
  attention.has_qk_norm = false;
  attention.has_qkv_bias = true;
  HeadSpec head;
  head.model = testing::small_target(2, vocab_size);
  head.model->hidden_size = 64;
  head.model->tie_word_embeddings = is_tied;
  head.model->layers.assign(2, {attention, DenseMlpSpec{96}});
  head.layers = head.model->layers;
  head.draft_vocab_size = std::min(vocab_size, kVocab);
  head.unknown_token = 3;
  head.has_embedding = true;
  return head;
}

RunnerConfig model_config(int vocab_size = kVocab, bool is_tied = true) {
  RunnerConfig config = testing::small_config(4, kVocab);
  config.max_num_batched_tokens = 33;
  config.method = "draft_model";
  config.max_draft_tokens = 4;
  config.adaptive = false;
  config.head = small_model(vocab_size, is_tied);
  return config;
}

/// All drafts in one pass, as chains or trees.
RunnerConfig mask_config(int depth, int top_k, int num_drafts) {
  RunnerConfig config = with_option(model_config(), "draft_top_k", int64_t{top_k});
  config.head->mask_token = 60;
  config.draft_depth = depth;
  config.max_draft_tokens = num_drafts;
  return config;
}

/// The same with states of the target, the last one normed.
RunnerConfig states_config(RunnerConfig config, bool has_bias) {
  config.head->capture_layers = {1, 3};
  config.head->captures_normed = true;
  config.head->has_projection_bias = has_bias;
  return config;
}

/// The target itself as drafter.
RunnerConfig copy_config() {
  RunnerConfig config = model_config();
  config.head->model = config.target;
  config.head->layers = config.target.layers;
  return config;
}

std::vector<Ids> plain(const std::vector<Job>& jobs) {
  return testing::plain(testing::small_config(4, kVocab), jobs);
}

}  // namespace

TEST(the_text_is_that_of_plain_decoding) {
  const std::vector<Job> jobs = mixed_jobs(20, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  for (const int vocab_size : {kVocab, 40, 90}) {
    for (const bool is_tied : {true, false}) {
      check_texts(model_config(vocab_size, is_tied), 300, jobs, expected, {32, 7});
    }
  }
  check_texts(with_option(model_config(), "draft_window", int64_t{9}), 300, jobs, expected, {32});
  check_texts(mask_config(4, 1, 4), 300, jobs, expected, {32, 7});
  check_texts(mask_config(3, 2, 7), 300, jobs, expected, {32, 7});
  check_texts(mask_config(8, 10, 15), 300, jobs, expected, {32});
  check_texts(states_config(mask_config(4, 1, 4), true), 300, jobs, expected, {32, 7});
  check_texts(states_config(mask_config(3, 2, 7), false), 300, jobs, expected, {32, 7});
}

TEST(it_drafts_up_to_the_context_limit) {
  const std::vector<Job> jobs = mixed_jobs(60, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  check_texts(model_config(), 400, jobs, expected, {32, 5});
  check_texts(mask_config(8, 4, 15), 400, jobs, expected, {32});
}

// What it has learned of prompts, chunks, prefixes and its own drafts is then the target's state.
TEST(a_copy_of_the_target_is_always_right) {
  Runner runner(copy_config(), 300);
  for (Weights* weights : runner.target_weights()) testing::load_random_weights(*weights, 11);
  for (Weights* weights : runner.draft_weights()) testing::load_random_weights(*weights, 11);
  runner.finish_loading();
  for (const int chunk : {32, 7, 32}) {
    for (const int length : {1, 9, 30}) {
      SequenceParams params;
      params.max_tokens = 30;
      params.temperature = length == 9 ? 0.9f : 0.0f;
      const int slot =
          runner.add_sequence(testing::random_prompt(length, length, kVocab), length, params, {});
      int num_drafts = 0, num_accepted = 0;
      for (FinishReason finish = FinishReason::kRunning; finish == FinishReason::kRunning;) {
        const SequenceTable& table = runner.table();
        const int num_new = std::min(table.num_tokens(slot) - table.kv_len(slot), chunk);
        auto lease = runner.reserve(std::vector<SpanRequest>{{slot, num_new, 4}});
        runner.launch(*lease);
        const SpanResult result = runner.collect(*lease).front();
        runner.commit(*lease);
        finish = result.finish;
        num_drafts += finish == FinishReason::kRunning ? result.num_draft_tokens : 0;
        num_accepted += finish == FinishReason::kRunning ? result.num_accepted_tokens : 0;
      }
      runner.remove_sequence(slot);
      CHECK_GT(num_drafts, 16);
      CHECK_EQ(num_accepted, num_drafts);
    }
  }
}

TEST(rejection_sampling_keeps_greedy_texts) {
  const std::vector<Job> jobs = mixed_jobs(12, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  for (RunnerConfig config : {model_config(40), model_config(90), mask_config(4, 1, 4)}) {
    config.acceptance = Acceptance::kRejection;
    Runner runner(config, 300);
    testing::load_random_weights(runner);
    const std::vector<Ids> texts = testing::run(runner, jobs, 32);
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (jobs[i].params.temperature == 0.0f) CHECK_EQ(texts[i], expected[i]);
    }
  }
}

TEST(what_cannot_be_is_refused) {
  const auto check = [](const RunnerConfig& config, const char* error) {
    CHECK_THROWS(plan_memory(config), ArgumentError, error);
  };
  RunnerConfig config = model_config();
  config.head->model.reset();
  check(config, "needs a language model");
  config = model_config(40);
  config.head->unknown_token = 40;
  check(config, "unknown_token");
  config = model_config(40);
  config.head->draft_vocab_size = 50;
  check(config, "draft_vocab_size must be 40");
  config = model_config();
  config.max_draft_tokens = 16;
  check(config, "[1, 15]");
  check(with_option(model_config(), "draft_top_k", int64_t{2}), "without a mask token");
  config = mask_config(4, 1, 4);
  config.head->mask_token = 61;
  check(config, "mask_token");
  config = states_config(mask_config(4, 1, 4), false);
  config.head->capture_layers = {3, 1};
  check(config, "capture_layers must rise");
  check(mask_config(64, 2, 64), "[1, 63]");
  check(mask_config(3, 2, 257), "at most 256");
}
