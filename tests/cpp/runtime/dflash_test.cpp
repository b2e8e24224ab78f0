// A draft model with random weights is nearly always wrong: what counts here is that the text stays
// that of plain decoding and that no page, no slot and no byte is out of place.

#include "check_test.h"
#include "core/check.h"
#include "runtime/runner_testing.h"

using namespace openspec;
using testing::check_texts;
using testing::Ids;
using testing::Job;
using testing::load_random_weights;
using testing::mixed_jobs;
using testing::with_option;

namespace {

constexpr int kVocab = 64;

RunnerConfig config_of(const std::string& method, int num_drafts = 5) {
  RunnerConfig config = testing::small_config(4, kVocab);
  config.max_num_batched_tokens = 48;
  config.method = method;
  config.max_draft_tokens = num_drafts;
  config.method_options = testing::head_options();
  config.method_options["num_layers"] = int64_t{2};
  config.method_options["block_size"] = int64_t{8};
  config.method_options["mask_token"] = int64_t{kVocab - 1};
  if (method == "dspark") {
    config.method_options["anchor_drafts"] = true;
    config.method_options["markov_rank"] = int64_t{16};
    config.method_options["has_confidence"] = true;
    config.method_options["confidence_sees_token"] = true;
  }
  return config;
}

RunnerConfig tree_config(int depth, int top_k, int num_drafts,
                         const std::string& method = "dflash") {
  RunnerConfig config = with_option(config_of(method, num_drafts), "draft_top_k", int64_t{top_k});
  config.draft_depth = depth;
  return config;
}

std::vector<Ids> plain(const std::vector<Job>& jobs) {
  return testing::plain(testing::small_config(4, kVocab), jobs);
}

}  // namespace

TEST(the_text_is_that_of_plain_decoding) {
  const std::vector<Job> jobs = mixed_jobs(30, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  for (const char* method : {"dflash", "dspark"}) {
    for (const bool adaptive : {false, true}) {
      RunnerConfig config = config_of(method);
      config.adaptive = adaptive;
      check_texts(config, 300, jobs, expected, {32, 7, 1});
    }
  }
}

TEST(the_text_is_that_of_plain_decoding_with_other_blocks) {
  const std::vector<Job> jobs = mixed_jobs(30, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  for (const char* option : {"anchor_drafts", "is_causal", "has_embedding", "has_head"}) {
    RunnerConfig config = with_option(config_of("dflash", 7), option, true);
    config.adaptive = false;
    check_texts(config, 300, jobs, expected, {32});
  }
}

TEST(the_text_is_that_of_plain_decoding_with_trees) {
  const std::vector<Job> jobs = mixed_jobs(30, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  struct Shape {
    int depth, top_k, num_drafts;
  };
  for (const char* method : {"dflash", "dspark"}) {
    for (const Shape shape : {Shape{1, 4, 4}, Shape{3, 2, 7}, Shape{7, 8, 15}, Shape{7, 16, 31}}) {
      for (const bool adaptive : {false, true}) {
        RunnerConfig config = tree_config(shape.depth, shape.top_k, shape.num_drafts, method);
        config.adaptive = adaptive;
        check_texts(config, 600, jobs, expected, {32, 7});
      }
    }
  }
}

TEST(drafts_without_noise_change_no_text) {
  const std::vector<Job> jobs = mixed_jobs(30, kVocab);
  RunnerConfig config = with_option(config_of("dflash"), "draft_noise", false);
  config.adaptive = false;
  check_texts(config, 300, jobs, plain(jobs), {32});
}

TEST(it_drafts_up_to_the_context_limit) {
  const std::vector<Job> jobs = mixed_jobs(96, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  for (RunnerConfig config : {config_of("dflash", 7), config_of("dspark"), tree_config(7, 4, 15),
                              tree_config(7, 4, 15, "dspark")}) {
    config.adaptive = false;
    check_texts(config, 400, jobs, expected, {32});
  }
}

TEST(a_block_needs_no_pages_but_those_of_its_drafts) {
  Runner runner(config_of("dflash", 7), 60);
  load_random_weights(runner);
  CHECK_EQ(runner.num_rows_ahead(), 7);
}

TEST(blocks_are_no_longer_than_trained) {
  RunnerConfig config = config_of("dflash", 8);
  CHECK_THROWS(plan_memory(config), ArgumentError, "[1, 7]");
  config.method_options["anchor_drafts"] = true;
  plan_memory(config);
  config.max_draft_tokens = 9;
  CHECK_THROWS(plan_memory(config), ArgumentError, "[1, 8]");
}

TEST(geometry_that_cannot_be_is_refused) {
  const auto check = [](const std::string& method, const std::string& name,
                        const DrafterOption& value, const char* error) {
    CHECK_THROWS(plan_memory(with_option(config_of(method), name, value)), ArgumentError, error);
  };
  check("dflash", "capture_layers", std::string("0,4"), "outside");
  check("dflash", "mask_token", int64_t{kVocab}, "mask_token");
  check("dflash", "num_q_heads", int64_t{5}, "multiple");
  check("dflash", "draft_vocab_size", int64_t{32}, "token map");
  check("dflash", "has_confidence", true, "Markov head");
  check("dspark", "markov_rank", int64_t{12}, "multiple of 8");
}
