#pragma once

/// A target whose layers keep a running state per sequence, a drafter for it, and schedules under
/// which its text must be that of plain evaluation. Any record that is lost, kept too long or moved
/// wrong changes all states after it, hence the text.

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kernels/common/device.h"
#include "runtime/runner.h"
#include "runtime/runner_testing.h"
#include "runtime/running_state.h"

namespace openspec::testing {

inline constexpr int kRunningVocab = 64;

class RunningTarget final : public TargetModel {
 public:
  explicit RunningTarget(const TargetSetup& setup)
      : num_layers_(setup.spec.num_layers()),
        vocab_size_(setup.spec.vocab_size),
        weights_(setup.device),
        states_(state_bytes(setup), memory_of(setup.device)) {}

  static size_t state_bytes(const TargetSetup& setup) {
    return static_cast<size_t>(setup.limits.max_rows) * needs(setup).record_bytes;
  }
  static StateNeeds needs(const TargetSetup& setup) {
    return {.kv_layers = {},
            .record_bytes =
                static_cast<size_t>(setup.spec.num_layers()) * kStateWords * sizeof(uint32_t),
            .num_read = kStateReads};
  }

  std::vector<Weights*> weights() override { return {&weights_}; }
  SharedTensors shared() const override { return {}; }
  void forward(const ExecContext& exec, const RowBatch& rows, const TargetMemory& memory,
               const std::vector<int>&, void*) override {
    pass_ = {rows, memory.states.records, num_layers_, states_.as<uint32_t>()};
    if (exec.device == Device::kCuda) {
      device::check(running_kernels.pass(pass_, exec.stream), "running_pass");
      return;
    }
    for (int span = 0; span < rows.num_spans; ++span) {
      for (int word = 0; word < kStateWords; ++word) run_span(pass_, span, word);
    }
  }
  void logits(const ExecContext& exec, const int32_t* row, int count, float* out) override {
    const RunningLogits logits{pass_.states, pass_.rows.row_token, row,
                               num_layers_,  vocab_size_,          out};
    if (exec.device == Device::kCuda) {
      device::check(running_kernels.logits(logits, count, exec.stream), "running_logits");
      return;
    }
    for (int entry = 0; entry < count; ++entry) {
      for (int column = 0; column < vocab_size_; ++column) run_logit(logits, entry, column);
    }
  }

 private:
  int num_layers_, vocab_size_;
  Weights weights_;
  openspec::Buffer states_;
  RunningPass pass_;
};

inline const TargetRegistration running_registration(
    "running", {.make = [](const TargetSetup& setup) -> std::unique_ptr<TargetModel> {
                  return std::make_unique<RunningTarget>(setup);
                },
                .weight_bytes = [](const TargetSetup&) { return size_t{0}; },
                .scratch_bytes = &RunningTarget::state_bytes,
                .state_needs = &RunningTarget::needs});

/// Guesses on the device of the step; with `has_entries` it has a layer in the page pool, so that
/// the last token of a cached prefix runs again.
class RunningDrafter final : public Drafter {
 public:
  RunningDrafter(bool makes_trees, bool has_entries) {
    needs_.makes_trees = makes_trees;
    if (has_entries) needs_.state.kv_layers = {{1, 16}};
  }
  const DrafterNeeds& needs() const override { return needs_; }
  bool works_on_arrays() const override { return true; }
  void propose(const ExecContext& exec, const TableView& table,
               const WantedDrafts& wanted) override {
    const RunningGuesses all{table.tokens,      table.tokens_stride, table.num_tokens,
                             wanted.seq,        wanted.num_wanted,   wanted.num_seqs,
                             wanted.max_drafts, wanted.drafts,       wanted.num_drafts,
                             wanted.parents,    wanted.scores};
    if (exec.device == Device::kCuda) {
      device::check(running_kernels.guesses(all, exec.stream), "running_guesses");
      return;
    }
    for (int i = 0; i < all.num_seqs; ++i) guess_of(all, i);
  }

 private:
  DrafterNeeds needs_;
};

/// Drafts from the host: what follows, of which the first `num_right` are right, as a chain or as a
/// tree with wrong siblings around each.
class PartlyRightDrafter final : public Drafter {
 public:
  PartlyRightDrafter(Script script, int num_right, int width)
      : script_(std::move(script)), num_right_(num_right), width_(width) {}
  const DrafterNeeds& needs() const override { return needs_; }
  void propose_on_host(const SequenceTable& table, std::span<const ProposeRequest> requests,
                       std::span<Draft> drafts) override {
    for (size_t i = 0; i < requests.size(); ++i) {
      const std::span<const int32_t> known = table.tokens(requests[i].slot);
      const Ids right = script_(known, requests[i].num_wanted);
      Draft& draft = drafts[i];
      int32_t above = -1;
      for (size_t depth = 0; depth < right.size(); ++depth) {
        const int right_at = static_cast<int>(known.size() + depth) % width_;
        for (int k = 0; k < width_ && draft.size() < requests[i].num_wanted; ++k) {
          const bool is_right = k == right_at && static_cast<int>(depth) < num_right_;
          draft.tokens.push_back(is_right ? right[depth] : right[depth] ^ (k + 1));
          draft.parents.push_back(above);
        }
        above = std::min(draft.size() - width_ + right_at, draft.size() - 1);
      }
    }
  }

