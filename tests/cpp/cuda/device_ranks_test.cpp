// Ranks that share a target on CUDA, all on one device here: logits and captured states are those
// of one rank, bit for bit, for few rows, for rows that have owners and for slices of them.

#include <barrier>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/cuda_testing.h"
#include "kernels/common/device.h"
#include "kernels/exchange/exchange.h"
#include "kernels/linear/linear.h"
#include "kernels/norm/rms_norm.h"
#include "model/parts/sum_exchange.h"
#include "model/targets/device_exchange.h"
#include "model/targets/sharded.h"
#include "runtime/runner_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

// Before CUDA is used: a kernel that is loaded late would wait for one that waits for it.
const int loads_eagerly = setenv("CUDA_MODULE_LOADING", "EAGER", 1);
NeedsDevice needs_device;

constexpr int kVocab = 544, kHidden = 256, kLayers = 3;  // sums of eight parts
constexpr int kMaxRows = 600, kPageSize = 16, kNumPages = (kMaxRows + kPageSize - 1) / kPageSize;
const std::vector<int> kCaptures = {0, 2};

TargetSpec small_spec() {
  TargetSpec spec;
  spec.hidden_size = kHidden;
  spec.vocab_size = kVocab;
  spec.layers.assign(kLayers, {attention_of(8, 2, 64), DenseMlpSpec{608}});
  return spec;
}

TargetSetup setup_of(const TargetSpec& spec, int num_ranks) {
  return {.spec = spec,
          .dtype = DType::kBF16,
          .device = Device::kCuda,
          .limits = {.max_rows = kMaxRows,
                     .max_spans = 1,
                     .max_logits_rows = kMaxRows,
                     .max_tokens = kMaxRows},
          .rank = {.size = num_ranks}};
}

/// The rank's exchange in turns: on one device a kernel that waits for another rank could keep the
/// multiprocessors which that needs. So all have sent before any takes.
class Turns final : public SumExchange {
 public:
  Turns(SumExchange& exchange, std::barrier<>& barrier) : exchange_(exchange), barrier_(barrier) {}
  void send(const ExecContext& exec, LinearParams product) override {
    exchange_.send(exec, product);
    meet(exec);
  }
  void take(const ExecContext& exec, RmsNormParams norm, bool shares_residual) override {
    num_owned_ += have_owners(norm.num_rows, norm.width);
    exchange_.take(exec, norm, shares_residual);
    meet(exec);
  }
  void give_area(void* data, size_t bytes) override { exchange_.give_area(data, bytes); }
  void share_columns(const ExecContext& exec, float* rows, int num_rows, Part columns,
                     bool deals_rows) override {
    meet(exec);
    exchange_.share_columns(exec, rows, num_rows, columns, deals_rows);
    meet(exec);
  }
  RowRange dealt(int num_rows) const override { return exchange_.dealt(num_rows); }
  int num_owned() const { return num_owned_; }

 private:
  void meet(const ExecContext& exec) {
    device::synchronize(exec.stream);
    barrier_.arrive_and_wait();
  }

  SumExchange& exchange_;
  std::barrier<>& barrier_;
  int num_owned_ = 0;
};

/// One rank, or the whole: a target with its sequence of rows, and what a pass leaves.
class Rank {
 public:
  Rank(const TargetSetup& setup, std::unique_ptr<TargetModel> target)
      : target_(std::move(target)),
        logits_(kMaxRows * kVocab * sizeof(float)),
        captured_(kMaxRows * kHidden * kCaptures.size() * sizeof(uint16_t)) {
    load_random_weights(*target_->weights().front(), 11);
    target_->weights().front()->finish_loading();
    for (const KvLayerSpec& layer : target_kind("dense").state_needs(setup).kv_layers) {
      const auto values = static_cast<size_t>(2 * kNumPages * kPageSize) *
                          static_cast<size_t>(layer.num_kv_heads * layer.head_dim);
      pages_.push_back(std::make_unique<DeviceBuffer>(std::vector<uint16_t>(values)));
      kv_.push_back({pages_.back()->data(), layer.num_kv_heads, layer.head_dim, kPageSize});
    }
  }

