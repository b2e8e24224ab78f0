#include "runtime/runner.h"

#include <algorithm>
#include <limits>

#include "check_test.h"
#include "core/check.h"
#include "runtime/runner_testing.h"

using namespace openspec;
using testing::Ids;
using testing::Job;
using testing::load_random_weights;
using testing::oracle_of;
using testing::run;
using testing::Script;
using testing::ScriptedDrafter;
using testing::TreeDrafter;

namespace {

constexpr int kVocab = 61;

RunnerConfig small_config() {
  RunnerConfig config = testing::small_config(3, kVocab);
  config.max_draft_tokens = 4;
  return config;
}

Ids random_prompt(int seed, int length) { return testing::random_prompt(seed, length, kVocab); }
std::vector<Job> mixed_jobs() { return testing::mixed_jobs(20, kVocab); }
std::vector<Ids> plain(const std::vector<Job>& jobs) {
  return testing::plain(small_config(), jobs);
}

}  // namespace

TEST(output_does_not_depend_on_chunks_batch_or_threads) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  for (int chunk : {1, 3, 7}) {
    RunnerConfig config = small_config();
    config.num_threads = chunk;
    Runner runner(config, 200);
    load_random_weights(runner);
    CHECK(run(runner, jobs, chunk, 0) == expected);
  }
  for (size_t i = 0; i < jobs.size(); ++i) {
    Runner runner(small_config(), 50);
    load_random_weights(runner);
    CHECK_EQ(run(runner, {jobs[i]}, 64, 0)[0], expected[i]);
  }
}

TEST(output_does_not_depend_on_drafts_right_wrong_or_absurd) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  const std::vector<Script> scripts = testing::scripts_of(oracle_of(jobs, expected), kVocab);
  for (size_t k = 0; k < scripts.size(); ++k) {
    for (bool adaptive : {false, true}) {
      RunnerConfig config = small_config();
      config.adaptive = adaptive;
      Runner runner(config, 200, std::make_unique<ScriptedDrafter>(scripts[k]));
      load_random_weights(runner);
      if (adaptive) CHECK(!runner.measure_step_times(0.2).empty());
      CHECK(run(runner, jobs, 5, 4, /*drafter_fails=*/k == 4) == expected);
      if (k == 0 && !adaptive) CHECK_LT(runner.stats().num_steps, 20);
    }
  }
}

/// Counts the rows that it learns from.
class Learner final : public Drafter {
 public:
  Learner() { needs_.is_costly = true; }
  const DrafterNeeds& needs() const override { return needs_; }
  bool works_on_arrays() const override { return true; }
  void learn(const ExecContext&, const TableView& table, const CommittedStep& step) override {
    num_learned += step.num_committed;
    for (int span = 0; span < step.rows.num_spans; ++span) {
      const int end = step.rows.span_kv_len[span] + step.num_computed[span];
      CHECK(step.rows.span_kv_len[span] >= 0);
      CHECK_LT(end, table.num_tokens[step.rows.span_seq[span]]);  // the token after the last row
    }
  }
  int num_learned = 0;

 private:
  DrafterNeeds needs_;
};

TEST(timed_steps_with_drafts_teach_as_many_rows_as_are_likely_to_be_taken) {
  RunnerConfig config = small_config();
  config.max_draft_tokens = 3;
  auto drafter = std::make_unique<Learner>();
  Learner& learner = *drafter;
  Runner runner(config, 200, std::move(drafter));
  load_random_weights(runner);
  int num_proposing = 0;
  for (const StepKind& kind : runner.backend().step_kinds()) {
    learner.num_learned = 0;
    // One turn, after one for memory that was never touched.
    CHECK_EQ(runner.time_steps(std::vector<StepKind>{kind}, 12, 1, 10.0).size(), size_t{1});
    CHECK_EQ(learner.num_learned, kind.proposes ? 2 * 3 * kind.num_seqs : 0);
    num_proposing += kind.proposes;
  }
  CHECK_GT(num_proposing, 1);
}

