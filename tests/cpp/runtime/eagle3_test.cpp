// A head with random weights proposes with confidence and is nearly always wrong: what counts here
// is that the text stays that of plain decoding and that no page, no slot and no byte is out of
// place.

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

constexpr int kVocab = 61;

RunnerConfig config_of(const std::string& method) {
  RunnerConfig config;
  config.target = testing::small_target(4, kVocab);
  config.page_size = 4;
  config.max_num_seqs = 6;
  config.max_model_len = 96;
  config.max_num_batched_tokens = 33;
  config.max_num_logits_rows = 5;
  config.num_threads = 2;
  config.method = method;
  if (method == "none") return config;
  config.num_speculative_tokens = 4;
  config.method_options = {{"capture_layers", std::string("0,2,3")},
                           {"num_q_heads", int64_t{6}},
                           {"num_kv_heads", int64_t{3}},
                           {"head_dim", int64_t{32}},
                           {"intermediate_size", int64_t{112}},
                           {"draft_vocab_size", int64_t{30}},
                           {"rope_theta", 10000.0},
                           {"rms_norm_eps", 1e-6},
                           {"has_token_map", true}};
  return config;
}

RunnerConfig tree_config(int depth, int top_k, int num_drafts) {
  RunnerConfig config = config_of("eagle3");
  config.draft_depth = depth;
  config.num_speculative_tokens = num_drafts;
  config.method_options["draft_top_k"] = int64_t{top_k};
  return config;
}

std::vector<Ids> plain(const std::vector<Job>& jobs) {
  Runner runner(config_of("none"), 300);
  load_random_weights(runner);
  return run(runner, jobs, 32);
}

}  // namespace

