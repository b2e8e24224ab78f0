// Targets that ranks share: where their parts begin and end, that the numbers are those of the
// whole, and that a rank which fails ends the step and nothing else.

#include "model/targets/sharded.h"

#include <atomic>

#include "check_test.h"
#include "core/check.h"
#include "kernels/exchange/exchange.h"
#include "kernels/linear/linear.h"
#include "kernels/norm/rms_norm.h"
#include "model/parts/decoder_layer.h"
#include "model/parts/sum_exchange.h"
#include "runtime/runner_testing.h"

using namespace openspec;
using testing::attention_of;
using testing::Ids;
using testing::Job;
using testing::load_random_weights;
using testing::mixed_jobs;
using testing::run;
using testing::with_option;

namespace {

constexpr int kVocab = 300;

LayerGeometry geometry(int num_q_heads, int num_kv_heads, int intermediate, TpRank rank = {}) {
  LayerGeometry geometry;
  static_cast<AttentionSpec&>(geometry) = attention_of(num_q_heads, num_kv_heads, 32);
  geometry.intermediate_size = intermediate;
  geometry.hidden_size = 48;
  geometry.rank = rank;
  return geometry;
}

/// Ranks' parts lie one behind the other and are all of it.
void check_tiling(const std::vector<Part>& parts, int whole) {
  int end = 0;
  for (const Part& part : parts) {
    CHECK_EQ(part.first, end);
    CHECK_GT(part.count, 0);
    CHECK_EQ(part.whole, whole);
    end += part.count;
  }
  CHECK_EQ(end, whole);
}

RunnerConfig config_of(int num_ranks, int num_kv_heads) {
  RunnerConfig config = testing::small_config(4, kVocab);
  config.target.layers.assign(4, {attention_of(8, num_kv_heads, 32), DenseMlpSpec{300}});
  config.tensor_parallel_size = num_ranks;
  return config;
}

/// Where a rank fails; -1: none does.
struct Fault {
  std::atomic<int> rank{-1};
  int round = 0;  // of the pass, from 0; -1: when logits are asked for
};
Fault fault;

/// Throws when its rank begins the round.
class FailingExchange final : public SumExchange {
 public:
  FailingExchange(SumExchange* exchange, int rank) : exchange_(exchange), rank_(rank) {}
  void send(const ExecContext& exec, LinearParams product) override {
    if (rank_ == fault.rank && round_++ == fault.round) throw std::runtime_error("broken");
    exchange_->send(exec, product);
  }
  void take(const ExecContext& exec, RmsNormParams norm, bool shares_residual) override {
    exchange_->take(exec, norm, shares_residual);
  }
  void restart() { round_ = 0; }

 private:
  SumExchange* exchange_;
  int rank_, round_ = 0;
};

/// A dense target of which a rank may fail.
class FailingTarget final : public TargetModel {
 public:
  explicit FailingTarget(TargetSetup setup)
      : exchange_(setup.exchange, setup.rank.rank), rank_(setup.rank.rank) {
    setup.exchange = &exchange_;
    dense_ = target_kind("dense").make(setup);
  }
  std::vector<Weights*> weights() override { return dense_->weights(); }
  SharedTensors shared() const override { return dense_->shared(); }
  void forward(const ExecContext& exec, const RowBatch& rows, const TargetMemory& memory,
               const std::vector<int>& capture_layers, void* captured) override {
    exchange_.restart();
    dense_->forward(exec, rows, memory, capture_layers, captured);
  }
  void logits(const ExecContext& exec, const int32_t* row, int count, float* out) override {
    if (rank_ == fault.rank && fault.round < 0) throw std::runtime_error("broken");
    dense_->logits(exec, row, count, out);
  }

 private:
  FailingExchange exchange_;
  int rank_;
  std::unique_ptr<TargetModel> dense_;
};

const TargetKind& dense_kind() { return target_kind("dense"); }

const TargetRegistration failing_registration(
    "failing",
    {.make = [](const TargetSetup& setup) -> std::unique_ptr<TargetModel> {
       return std::make_unique<FailingTarget>(setup);
     },
     .weight_bytes = [](const TargetSetup& setup) { return dense_kind().weight_bytes(setup); },
     .scratch_bytes = [](const TargetSetup& setup) { return dense_kind().scratch_bytes(setup); },
     .state_needs = [](const TargetSetup& setup) { return dense_kind().state_needs(setup); },
     .inbox_floats = [](const TargetSetup& setup) { return dense_kind().inbox_floats(setup); }});

const TargetRegistration lonely_registration("lonely", {});

}  // namespace

