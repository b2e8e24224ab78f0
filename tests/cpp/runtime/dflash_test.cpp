// A draft model with random weights is nearly always wrong: what counts here is that the text stays
// that of plain decoding and that no page, no slot and no byte is out of place.

#include "check_test.h"
#include "core/check.h"
#include "runtime/runner_testing.h"

using namespace openspec;
using testing::Ids;
using testing::Job;
using testing::load_random_weights;
using testing::mixed_jobs;
using testing::run;

namespace {

constexpr int kVocab = 64;

RunnerConfig config_of(const std::string& method, int num_drafts = 5) {
  RunnerConfig config;
  config.target = testing::small_target(4, kVocab);
  config.page_size = 4;
  config.max_num_seqs = 6;
  config.max_model_len = 96;
  config.max_num_batched_tokens = 48;
  config.max_num_logits_rows = 5;
  config.num_threads = 2;
  config.method = method;
  if (method == "none") return config;
  config.num_speculative_tokens = num_drafts;
  config.method_options = {{"capture_layers", std::string("0,2,3")},
                           {"num_layers", int64_t{2}},
                           {"num_q_heads", int64_t{6}},
                           {"num_kv_heads", int64_t{3}},
                           {"head_dim", int64_t{32}},
                           {"intermediate_size", int64_t{112}},
                           {"block_size", int64_t{8}},
                           {"mask_token", int64_t{kVocab - 1}},
                           {"rope_theta", 10000.0},
                           {"rms_norm_eps", 1e-6}};
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
  RunnerConfig config = config_of(method, num_drafts);
  config.draft_depth = depth;
  config.method_options["draft_top_k"] = int64_t{top_k};
  return config;
}

std::vector<Job> jobs_of(int max_tokens) {
  std::vector<Job> jobs = mixed_jobs(max_tokens, kVocab);
  for (Job& job : jobs) job.params.num_speculative_tokens = 8;
  return jobs;
}

std::vector<Ids> plain(const std::vector<Job>& jobs) {
  Runner runner(config_of("none"), 300);
  load_random_weights(runner);
  return run(runner, jobs, 32);
}

}  // namespace

TEST(the_text_is_that_of_plain_decoding) {
  const std::vector<Job> jobs = jobs_of(30);
  const std::vector<Ids> expected = plain(jobs);
  for (const char* method : {"dflash", "dspark"}) {
    for (const bool adaptive : {false, true}) {
      RunnerConfig config = config_of(method);
      config.adaptive = adaptive;
      Runner runner(config, 300);
      load_random_weights(runner);
      if (adaptive) runner.measure_step_times(0.2);
      for (const int chunk : {32, 7, 1}) {
        CHECK_EQ(run(runner, jobs, chunk), expected);  // from the second on with prefix hits
      }
    }
  }
}

TEST(the_text_is_that_of_plain_decoding_with_other_blocks) {
  const std::vector<Job> jobs = jobs_of(30);
  const std::vector<Ids> expected = plain(jobs);
  for (const char* option : {"anchor_drafts", "is_causal", "has_embedding", "has_head"}) {
    RunnerConfig config = config_of("dflash", 7);
    config.adaptive = false;
    config.method_options[option] = true;
    Runner runner(config, 300);
    load_random_weights(runner);
    CHECK_EQ(run(runner, jobs, 32), expected);
  }
}

TEST(the_text_is_that_of_plain_decoding_with_trees) {
  const std::vector<Job> jobs = jobs_of(30);
  const std::vector<Ids> expected = plain(jobs);
  struct Shape {
    int depth, top_k, num_drafts;
  };
  for (const char* method : {"dflash", "dspark"}) {
    for (const Shape shape : {Shape{1, 4, 4}, Shape{3, 2, 7}, Shape{7, 8, 15}, Shape{7, 16, 31}}) {
      for (const bool adaptive : {false, true}) {
        RunnerConfig config = tree_config(shape.depth, shape.top_k, shape.num_drafts, method);
        config.adaptive = adaptive;
        Runner runner(config, 600);
        load_random_weights(runner);
        if (adaptive) runner.measure_step_times(0.2);
        for (const int chunk : {32, 7}) CHECK_EQ(run(runner, jobs, chunk), expected);
      }
    }
  }
}

TEST(drafts_without_noise_change_no_text) {
  const std::vector<Job> jobs = jobs_of(30);
  RunnerConfig config = config_of("dflash");
  config.adaptive = false;
  config.method_options["draft_noise"] = false;
  Runner runner(config, 300);
  load_random_weights(runner);
  CHECK_EQ(run(runner, jobs, 32), plain(jobs));
}

TEST(it_drafts_up_to_the_context_limit) {
  const std::vector<Job> jobs = jobs_of(96);
  const std::vector<Ids> expected = plain(jobs);
  for (RunnerConfig config : {config_of("dflash", 7), config_of("dspark"), tree_config(7, 4, 15),
                              tree_config(7, 4, 15, "dspark")}) {
    config.adaptive = false;
    Runner runner(config, 400);
    load_random_weights(runner);
    CHECK_EQ(run(runner, jobs, 32), expected);
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
  config.num_speculative_tokens = 9;
  CHECK_THROWS(plan_memory(config), ArgumentError, "[1, 8]");
}

TEST(geometry_that_cannot_be_is_refused) {
  const auto error_of = [](const std::string& method, const std::string& name,
                           const DrafterOption& value) {
    RunnerConfig config = config_of(method);
    config.method_options[name] = value;
    try {
      plan_memory(config);
    } catch (const ArgumentError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  CHECK(has(error_of("dflash", "capture_layers", std::string("0,4")), "outside"));
  CHECK(has(error_of("dflash", "mask_token", int64_t{kVocab}), "mask_token"));
  CHECK(has(error_of("dflash", "num_q_heads", int64_t{5}), "multiple"));
  CHECK(has(error_of("dflash", "draft_vocab_size", int64_t{32}), "token map"));
  CHECK(has(error_of("dflash", "has_confidence", true), "Markov head"));
  CHECK(has(error_of("dspark", "markov_rank", int64_t{12}), "multiple of 8"));
}