  /// A pass over so many tokens of a sequence, then the logits of `rows`, or of the first ones.
  void run(int num_rows, const std::vector<int32_t>& rows, int num_logits) {
    std::vector<int32_t> tokens = random_prompt(num_rows, num_rows, kVocab), ids, parents;
    std::vector<int64_t> slots;
    for (int row = 0; row < num_rows; ++row) {
      ids.push_back(row);
      parents.push_back(row - 1);
      slots.push_back(row);
    }
    const std::vector<int32_t> zeros(static_cast<size_t>(num_rows)), begin = {0, num_rows};
    std::vector<int32_t> pages;
    for (int page = 0; page < kNumPages; ++page) pages.push_back(page);
    const DeviceBuffer token(tokens), position(ids), parent(parents), slot(slots), zero(zeros),
        span_begin(begin), page(pages), row(rows.empty() ? zeros : rows);
    CHECK_CUDA(cudaDeviceSynchronize());
    const RowBatch batch = {.num_rows = num_rows,
                            .num_spans = 1,
                            .row_token = token.as<int32_t>(),
                            .row_position = position.as<int32_t>(),
                            .row_span = zero.as<int32_t>(),
                            .row_parent = parent.as<int32_t>(),
                            .row_kv_slot = slot.as<int64_t>(),
                            .span_begin = span_begin.as<int32_t>(),
                            .span_kv_len = zero.as<int32_t>(),
                            .span_seq = zero.as<int32_t>(),
                            .may_have_trees = false,
                            .max_span_rows = num_rows};
    const ExecContext exec = {.device = Device::kCuda, .stream = stream_.handle()};
    const TargetMemory memory = {{page.as<int32_t>(), kNumPages}, kv_, {}};
    target_->forward(exec, batch, memory, kCaptures, captured_.data());
    target_->logits(exec, rows.empty() ? nullptr : row.as<int32_t>(), num_logits,
                    logits_.as<float>());
    device::synchronize(stream_.handle());
  }

  DeviceBuffer& logits_buffer() { return logits_; }
  std::vector<uint32_t> logits(RowRange rows) const {
    std::vector<uint32_t> values = first<uint32_t>(logits_, (rows.first + rows.count) * kVocab);
    values.erase(values.begin(), values.begin() + rows.first * kVocab);
    return values;
  }
  std::vector<uint16_t> captured(int count) const {
    return first<uint16_t>(captured_, count * kHidden * static_cast<int>(kCaptures.size()));
  }

 private:
  template <typename T>
  static std::vector<T> first(const DeviceBuffer& buffer, int count) {
    std::vector<T> values = buffer.download<T>();
    values.resize(static_cast<size_t>(count));
    return values;
  }

  std::unique_ptr<TargetModel> target_;
  device::Stream stream_;
  DeviceBuffer logits_, captured_;
  std::vector<std::unique_ptr<DeviceBuffer>> pages_;
  std::vector<KvLayerView> kv_;
};

/// All ranks of a target on one device, each on a thread and a stream of its own.
class Ranks {
 public:
  Ranks(const TargetSpec& spec, int num_ranks)
      : exchange_(setup_of(spec, num_ranks), std::vector<int>(static_cast<size_t>(num_ranks))),
        barrier_(num_ranks) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      turns_.push_back(std::make_unique<Turns>(exchange_.rank(rank), barrier_));
      TargetSetup setup = setup_of_rank(setup_of(spec, num_ranks), rank);
      setup.exchange = turns_.back().get();
      ranks_.push_back(std::make_unique<Rank>(setup, target_kind("dense").make(setup)));
      DeviceBuffer& logits = ranks_.back()->logits_buffer();
      exchange_.give_area(rank, logits.data(), logits.bytes());
    }
  }

  void run(int num_rows, const std::vector<int32_t>& rows, int num_logits) {
    std::vector<std::thread> threads;
    for (const std::unique_ptr<Rank>& rank : ranks_) {
      threads.emplace_back([&, rank = rank.get()] { rank->run(num_rows, rows, num_logits); });
    }
    for (std::thread& thread : threads) thread.join();
    exchange_.check();
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  const Rank& operator[](int rank) const { return *ranks_[static_cast<size_t>(rank)]; }
  RowRange dealt(int rank, int num_rows) { return exchange_.rank(rank).dealt(num_rows); }
  int num_owned() const { return turns_.front()->num_owned(); }

 private:
  DeviceExchange exchange_;
  std::barrier<> barrier_;
  std::vector<std::unique_ptr<Turns>> turns_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

void check(bool holds, const std::string& what) {
  if (!holds) throw check_test::Failure(what);
}

}  // namespace

