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
  HeadSpec& head = config.head.emplace(testing::small_head(2, kVocab, /*has_qk_norm=*/true));
  head.has_head = false;
  head.block_size = 8;
  head.mask_token = kVocab - 1;
  if (method == "dspark") {
    head.anchor_drafts = true;
    head.markov_rank = 16;
    head.has_confidence = true;
    head.confidence_sees_token = true;
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
  for (bool HeadSpec::* switched : {&HeadSpec::anchor_drafts, &HeadSpec::is_causal,
                                    &HeadSpec::has_embedding, &HeadSpec::has_head}) {
    RunnerConfig config = config_of("dflash", 7);
    (*config.head).*switched = true;
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
  config.head->anchor_drafts = true;
  plan_memory(config);
  config.max_draft_tokens = 9;
  CHECK_THROWS(plan_memory(config), ArgumentError, "[1, 8]");
}

TEST(geometry_that_cannot_be_is_refused) {
  const auto check = [](const std::string& method, const char* error, const auto& change) {
    RunnerConfig config = config_of(method);
    change(*config.head);
    CHECK_THROWS(plan_memory(config), ArgumentError, error);
  };
  check("dflash", "4 layers", [](HeadSpec& head) { head.capture_layers = {0, 4}; });
  check("dflash", "mask_token", [](HeadSpec& head) { head.mask_token = kVocab; });
  check("dflash", "multiple", [](HeadSpec& head) {
    for (LayerSpec& layer : head.layers) std::get<AttentionSpec>(layer.mixer).num_q_heads = 5;
  });
  check("dflash", "layer 1 differs",
        [](HeadSpec& head) { std::get<AttentionSpec>(head.layers[1].mixer).rope_scale = 2.0f; });
  check("dflash", "token map", [](HeadSpec& head) { head.draft_vocab_size = 32; });
  check("dflash", "Markov head", [](HeadSpec& head) { head.has_confidence = true; });
  check("dflash", "block_size", [](HeadSpec& head) { head.block_size = 65; });
  check("dspark", "multiple of 8", [](HeadSpec& head) { head.markov_rank = 12; });
  RunnerConfig config = config_of("dflash");
  config.head.reset();
  CHECK_THROWS(plan_memory(config), ArgumentError, "needs a draft head");
}