TEST(the_text_is_that_of_plain_decoding) {
  const std::vector<Job> jobs = mixed_jobs(30, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  for (const bool adaptive : {false, true}) {
    RunnerConfig config = config_of("eagle3");
    config.adaptive = adaptive;
    Runner runner(config, 300);
    load_random_weights(runner);
    if (adaptive) runner.measure_step_times(0.2);
    for (const int chunk : {32, 7, 1}) {
      CHECK_EQ(run(runner, jobs, chunk), expected);  // from the second on with prefix hits
    }
  }
}

TEST(the_text_is_that_of_plain_decoding_with_trees) {
  const std::vector<Job> jobs = mixed_jobs(30, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  struct Shape {
    int depth, top_k, num_drafts;
  };
  for (const Shape shape : {Shape{1, 4, 4}, Shape{3, 2, 7}, Shape{4, 4, 15}, Shape{8, 10, 12}}) {
    for (const bool adaptive : {false, true}) {
      RunnerConfig config = tree_config(shape.depth, shape.top_k, shape.num_drafts);
      config.adaptive = adaptive;
      Runner runner(config, 400);
      load_random_weights(runner);
      if (adaptive) runner.measure_step_times(0.2);
      for (const int chunk : {32, 7}) CHECK_EQ(run(runner, jobs, chunk), expected);
    }
  }
}

TEST(drafts_without_noise_change_no_text) {
  const std::vector<Job> jobs = mixed_jobs(30, kVocab);
  RunnerConfig config = config_of("eagle3");
  config.adaptive = false;
  config.method_options["draft_noise"] = false;
  Runner runner(config, 300);
  load_random_weights(runner);
  CHECK_EQ(run(runner, jobs, 32), plain(jobs));
}

TEST(rejection_sampling_changes_sampled_texts_only) {
  const std::vector<Job> jobs = mixed_jobs(30, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  RunnerConfig config = config_of("eagle3");
  config.acceptance = Acceptance::kRejection;
  config.adaptive = false;
  std::vector<std::vector<Ids>> outputs;
  for (int i = 0; i < 2; ++i) {
    Runner runner(config, 300);
    load_random_weights(runner);
    outputs.push_back(run(runner, jobs, 32));
  }
  CHECK_EQ(outputs[0], outputs[1]);
  for (size_t i = 0; i < jobs.size(); ++i) {
    CHECK_EQ(outputs[0][i].size(), expected[i].size());
    CHECK_EQ(outputs[0][i] == expected[i], jobs[i].params.temperature == 0.0f);
  }
}

TEST(rejection_sampling_needs_probabilities) {
  const auto with_rejection = [](RunnerConfig config) {
    config.acceptance = Acceptance::kRejection;
    return config;
  };
  CHECK_THROWS(Runner(with_rejection(config_of("none")), 300), ArgumentError, "accept by match");
  CHECK_THROWS(plan_memory(with_rejection(tree_config(3, 2, 7))), ArgumentError, "draft_top_k");
  RunnerConfig best = with_rejection(config_of("eagle3"));
  // The logits of every depth are kept.
  CHECK_GT(plan_memory(best).draft_fixed_bytes, plan_memory(config_of("eagle3")).draft_fixed_bytes);
  best.method_options["draft_noise"] = false;
  CHECK_THROWS(plan_memory(best), ArgumentError, "draft_noise");
}

TEST(it_drafts_up_to_the_context_limit) {
  const std::vector<Job> jobs = mixed_jobs(96, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  for (RunnerConfig config : {config_of("eagle3"), tree_config(8, 4, 15)}) {
    config.adaptive = false;
    Runner runner(config, 400);
    load_random_weights(runner);
    CHECK_EQ(run(runner, jobs, 32), expected);
  }
}

TEST(a_tree_has_a_depth_and_pages_for_it) {
  RunnerConfig config = tree_config(8, 4, 15);
  Runner runner(config, 60);
  load_random_weights(runner);
  // Seven levels of four rows run behind the known tokens, though fifteen drafts are wanted.
  CHECK_EQ(runner.num_rows_ahead(), 28);
  const Ids prompt = testing::random_prompt(1, 8, kVocab);
  const int slot = runner.add_sequence(prompt, 8, {}, {});
  CHECK_EQ(runner.num_pages_needed(slot, 8), 3);  // and the drafter's last entry
  CHECK_EQ(runner.num_pages_needed(slot, 9), 9);
  {
    // Behind steps in flight, whatever these choose.
    const auto prompt_step = runner.reserve(std::vector<SpanRequest>{{slot, 8, 0}});
    CHECK_EQ(runner.num_pages_needed(slot, 16), 7);
    const auto tree_step = runner.reserve(std::vector<SpanRequest>{{slot, 1, 15}});
    CHECK_EQ(runner.num_pages_needed(slot, 16), 4);
  }
  config.num_speculative_tokens = 117;  // 4 + 7 * 16 are made
  CHECK_THROWS(plan_memory(config), ArgumentError, "116 are made");
  CHECK_THROWS(plan_memory(tree_config(9, 4, 15)), ArgumentError, "[1, 8]");
  CHECK_THROWS(plan_memory(tree_config(4, 11, 15)), ArgumentError, "draft_top_k");
}

TEST(geometry_that_cannot_be_is_refused) {
  const auto error_of = [](const std::string& name, const DrafterOption& value) {
    RunnerConfig config = config_of("eagle3");
    config.method_options[name] = value;
    try {
      plan_memory(config);
    } catch (const ArgumentError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(error_of("capture_layers", std::string("0,4")).find("outside") != std::string::npos);
  CHECK(error_of("capture_layers", std::string("2,1")).find("rise") != std::string::npos);
  CHECK(error_of("capture_layers", std::string("")).find("empty") != std::string::npos);
  CHECK(error_of("capture_layers", std::string("1;2")).find("commas") != std::string::npos);
  CHECK(error_of("num_q_heads", int64_t{5}).find("multiple") != std::string::npos);
  CHECK(error_of("draft_vocab_size", int64_t{62}).find("exceeds") != std::string::npos);
  CHECK(error_of("has_token_map", false).find("token map") != std::string::npos);
}

TEST(a_token_map_holds_offsets) {
  Runner runner(config_of("eagle3"), 300);
  Weights& weights = *runner.drafter().weights();
  const auto load = [&](const std::vector<int64_t>& offsets) {
    try {
      weights.load_offsets("d2t", offsets);
    } catch (const ArgumentError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  std::vector<int64_t> offsets(30, 0);
  CHECK_EQ(load(offsets), std::string());
  offsets[29] = 32;  // token 61 of 61
  CHECK(load(offsets).find("token 61") != std::string::npos);
  offsets[29] = -1;  // token 28 again
  CHECK(load(offsets).find("rise") != std::string::npos);
  CHECK(load({1, 2}).find("entries") != std::string::npos);
}