TEST(a_sequence_whose_first_drafts_fail_soon_drafts_again) {
  constexpr size_t kNumWrong = 20;
  Job job{random_prompt(1, 9), {}};
  job.params.max_tokens = 112;
  RunnerConfig config = small_config();
  config.max_model_len = 160;
  config.enable_prefix_caching = false;  // the bystander's whole prompt is to run each time
  const Ids expected = testing::plain(config, {job})[0];
  size_t num_wrong = 0;
  const auto script = [&, oracle = oracle_of({job}, {expected})](std::span<const int32_t> known,
                                                                 int count) {
    Ids draft = oracle(known, count);
    if (known.size() >= job.prompt.size() + num_wrong) return draft;
    for (int32_t& token : draft) token = (token + 1) % kVocab;
    return draft;
  };
  Runner runner(config, 100, std::make_unique<ScriptedDrafter>(script, /*is_costly=*/true));
  load_random_weights(runner);

  // By token of the output, whether the step that chose it had the drafter propose. Beside the
  // sequence a prompt runs token by token: of such steps the real times do not count.
  const auto decode = [&](double proposing_seconds) {
    // Beside these seconds those that the host takes between steps are nothing.
    constexpr double kPlainSeconds = 1e6;
    runner.backend().planner().set_step_times(
        StepTable({{1, 1, kPlainSeconds}}, 0),
        StepTable({{1, 1, proposing_seconds * kPlainSeconds}}, 0));
    const int slot = runner.add_sequence(job.prompt, 9, job.params, {});
    const int bystander = runner.add_sequence(random_prompt(2, 150), 150, {}, {});
    std::vector<bool> is_drafted;
    Ids output;
    for (int num_new = 9; output.size() < expected.size(); num_new = 1) {
      auto lease = runner.reserve(std::vector<SpanRequest>{{slot, num_new, 4}, {bystander, 1, 0}});
      runner.launch(*lease);
      const SpanResult result = runner.collect(*lease)[0];
      runner.commit(*lease);
      output.insert(output.end(), result.token_ids.begin(), result.token_ids.end());
      is_drafted.resize(output.size(), result.by_source[kDrafterDrafts].num_offered > 0);
    }
    CHECK_EQ(output, expected);
    // Whenever the drafter was asked it had something to offer; that it was left out says nothing.
    CHECK_GT(runner.table().estimate(slot, kDrafterDrafts).availability.ratio(),
             AcceptanceEstimate::kPrior);
    runner.remove_sequence(slot);
    runner.remove_sequence(bystander);
    return is_drafted;
  };
  // Right drafts that pay, then that do not, by little: trials become rare, or one would save the
  // next sequence.
  decode(1.0);
  decode(5.1);
  num_wrong = kNumWrong;
  const std::vector<bool> is_drafted = decode(1.5);
  const auto count = [&](size_t begin, size_t end) {
    return std::count(is_drafted.begin() + static_cast<std::ptrdiff_t>(begin),
                      is_drafted.begin() + static_cast<std::ptrdiff_t>(end), true);
  };
  CHECK(is_drafted[0]);
  // What all show speaks for its drafts until some ten have failed.
  CHECK_LT(count(0, kNumWrong), 3 * kNumWrong / 4);
  CHECK_EQ(count(2 * kNumWrong, expected.size()), expected.size() - 2 * kNumWrong);
}

TEST(trees_change_no_text_and_leave_the_kv_of_plain_decoding) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  const auto oracle = [chain = oracle_of(jobs, expected)](std::span<const int32_t> known,
                                                          int count) {
    return chain(known, count / 3);
  };
  const auto run_with = [&](const Script& script, int max_drafts, int& num_steps) {
    RunnerConfig config = small_config();
    config.max_draft_tokens = 16;
    config.adaptive = false;
    config.enable_prefix_caching = false;
    auto drafter = std::make_unique<TreeDrafter>(script);
    TreeDrafter& observer = *drafter;
    observer.width = static_cast<size_t>(2 * config.target.hidden_size);
    Runner runner(config, 200, std::move(drafter));
    load_random_weights(runner);
    runner.set_capture({0, 2});
    CHECK(run(runner, jobs, 5, max_drafts) == expected);
    num_steps = static_cast<int>(runner.stats().num_steps);
    return observer.seen;
  };
  int num_plain_steps = 0, num_steps = 0;
  const auto plain_rows = run_with(oracle, 0, num_plain_steps);
  for (const int max_drafts : {16, 14, 4}) {
    CHECK(run_with(oracle, max_drafts, num_steps) == plain_rows);
    CHECK_LT(num_steps, num_plain_steps);
  }
  // No token at all ends the tree.
  const auto half_right = [&](std::span<const int32_t> known, int count) {
    Ids tokens = oracle(known, count);
    if (known.size() % 2 == 0 && tokens.size() > 1) tokens[1] = -5;
    return tokens;
  };
  CHECK(run_with(half_right, 16, num_steps) == plain_rows);
}