 private:
  DrafterNeeds needs_;
  Script script_;
  int num_right_, width_;
};

inline RunnerConfig running_config(Device device, int max_draft_tokens) {
  RunnerConfig config = small_config(3, kRunningVocab);
  config.target.kind = "running";
  config.device = device;
  config.dtype = device == Device::kCuda ? DType::kBF16 : DType::kF32;
  config.page_size = device == Device::kCuda ? 8 : 4;
  config.max_model_len = 320;
  config.max_num_batched_tokens = 1024;
  if (device == Device::kCuda) config.max_num_logits_rows = 64;
  config.max_draft_tokens = max_draft_tokens;
  config.adaptive = false;
  return config;
}

inline std::unique_ptr<Runner> running_runner(const RunnerConfig& config,
                                              std::unique_ptr<Drafter> drafter = nullptr,
                                              int num_pages = 400) {
  auto runner = std::make_unique<Runner>(config, num_pages, std::move(drafter));
  runner->finish_loading();
  return runner;
}

/// The best token after `tokens`, evaluated one after another without a runner.
inline Ids evaluated(Ids tokens, int num_layers, int count) {
  const size_t width = static_cast<size_t>(num_layers) * kStateWords;
  std::vector<uint32_t> last(width), before_last(width), now(width);
  Ids output;
  for (size_t i = 0; output.size() < static_cast<size_t>(count); ++i) {
    for (size_t word = 0; word < kStateWords; ++word) {
      uint32_t input = static_cast<uint32_t>(tokens[i]) + 77u * static_cast<uint32_t>(word);
      for (size_t at = word; at < width; at += kStateWords) {
        input = now[at] = next_word(last[at], before_last[at], input);
      }
    }
    before_last = last;
    last = now;
    if (i + 1 < tokens.size()) continue;
    int32_t best = 0;
    const uint32_t* words = &now[width - kStateWords];
    for (int32_t column = 1; column < kRunningVocab; ++column) {
      if (logit_of(words, tokens[i], column) > logit_of(words, tokens[i], best)) best = column;
    }
    output.push_back(best);
    tokens.push_back(best);
  }
  return output;
}

/// Prompts of which every third goes on from another one's answer, and their texts.
struct RunningJobs {
  std::vector<Job> jobs;
  std::vector<Ids> expected;

  explicit RunningJobs(int count, int seed = 1, int max_tokens = 40) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    for (int i = 0; i < count; ++i) {
      const int length = 1 + static_cast<int>(random() % 90);
      Job job{random_prompt(100 * seed + i, length, kRunningVocab), {}};
      if (i % 3 == 2) {
        const size_t of = random() % static_cast<uint32_t>(i);
        Ids begin = jobs[of].prompt;
        begin.resize(std::min<size_t>(begin.size(), 80));
        if (begin.size() < 80) begin.insert(begin.end(), expected[of].begin(), expected[of].end());
        job.prompt.insert(job.prompt.begin(), begin.begin(), begin.end());
      }
      job.params.max_tokens = max_tokens + i % 3;
      jobs.push_back(job);
      expected.push_back(evaluated(job.prompt, 3, job.params.max_tokens));
    }
  }
};

/// What happens, one time in so many; 0: never.
struct Chances {
  int max_chunk = 64;
  int preempt = 0, cancel = 0, abandon = 0, undrafted = 0, idle = 0;
  int hold = 0;  // the step has no time for masks
};

/// Gives every third job a grammar that allows whatever is expected of it.
inline void add_grammars(RunningJobs& work) {
  std::vector<std::string> tokens;
  for (int id = 0; id < kRunningVocab; ++id) {
    tokens.push_back({static_cast<char>('a' + id / 8), static_cast<char>('a' + id % 8)});
  }
  std::vector<bool> is_said(kRunningVocab, false);
  for (size_t i = 0; i < work.jobs.size(); i += 3) {
    for (const int32_t id : work.expected[i]) is_said[static_cast<size_t>(id)] = true;
  }
  const auto end = std::find(is_said.begin(), is_said.end(), false) - is_said.begin();
  CHECK_LT(end, kRunningVocab);
  const auto words =
      std::make_shared<const Vocabulary>(tokens, kRunningVocab, Ids{static_cast<int32_t>(end)});
  const auto grammar = CompiledGrammar::structural_tag(
      words,
      R"({"type": "structural_tag", "format": {"type": "regex", "pattern": "([a-h][a-h])+"}})");
  for (size_t i = 0; i < work.jobs.size(); i += 3) work.jobs[i].params.grammar = grammar;
}

