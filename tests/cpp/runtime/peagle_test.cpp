// A head with random weights and masks: the text stays that of plain decoding, whatever it drafts.

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

RunnerConfig head_config(int num_layers = 2) {
  RunnerConfig config = testing::small_config(4, kVocab);
  config.max_num_batched_tokens = 33;
  config.method = "peagle";
  config.max_draft_tokens = 4;
  config.adaptive = false;
  config.head = testing::small_head(num_layers, 30, /*has_qk_norm=*/false);
  config.head->has_token_map = true;
  config.head->mask_token = 60;
  return config;
}

RunnerConfig tree_config(int depth, int top_k, int num_drafts) {
  RunnerConfig config = with_option(head_config(), "draft_top_k", int64_t{top_k});
  config.draft_depth = depth;
  config.max_draft_tokens = num_drafts;
  return config;
}

std::vector<Ids> plain(const std::vector<Job>& jobs) {
  return testing::plain(testing::small_config(4, kVocab), jobs);
}

}  // namespace

TEST(the_text_is_that_of_plain_decoding) {
  const std::vector<Job> jobs = mixed_jobs(20, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  for (const int num_layers : {1, 3}) {
    check_texts(head_config(num_layers), 300, jobs, expected, {32, 7});
  }
  check_texts(tree_config(3, 2, 7), 300, jobs, expected, {32, 7});
  check_texts(tree_config(8, 10, 15), 300, jobs, expected, {32});
}

TEST(it_drafts_up_to_the_context_limit) {
  const std::vector<Job> jobs = mixed_jobs(60, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  for (const RunnerConfig& config : {head_config(), tree_config(8, 4, 15)}) {
    check_texts(config, 400, jobs, expected, {32});
  }
}

TEST(rejection_sampling_keeps_greedy_texts) {
  const std::vector<Job> jobs = mixed_jobs(12, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  RunnerConfig config = head_config();
  config.acceptance = Acceptance::kRejection;
  Runner runner(config, 300);
  testing::load_random_weights(runner);
  const std::vector<Ids> texts = testing::run(runner, jobs, 32);
  for (size_t i = 0; i < jobs.size(); ++i) {
    CHECK_EQ(texts[i] == expected[i], jobs[i].params.temperature == 0.0f);
  }
}

TEST(what_cannot_be_is_refused) {
  const auto check = [](const RunnerConfig& config, const char* error) {
    CHECK_THROWS(plan_memory(config), ArgumentError, error);
  };
  RunnerConfig config = head_config();
  config.head->mask_token = 61;
  check(config, "mask_token");
  check(tree_config(64, 2, 64), "[1, 63]");
  check(tree_config(3, 2, 257), "at most 256");
}