TEST(parts_of_a_layer_are_all_of_it) {
  for (const int size : {1, 2, 4, 8}) {
    for (const int intermediate : {256, 300, 1216}) {
      std::vector<Part> q_heads, kv_heads, columns;
      for (int rank = 0; rank < size; ++rank) {
        const LayerPart part = geometry(16, 8, intermediate, {rank, size}).part();
        q_heads.push_back(part.q_heads);
        kv_heads.push_back(part.kv_heads);
        columns.push_back(part.intermediate);
        CHECK_EQ(part.intermediate.first % kSplitUnit, 0);
      }
      check_tiling(q_heads, 16);
      check_tiling(kv_heads, 8);
      check_tiling(columns, intermediate);
    }
  }
}

TEST(ranks_share_a_kv_head_in_groups) {
  for (int rank = 0; rank < 8; ++rank) {
    const LayerPart part = geometry(8, 2, 256, {rank, 8}).part();
    CHECK_EQ(part.q_heads.first, rank);
    CHECK_EQ(part.kv_heads.first, rank / 4);
    CHECK_EQ(part.kv_heads.count, 1);
  }
}

TEST(what_ranks_cannot_share_is_refused_with_the_reason) {
  const auto check = [](const LayerGeometry& geometry, const char* reason) {
    CHECK_THROWS(geometry.validate(), ArgumentError, reason);
  };
  check(geometry(28, 4, 256, {0, 8}), "must divide the model's 28 query heads");
  check(geometry(12, 3, 256, {0, 4}), "the model's 3 KV heads: one must divide the other");
  check(geometry(8, 8, 128, {0, 8}), "down_proj allows, which has sums of 4 parts");
  CHECK_THROWS(unit_part("tokens", 100, {0, 4}), ArgumentError, "at least 128 tokens");
  const auto check_config = [](auto change, const char* reason) {
    RunnerConfig config = config_of(2, 2);
    change(config);
    CHECK_THROWS(config.validate(), ArgumentError, reason);
  };
  check_config([](auto& config) { config.tensor_parallel_size = 3; }, "must be 1, 2, 4 or 8");
  check_config([](auto& config) { config.target.kind = "lonely"; }, "lonely run on one device");
  check_config([](auto& config) { config.target.vocab_size = 40; }, "at least 64 tokens");
}