/// Runs all jobs under a random schedule, with as many steps ahead as there may be, and checks
/// their texts. `Engine` is a Runner or has what is used of it here.
template <typename Engine>
class RandomSchedule {
 public:
  RandomSchedule(Engine& runner, int max_drafts, const RunningJobs& work, const Chances& chances,
                 int seed)
      : runner_(runner),
        max_drafts_(max_drafts),
        work_(work),
        chances_(chances),
        random_(static_cast<uint32_t>(seed)) {
    for (size_t i = 0; i < work.jobs.size(); ++i) waiting_.push_back(i);
    states_.resize(work.jobs.size());
  }

  void run() {
    while (true) {
      while (!waiting_.empty() && runner_.num_free_slots() > 0) {
        start(waiting_.front());
        waiting_.pop_front();
      }
      const bool has_launched = launch();
      if (open_.empty() && !has_launched && running_.empty() && waiting_.empty()) break;
      if (happens(chances_.abandon)) {
        while (!open_.empty()) open_.pop_back();
        for (const size_t i : running_) forget_plans(i);
        continue;
      }
      if (happens(chances_.preempt)) leave(/*comes_back=*/true);
      if (happens(chances_.cancel)) leave(/*comes_back=*/false);
      const auto ahead = static_cast<size_t>(runner_.num_steps_ahead());
      if (open_.size() > ahead || (!has_launched && !open_.empty())) collect();
    }
    runner_.check_integrity();
    for (const State& state : states_) CHECK(state.is_done);
  }

 private:
  struct State {
    int slot = -1, num_planned = 0, num_choosing = 0, generation = 0;
    bool is_done = false;
    Ids output;
  };
  struct Open {
    std::unique_ptr<StepLease> lease;
    std::vector<std::pair<size_t, int>> jobs;  // and generations
  };

  bool happens(int one_in) { return one_in > 0 && random_() % static_cast<uint32_t>(one_in) == 0; }
  int up_to(int most) { return 1 + static_cast<int>(random_() % static_cast<uint32_t>(most)); }

  void forget_plans(size_t i) {
    states_[i].num_planned = runner_.table().kv_len(states_[i].slot);
    states_[i].num_choosing = 0;
  }

  void start(size_t i) {
    State& state = states_[i];
    Ids known = work_.jobs[i].prompt;
    const auto prompt_len = static_cast<int>(known.size());
    known.insert(known.end(), state.output.begin(), state.output.end());
    state.slot = runner_.add_sequence(known, prompt_len, work_.jobs[i].params, {});
    ++state.generation;
    running_.push_back(i);
    forget_plans(i);
  }

  void stop(size_t i) {
    runner_.remove_sequence(states_[i].slot);
    std::erase(running_, i);
    ++states_[i].generation;
  }

  void leave(bool comes_back) {
    if (running_.empty()) return;
    const size_t i = running_[random_() % running_.size()];
    stop(i);
    if (comes_back) {
      waiting_.push_back(i);
    } else {
      states_[i].is_done = true;
    }
  }

  bool launch() {
    std::vector<SpanRequest> requests;
    Open next;
    const int max_drafts = happens(chances_.undrafted) ? 0 : max_drafts_;
    for (const size_t i : running_) {
      State& state = states_[i];
      const int num_known = static_cast<int>(work_.jobs[i].prompt.size() + state.output.size());
      const int num_out = static_cast<int>(state.output.size()) + state.num_choosing;
      if (num_out >= work_.jobs[i].params.max_tokens || happens(chances_.idle)) continue;
      const bool decodes = state.num_planned + 1 >= num_known;
      const int count = decodes || happens(3)
                            ? 1
                            : std::min(up_to(chances_.max_chunk), num_known - state.num_planned);
      requests.push_back({state.slot, count, max_drafts});
      next.jobs.emplace_back(i, state.generation);
    }
    if (requests.empty()) return false;
    next.lease = runner_.reserve(requests);
    for (size_t k = 0; k < requests.size(); ++k) {
      State& state = states_[next.jobs[k].first];
      state.num_planned += requests[k].num_new_tokens;
      state.num_choosing += next.lease->is_sampled[k];
    }
    if constexpr (requires { runner_.grammar_times(); }) {
      if (chances_.hold > 0) runner_.grammar_times().step = happens(chances_.hold) ? 0.0 : 0.05;
    }
    runner_.launch(*next.lease);
    open_.push_back(std::move(next));
    return true;
  }