TEST(prefix_hit_equals_miss) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  Runner runner(small_config(), 200);
  load_random_weights(runner);
  CHECK(run(runner, jobs, 64, 0) == expected);
  CHECK_EQ(runner.prefixes().num_found(), 0);
  CHECK(run(runner, jobs, 64, 0) == expected);
  CHECK_GT(runner.prefixes().num_found(), 0);
}

TEST(prefix_is_not_shared_across_salts) {
  Runner runner(small_config(), 50);
  load_random_weights(runner);
  const Job job{random_prompt(1, 17), {}};
  run(runner, {job}, 64, 0);
  const std::vector<uint8_t> salt{1};
  const int slot = runner.add_sequence(job.prompt, 17, job.params, salt);
  CHECK_EQ(runner.table().kv_len(slot), 0);
  const int other = runner.add_sequence(job.prompt, 17, job.params, {});
  CHECK_EQ(runner.table().kv_len(other), 16);
  CHECK_EQ(runner.prefixes().num_cached(job.prompt, salt), 0);
  CHECK_EQ(runner.prefixes().num_cached(job.prompt, {}), 16);
  const int num_free = runner.num_free_pages();
  CHECK_EQ(runner.prefixes().num_cached(std::span(job.prompt).first(16), {}), 12);  // one must run
  CHECK_EQ(runner.num_free_pages(), num_free);
}

TEST(observer_sees_every_committed_row_once) {
  const std::vector<Job> jobs = mixed_jobs();
  RunnerConfig config = small_config();
  config.enable_prefix_caching = false;
  auto drafter = std::make_unique<ScriptedDrafter>([](std::span<const int32_t> known, int count) {
    return Ids(static_cast<size_t>(count), known.back());
  });
  const ScriptedDrafter& observer = *drafter;
  Runner runner(config, 200, std::move(drafter));
  load_random_weights(runner);
  const std::vector<Ids> outputs = run(runner, jobs, 5, 4);
  int expected = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    expected += static_cast<int>(jobs[i].prompt.size() + outputs[i].size()) - 1;
  }
  CHECK_EQ(observer.num_observed, expected);
}

TEST(failure_in_any_stage_loses_nothing) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  for (const std::string stage : {"reserve", "propose", "score", "choose", "accept", "commit"}) {
    RunnerConfig config = small_config();
    config.enable_prefix_caching = false;
    Runner runner(config, 60);
    load_random_weights(runner);
    const Job& job = jobs[3];
    const int slot =
        runner.add_sequence(job.prompt, static_cast<int>(job.prompt.size()), job.params, {});
    Ids output;
    for (int step = 0; runner.table().num_tokens(slot) <
                       static_cast<int>(job.prompt.size()) + job.params.max_tokens;
         ++step) {
      const int left = runner.table().num_tokens(slot) - runner.table().kv_len(slot);
      const std::vector<SpanRequest> request{{slot, left, 4}};
      const int num_free = runner.num_free_pages();
      bool failed = false;
      runner.set_stage_hook([&](const char* now) {
        if (step % 3 == 1 && !failed && stage == now) {
          failed = true;
          throw std::runtime_error("injected");
        }
      });
      while (true) {
        try {
          auto lease = runner.reserve(request);
          runner.launch(*lease);
          const Ids tokens = runner.collect(*lease)[0].token_ids;
          runner.commit(*lease);
          output.insert(output.end(), tokens.begin(), tokens.end());
          break;
        } catch (const std::runtime_error&) {
          CHECK_EQ(runner.num_free_pages(), num_free);
          runner.check_integrity();
        }
      }
      CHECK_EQ(failed, step % 3 == 1);
    }
    CHECK_EQ(output, expected[3]);
    runner.remove_sequence(slot);
    CHECK_EQ(runner.num_free_pages(), 60);
  }
}

TEST(too_few_pages_take_nothing) {
  Runner runner(small_config(), 4);
  load_random_weights(runner);
  const Ids prompt = random_prompt(1, 20);
  const int slot = runner.add_sequence(prompt, 20, {}, {});
  const std::vector<SpanRequest> request{{slot, 20, 0}};
  CHECK_EQ(runner.num_pages_needed(slot, 20), 5);
  CHECK_THROWS(runner.reserve(request), OutOfPages, "needs 5 pages");
  CHECK_EQ(runner.num_free_pages(), 4);
}

