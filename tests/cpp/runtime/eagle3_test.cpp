// A head with random weights proposes with confidence and is nearly always wrong: what counts here
// is that the text stays that of plain decoding and that no page, no slot and no byte is out of
// place.

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

constexpr int kVocab = 61;

RunnerConfig head_config() {
  RunnerConfig config = testing::small_config(4, kVocab);
  config.max_num_batched_tokens = 33;
  config.method = "eagle3";
  config.max_draft_tokens = 4;
  config.head = testing::small_head(1, 30, /*has_qk_norm=*/false);
  config.head->has_token_map = true;
  return config;
}

RunnerConfig tree_config(int depth, int top_k, int num_drafts) {
  RunnerConfig config = with_option(head_config(), "draft_top_k", int64_t{top_k});
  config.draft_depth = depth;
  config.max_draft_tokens = num_drafts;
  return config;
}

RunnerConfig with_rejection(RunnerConfig config) {
  config.acceptance = Acceptance::kRejection;
  return config;
}

std::vector<Ids> plain(const std::vector<Job>& jobs) {
  return testing::plain(testing::small_config(4, kVocab), jobs);
}

}  // namespace

TEST(the_text_is_that_of_plain_decoding) {
  const std::vector<Job> jobs = mixed_jobs(30, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  for (const bool adaptive : {false, true}) {
    RunnerConfig config = head_config();
    config.adaptive = adaptive;
    check_texts(config, 300, jobs, expected, {32, 7, 1});
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
      check_texts(config, 400, jobs, expected, {32, 7});
    }
  }
}

TEST(heads_of_several_layers_and_norms_change_no_text) {
  const std::vector<Job> jobs = mixed_jobs(12, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  for (const CaptureNorm norm : {CaptureNorm::kSlices, CaptureNorm::kWhole}) {
    for (RunnerConfig config : {head_config(), tree_config(3, 2, 7)}) {
      config.head->layers.resize(3, config.head->layers[0]);
      config.head->capture_norm = norm;
      config.head->norm_output = true;
      config.adaptive = false;
      const size_t one_layer = plan_memory(head_config()).page_bytes;
      CHECK_GT(plan_memory(config).page_bytes, one_layer);
      check_texts(config, 300, jobs, expected, {32, 7});
    }
  }
}

TEST(layers_that_slide_change_no_text) {
  const std::vector<Job> jobs = mixed_jobs(12, kVocab);
  RunnerConfig config = tree_config(3, 2, 7);
  config.head->layers.resize(2, config.head->layers[0]);
  std::get<AttentionSpec>(config.head->layers[0].mixer).window = 9;
  config.adaptive = false;
  check_texts(config, 300, jobs, plain(jobs), {32, 7});
}

TEST(drafts_without_noise_change_no_text) {
  const std::vector<Job> jobs = mixed_jobs(30, kVocab);
  RunnerConfig config = with_option(head_config(), "draft_noise", false);
  config.adaptive = false;
  check_texts(config, 300, jobs, plain(jobs), {32});
}

TEST(rejection_sampling_changes_sampled_texts_only) {
  const std::vector<Job> jobs = mixed_jobs(30, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  RunnerConfig config = with_rejection(head_config());
  config.adaptive = false;
  std::vector<std::vector<Ids>> outputs;
  for (int i = 0; i < 2; ++i) {
    Runner runner(config, 300);
    load_random_weights(runner);
    outputs.push_back(testing::run(runner, jobs, 32));
  }
  CHECK_EQ(outputs[0], outputs[1]);
  for (size_t i = 0; i < jobs.size(); ++i) {
    CHECK_EQ(outputs[0][i].size(), expected[i].size());
    CHECK_EQ(outputs[0][i] == expected[i], jobs[i].params.temperature == 0.0f);
  }
}

TEST(rejection_sampling_needs_probabilities) {
  CHECK_THROWS(Runner(with_rejection(testing::small_config(4, kVocab)), 300), ArgumentError,
               "accept by match");
  CHECK_THROWS(plan_memory(with_rejection(tree_config(3, 2, 7))), ArgumentError, "draft_top_k");
  const RunnerConfig config = with_rejection(head_config());
  // The logits of every depth are kept.
  CHECK_GT(plan_memory(config).draft_fixed_bytes, plan_memory(head_config()).draft_fixed_bytes);
  CHECK_THROWS(plan_memory(with_option(config, "draft_noise", false)), ArgumentError,
               "draft_noise");
}

TEST(it_drafts_up_to_the_context_limit) {
  const std::vector<Job> jobs = mixed_jobs(96, kVocab);
  const std::vector<Ids> expected = plain(jobs);
  for (RunnerConfig config : {head_config(), tree_config(8, 4, 15)}) {
    config.adaptive = false;
    check_texts(config, 400, jobs, expected, {32});
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
  config.max_draft_tokens = 117;  // 4 + 7 * 16 are made
  CHECK_THROWS(plan_memory(config), ArgumentError, "116 are made");
  CHECK_THROWS(plan_memory(tree_config(16, 4, 16)), ArgumentError, "[1, 15]");
  CHECK_THROWS(plan_memory(tree_config(4, 11, 15)), ArgumentError, "draft_top_k");
}

TEST(geometry_that_cannot_be_is_refused) {
  const auto check = [](const char* error, const auto& change) {
    RunnerConfig config = head_config();
    change(*config.head);
    CHECK_THROWS(plan_memory(config), ArgumentError, error);
  };
  check("4 layers", [](HeadSpec& head) { head.capture_layers = {0, 4}; });
  check("rise", [](HeadSpec& head) { head.capture_layers = {2, 1}; });
  check("capture_layers", [](HeadSpec& head) { head.capture_layers = {}; });
  check("needs layers", [](HeadSpec& head) { head.layers = {}; });
  check("multiple",
        [](HeadSpec& head) { std::get<AttentionSpec>(head.layers[0].mixer).num_q_heads = 5; });
  check("draft_vocab_size", [](HeadSpec& head) { head.draft_vocab_size = 62; });
  check("token map", [](HeadSpec& head) { head.has_token_map = false; });
  check("inv_freq",
        [](HeadSpec& head) { std::get<AttentionSpec>(head.layers[0].mixer).inv_freq = {1.0f}; });
}

TEST(a_token_map_holds_offsets) {
  Runner runner(head_config(), 300);
  Weights& weights = *runner.drafter().weights();
  std::vector<int64_t> offsets(30, 0);
  weights.load_offsets("d2t", offsets);
  offsets[29] = 32;  // token 61 of 61
  CHECK_THROWS(weights.load_offsets("d2t", offsets), ArgumentError, "token 61");
  offsets[29] = -1;  // token 28 again
  CHECK_THROWS(weights.load_offsets("d2t", offsets), ArgumentError, "rise");
  offsets.resize(2);
  CHECK_THROWS(weights.load_offsets("d2t", offsets), ArgumentError, "entries");
}