TEST(ranks_have_the_bits_of_one) {
  const TargetSpec spec = small_spec();
  const TargetSetup one = setup_of(spec, 1);
  Rank whole(one, make_target(one));
  for (const int num_ranks : {2, 4, 8}) {
    Ranks ranks(spec, num_ranks);
    for (const int num_rows : {1, 4, 70, 300, 600, 4}) {
      const std::string what =
          std::to_string(num_ranks) + " ranks, " + std::to_string(num_rows) + " rows";
      const std::vector<int32_t> last = {num_rows - 1, 0, num_rows / 2};
      for (const std::vector<int32_t>& rows : {std::vector<int32_t>(), last}) {
        const int num_logits = rows.empty() ? num_rows : static_cast<int>(rows.size());
        const int owned_before = ranks.num_owned();
        whole.run(num_rows, rows, num_logits);
        ranks.run(num_rows, rows, num_logits);
        // Of each layer two rounds, in slices; those of many rows have owners.
        CHECK_EQ(ranks.num_owned() - owned_before, num_rows > 256 ? 2 * kLayers : 0);
        for (int rank = 0; rank < ranks.size(); ++rank) {
          const RowRange own = ranks.dealt(rank, num_logits);
          CHECK_EQ(own.count < num_logits, are_dealt(num_logits));
          check(ranks[rank].logits(own) == whole.logits(own), what + ": logits");
          check(ranks[rank].captured(num_rows) == whole.captured(num_rows), what + ": captured");
        }
      }
    }
  }
}

TEST(a_rank_alone_ends_with_an_error) {
  const TargetSpec spec = small_spec();
  const TargetSetup setup = setup_of(spec, 2);
  DeviceExchange exchange(setup, {0, 0}, 100'000'000);
  std::vector<std::unique_ptr<TargetModel>> targets = make_ranks(setup, exchange);
  CHECK_EQ(targets.size(), size_t{2});
  exchange.check();
  Rank rank(setup_of_rank(setup, 0), std::move(targets[0]));
  for (const int number : {0, 1}) {
    exchange.give_area(number, rank.logits_buffer().data(), rank.logits_buffer().bytes());
  }
  rank.run(4, {}, 4);
  CHECK_THROWS(exchange.check(), DeviceError, "GPU 0 waited 0.1 s for another GPU's part");
}

TEST(a_rank_that_cannot_go_on_ends_the_waits_of_others) {
  const TargetSpec spec = small_spec();
  DeviceExchange exchange(setup_of(spec, 2), {0, 0});
  exchange.fail();
  CHECK_THROWS(exchange.check(), DeviceError, "could not do its part");
}

TEST(what_no_area_holds_is_not_shared) {
  const TargetSpec spec = small_spec();
  DeviceExchange exchange(setup_of(spec, 2), {0, 0});
  DeviceBuffer rows(1024);
  const ExecContext exec = {.device = Device::kCuda};
  const auto share = [&] {
    exchange.rank(0).share_columns(exec, rows.as<float>(), 1, {0, 32, 64}, false);
  };
  CHECK_THROWS(share(), EngineError, "in no area");
  exchange.give_area(0, rows.data(), rows.bytes());
  CHECK_THROWS(share(), EngineError, "areas of the same sizes");
}