  void collect() {
    Open step = std::move(open_.front());
    open_.pop_front();
    const std::vector<SpanResult> results = runner_.collect(*step.lease);
    runner_.commit(*step.lease);
    for (size_t k = 0; k < results.size(); ++k) {
      const auto [i, generation] = step.jobs[k];
      State& state = states_[i];
      if (state.generation != generation) continue;
      if (step.lease->is_sampled[k]) --state.num_choosing;
      const Ids& tokens = results[k].token_ids;
      state.output.insert(state.output.end(), tokens.begin(), tokens.end());
      const Ids& expected = work_.expected[i];
      CHECK_LE(state.output.size(), expected.size());
      CHECK_EQ(state.output, Ids(expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(
                                                                          state.output.size())));
      num_drafts += results[k].num_draft_tokens;
      num_accepted += results[k].num_accepted_tokens;
      num_held += step.lease->is_sampled[k] && tokens.empty();
      if (results[k].finish != FinishReason::kRunning) {
        stop(i);
        state.is_done = true;
        continue;
      }
      const int num_known = static_cast<int>(work_.jobs[i].prompt.size() + state.output.size());
      state.num_planned =
          std::max(state.num_planned, std::min(num_known - 1, runner_.table().kv_len(state.slot)));
    }
  }

  Engine& runner_;
  int max_drafts_;
  const RunningJobs& work_;
  Chances chances_;
  std::mt19937 random_;
  std::vector<State> states_;
  std::deque<size_t> waiting_;
  std::vector<size_t> running_;
  std::deque<Open> open_;

 public:
  int64_t num_drafts = 0, num_accepted = 0, num_held = 0;
};

/// Schedules with everything in them, alone and together.
inline const std::vector<Chances> kSchedules = {
    {.max_chunk = 1},
    {.max_chunk = 100},
    {.max_chunk = 9, .undrafted = 2, .idle = 4},
    {.max_chunk = 50, .preempt = 5},
    {.max_chunk = 50, .abandon = 4},
    {.max_chunk = 30, .preempt = 9, .cancel = 20, .abandon = 7, .undrafted = 3, .idle = 5},
};

inline void check_all_schedules(Device device, bool makes_trees, bool has_entries) {
  for (const int max_draft_tokens : {1, 3, 8}) {
    for (size_t i = 0; i < kSchedules.size(); ++i) {
      const auto runner =
          running_runner(running_config(device, max_draft_tokens),
                         std::make_unique<RunningDrafter>(makes_trees, has_entries));
      // As many as run at a time, once more from the prefix cache, and more than that.
      for (const int num_jobs : {6, 6, 14}) {
        const RunningJobs work(num_jobs, static_cast<int>(i) + 1);
        RandomSchedule schedule(*runner, max_draft_tokens, work, kSchedules[i], num_jobs);
        schedule.run();
        CHECK_GT(schedule.num_accepted, 0);
        CHECK_LT(schedule.num_accepted, schedule.num_drafts);
      }
      CHECK_GT(runner->prefixes().num_found(), 0);
      CHECK_EQ(runner->stats().num_drafter_failures, 0);
    }
  }
}

/// The schedules with sequences that sit steps out.
inline void check_holds(Device device, bool makes_trees) {
  for (Chances chances : kSchedules) {
    chances.hold = 2;
    const auto runner = running_runner(running_config(device, 3),
                                       std::make_unique<RunningDrafter>(makes_trees, false));
    RunningJobs work(8, /*seed=*/5);
    add_grammars(work);
    for (const int seed : {1, 2}) {
      RandomSchedule schedule(*runner, 3, work, chances, seed);
      schedule.run();
      CHECK_GT(schedule.num_held, 5);
      CHECK_GT(schedule.num_accepted, 0);
    }
  }
}

/// Chains and trees of every length, of which every number is right.
inline void check_every_acceptance(Device device, int width) {
  const RunningJobs work(5, /*seed=*/3, /*max_tokens=*/30);
  const Script oracle = oracle_of(work.jobs, work.expected);
  for (int length = 1; length <= 6; ++length) {
    for (int num_right = 0; num_right <= length; ++num_right) {
      const auto runner =
          running_runner(running_config(device, length * width),
                         std::make_unique<PartlyRightDrafter>(oracle, num_right, width));
      RandomSchedule schedule(*runner, length * width, work, {.max_chunk = 40, .undrafted = 6},
                              length);
      schedule.run();
      CHECK_EQ(schedule.num_accepted > 0, num_right > 0);
    }
  }
}

}  // namespace openspec::testing