TEST(cut_matrices_have_the_numbers_of_the_whole) {
  constexpr int kOutputs = 70, kInputs = 300, kRows = 3;
  const auto add = [](Weights& weights, Part outputs, Part inputs, LinearEpilogue epilogue) {
    return weights.add_linear("", {"a.weight", "b.weight"}, {outputs, outputs}, inputs, epilogue,
                              /*may_split=*/epilogue == LinearEpilogue::kNone);
  };
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> x(kRows * kInputs);
  for (float& value : x) value = normal(random);
  Buffer workspace(size_t{1} << 16);
  ThreadPool pool(2);
  const auto product = [&](const PackedLinear& weight, const std::vector<float>& in, float* out,
                           float* partials) {
    linear_cpu({.pool = &pool}, {.weight = weight,
                                 .x = in.data(),
                                 .out = out,
                                 .num_rows = kRows,
                                 .workspace = workspace.floats(),
                                 .partials = partials});
  };

  Weights whole(Device::kCpu, size_t{1} << 20), gated(Device::kCpu, size_t{1} << 20);
  const PackedLinear sums = add(whole, kOutputs, kInputs, LinearEpilogue::kNone);
  const PackedLinear swiglu = add(gated, kOutputs, kInputs, LinearEpilogue::kSwiGlu);
  load_random_weights(whole, 7);
  load_random_weights(gated, 7);
  const size_t num_sums = static_cast<size_t>(sums.num_splits * kRows * 2 * kOutputs);
  std::vector<float> expected_sums(num_sums), expected(kRows * kOutputs);
  product(sums, x, nullptr, expected_sums.data());
  product(swiglu, x, expected.data(), nullptr);

  for (const int size : {2, 4, 8}) {
    std::vector<float> found_sums(num_sums);
    for (int number = 0; number < size; ++number) {
      const TpRank rank{number, size};
      const Part inputs = split_part("matrix", 2 * kOutputs, kInputs, rank);
      Weights mine(Device::kCpu, size_t{1} << 20);
      const PackedLinear shard = add(mine, kOutputs, inputs, LinearEpilogue::kNone);
      load_random_weights(mine, 7);
      std::vector<float> own;
      for (int row = 0; row < kRows; ++row) {
        const auto begin = x.begin() + row * kInputs + inputs.first;
        own.insert(own.end(), begin, begin + inputs.count);
      }
      product(shard, own, nullptr, found_sums.data());
    }
    CHECK(found_sums == expected_sums);
    for (int number = 0; number < 2; ++number) {
      const Part outputs = unit_part("outputs", kOutputs, {number, 2});
      Weights mine(Device::kCpu, size_t{1} << 20);
      const PackedLinear shard = add(mine, outputs, kInputs, LinearEpilogue::kSwiGlu);
      load_random_weights(mine, 7);
      std::vector<float> found(static_cast<size_t>(kRows * outputs.count));
      product(shard, x, found.data(), nullptr);
      for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < outputs.count; ++i) {
          CHECK_EQ(found[static_cast<size_t>(row * outputs.count + i)],
                   expected[static_cast<size_t>(row * kOutputs + outputs.first + i)]);
        }
      }
    }
  }
}

TEST(texts_are_those_of_one_rank) {
  const std::vector<Job> jobs = mixed_jobs(20, kVocab);
  for (const int num_kv_heads : {1, 2, 8}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      RunnerConfig one = config_of(1, num_kv_heads);
      one.dtype = dtype;
      const std::vector<Ids> expected = testing::plain(one, jobs);
      for (const int num_ranks : {2, 4, 8}) {
        RunnerConfig config = config_of(num_ranks, num_kv_heads);
        config.dtype = dtype;
        testing::check_texts(config, 300, jobs, expected, {64, 5});
      }
    }
  }
}

TEST(passes_of_many_rows_go_in_slices) {
  const std::vector<Job> jobs = {{testing::random_prompt(1, 2 * kHostRoundRows + 88, kVocab), {}},
                                 {testing::random_prompt(2, 5, kVocab), {}}};
  std::vector<Ids> expected;
  for (const int num_ranks : {1, 2, 8}) {
    RunnerConfig config = config_of(num_ranks, 2);
    config.max_num_batched_tokens = config.max_model_len = 3 * kHostRoundRows;
    Runner runner(config, 400);
    load_random_weights(runner);
    const std::vector<Ids> texts = run(runner, jobs, config.max_num_batched_tokens);
    if (num_ranks == 1) expected = texts;
    CHECK_EQ(texts, expected);
  }
}

TEST(drafters_read_a_head_that_is_in_shards) {
  const std::vector<Job> jobs = mixed_jobs(20, kVocab);
  const std::vector<Ids> expected = testing::plain(config_of(1, 2), jobs);
  for (const int num_ranks : {2, 8}) {
    std::vector<std::vector<float>> logits;
    for (const int ranks : {1, num_ranks}) {
      RunnerConfig config = config_of(ranks, 2);
      config.method = "dflash";
      config.max_draft_tokens = 5;
      HeadSpec& head = config.head.emplace(testing::small_head(2, kVocab, /*has_qk_norm=*/true));
      head.has_head = false;
      head.block_size = 8;
      head.mask_token = kVocab - 1;
      config.adaptive = false;
      Runner runner(config, 300);
      load_random_weights(runner);
      CHECK_EQ(run(runner, jobs, 16), expected);
      logits.push_back(runner.drafter().last_logits());
    }
    CHECK(!logits[0].empty());
    CHECK(logits[0] == logits[1]);
  }
}