TEST(spans_that_cannot_be_are_refused) {
  RunnerConfig config = small_config();
  config.max_model_len = 24;
  Runner runner(config, 60);
  load_random_weights(runner);
  SequenceParams params;
  params.max_tokens = 1000;
  const int slot = runner.add_sequence(random_prompt(1, 20), 20, params, {});
  const auto reserve = [&](const std::vector<SpanRequest>& spans) { return runner.reserve(spans); };
  const auto step = [&](int num_new_tokens) {
    const auto lease = reserve({{slot, num_new_tokens, 0}});
    runner.launch(*lease);
    runner.collect(*lease);
    runner.commit(*lease);
  };
  step(19);
  constexpr int kMost = std::numeric_limits<int>::max(), kLeast = std::numeric_limits<int>::min();
  CHECK_THROWS(reserve({{slot, 1, -1}}), ArgumentError, "max_drafts is -1");
  CHECK_THROWS(reserve({{slot, 1, kLeast}}), ArgumentError, "max_drafts is");
  CHECK_THROWS(reserve({{slot, kMost, 0}}), ArgumentError, "has 1 tokens to compute");
  CHECK_THROWS(reserve({{slot, 1, 0}, {slot, 1, 0}}), ArgumentError, "in the step twice");
  runner.check_integrity();
  for (int num_tokens = 20; num_tokens < 24; ++num_tokens) step(1);
  CHECK_THROWS(reserve({{slot, 1, 0}}), ArgumentError, "24 tokens, all that a context of 24");
  runner.check_integrity();
}

TEST(stop_inside_an_accepted_run_ends_it) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  Job job = jobs[0];
  const int32_t stop = expected[0][5];
  const auto first = std::find(expected[0].begin(), expected[0].end(), stop);
  job.params.lists.stop_ids = {stop};
  Runner runner(small_config(), 60,
                std::make_unique<ScriptedDrafter>(oracle_of({job}, {expected[0]})));
  load_random_weights(runner);
  CHECK_EQ(run(runner, {job}, 64, 4)[0], Ids(expected[0].begin(), first + 1));
}

TEST(budget_inside_an_accepted_run_ends_it) {
  const std::vector<Job> jobs = mixed_jobs();
  const std::vector<Ids> expected = plain(jobs);
  for (int max_tokens = 1; max_tokens < 12; ++max_tokens) {
    Job job = jobs[0];
    job.params.max_tokens = max_tokens;
    Runner runner(small_config(), 60,
                  std::make_unique<ScriptedDrafter>(oracle_of({job}, {expected[0]})));
    load_random_weights(runner);
    CHECK_EQ(run(runner, {job}, 64, 4)[0],
             Ids(expected[0].begin(), expected[0].begin() + max_tokens));
  }
}

TEST(context_limit_ends_a_sequence) {
  Job job{random_prompt(5, 90), {}};
  job.params.max_tokens = 1000;
  Runner runner(small_config(), 60);
  load_random_weights(runner);
  CHECK_EQ(run(runner, {job}, 64, 4)[0].size(), 6);
}

TEST(prompt_logprobs_cover_the_prompt_in_any_chunking) {
  Job job{random_prompt(5, 23), {}};
  job.params.num_prompt_logprobs = 2;
  job.params.num_logprobs = 3;
  std::vector<float> expected;
  for (int chunk : {64, 1, 6}) {
    Runner runner(small_config(), 60);
    load_random_weights(runner);
    const testing::PromptScores scores = testing::score_prompt(runner, job, chunk);
    CHECK_EQ(scores.tokens, Ids(job.prompt.begin() + 1, job.prompt.end()));
    if (expected.empty()) expected = scores.logprobs;
    CHECK(scores.logprobs == expected);
  }
}

TEST(impossible_requests_are_refused) {
  Runner runner(small_config(), 10);
  load_random_weights(runner);
  CHECK_THROWS(runner.add_sequence(Ids{kVocab}, 1, {}, {}), ArgumentError, "vocabulary");
  CHECK_THROWS(runner.add_sequence(random_prompt(1, 96), 96, {}, {}), ArgumentError, "context");
  CHECK_THROWS(runner.remove_sequence(3), ArgumentError, "slot 3");
  RunnerConfig config = small_config();
  config.method = "unheard of";
  CHECK_THROWS(make_drafter(config), ArgumentError, "there are");
  config.method = "none";
  for (LayerSpec& layer : config.target.layers) {
    std::get<AttentionSpec>(layer.mixer).num_q_heads = 3;
  }
  CHECK_THROWS(Runner(config, 10), ArgumentError, "multiple");
}