TEST(a_rank_that_fails_ends_the_step_alone) {
  RunnerConfig config = config_of(4, 2);
  config.target.kind = "failing";
  const std::vector<Job> jobs = mixed_jobs(12, kVocab);
  Runner runner(config, 300);
  load_random_weights(runner);
  const std::vector<Ids> expected = run(runner, jobs, 64);
  CHECK(expected == testing::plain(config_of(1, 2), jobs));
  for (const int rank : {0, 1, 3}) {
    for (const int round : {0, 5, 7, -1}) {
      const Ids& prompt = jobs[0].prompt;
      const int length = static_cast<int>(prompt.size());
      const int slot = runner.add_sequence(prompt, length, jobs[0].params, {});
      const std::vector<SpanRequest> request{{slot, length - runner.table().kv_len(slot), 0}};
      fault.round = round;
      fault.rank = rank;
      {
        auto lease = runner.reserve(request);
        CHECK_THROWS(runner.launch(*lease), std::runtime_error, "broken");
      }
      fault.rank = -1;
      runner.remove_sequence(slot);
      runner.check_integrity();
      CHECK(run(runner, jobs, 64) == expected);
    }
  }
}

TEST(inboxes_on_cuda_hold_a_round_and_have_a_limit) {
  const auto bytes = [](int hidden_size, int num_ranks, int max_rows) {
    TargetSpec spec;
    spec.hidden_size = hidden_size;
    spec.vocab_size = 4096;
    spec.layers.assign(2, {attention_of(64, 8, 128), DenseMlpSpec{28672}});
    return exchange_bytes_of_rank({.spec = spec,
                                   .device = Device::kCuda,
                                   .limits = {.max_rows = max_rows},
                                   .rank = {.size = num_ranks}});
  };
  const auto expected = [](int64_t rows, int64_t owned) {
    return exchange_bytes({.slot = 8 * rows * 8192, .owned = owned * 8192});
  };
  CHECK_EQ(bytes(8192, 1, 2048), size_t{0});
  CHECK_EQ(bytes(8192, 2, 4), expected(4, 0));
  CHECK_EQ(bytes(8192, 2, 32), expected(32, 0));
  // The other of two ranks gets its own four sums and one of the first rank's, of four rows in
  // five.
  CHECK_EQ(bytes(8192, 2, 256), expected(32, 5 * 204));
  CHECK_EQ(bytes(8192, 2, 2048), expected(32, 5 * 819));
  CHECK_EQ(bytes(8192, 4, 2048), expected(32, 7 * 512));
  CHECK_EQ(bytes(8192, 8, 256), expected(32, 8 * 32));
  CHECK_EQ(bytes(8192, 8, 2048), expected(32, 8 * 256));
  CHECK_THROWS(bytes(32768, 2, 2048), ArgumentError, "would take 351 MiB of each, more than 256");
}

TEST(a_rank_has_its_part_of_the_memory) {
  const MemoryPlan whole = plan_memory(config_of(1, 8));
  for (const int num_ranks : {2, 4, 8}) {
    const MemoryPlan plan = plan_memory(config_of(num_ranks, 8));
    CHECK_EQ(plan.page_bytes * static_cast<size_t>(num_ranks), whole.page_bytes);
    CHECK_LT(plan.weight_bytes, whole.weight_bytes);
    CHECK_EQ(whole.exchange_bytes, size_t{0});
    CHECK(plan.exchange_bytes > 0 && plan.exchange_bytes < plan.scratch_bytes);
    const RunnerConfig config = config_of(num_ranks, 8);
    const auto bytes_of = [&](int rank) {
      const TargetSetup setup = {.spec = config.target, .limits = {}, .rank = {.size = num_ranks}};
      return dense_kind().weight_bytes(setup_of_rank(setup, rank));
    };
    size_t most = 0;
    for (int rank = 0; rank < num_ranks; ++rank) most = std::max(most, bytes_of(rank));
    CHECK_EQ(plan.weight_bytes, most);
    // Of ten units of inputs the fourth of eight ranks has two, the first one.
    if (num_ranks == 8) CHECK_LT(bytes_of(0), most);
    // Ranks have a KV head in common.
    CHECK_EQ(plan_memory(config_of(num_ranks, 1)).page_bytes,
             plan_memory(config_of(1, 1)).page_bytes);
  }
}
