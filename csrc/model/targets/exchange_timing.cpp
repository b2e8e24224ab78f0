#include "model/targets/exchange_timing.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "core/thread_team.h"
#include "kernels/common/device.h"
#include "kernels/linear/linear.h"
#include "kernels/norm/rms_norm.h"
#include "model/parts/sum_exchange.h"
#include "model/targets/device_exchange.h"
#include "model/weights/buffer.h"
#include "model/weights/part.h"

namespace openspec {

namespace {

// The narrowest row whose sums eight devices share, of few inputs: most of a round is the exchange.
constexpr int kWidth = 5120, kInputs = 512;
constexpr int kRounds = 64, kRepeats = 50;  // of a graph, and how often it runs

/// A rank's part of rounds, recorded. All numbers are zeros.
class TimedRounds {
 public:
  /// Of the current device; without an exchange its sums go nowhere.
  TimedRounds(TpRank rank, SumExchange* exchange) : exchange_(exchange) {
    constexpr size_t kRow = sizeof(float) * kWidth;
    const Part inputs = split_part("rounds", kWidth, kInputs, rank);
    product_.weight = {.num_outputs = kWidth,
                       .num_inputs = inputs.count,
                       .layout = LinearLayout::kTiles,
                       .num_splits = linear_num_splits(kWidth, kInputs),
                       .shard = {.first_input = inputs.first, .whole_inputs = kInputs}};
    norm_.num_partials = product_.weight.num_splits;
    norm_.width = kWidth;
    product_.num_rows = norm_.num_rows = 1;
    product_.dtype = norm_.dtype = DType::kBF16;
    const size_t read = dtype_bytes(DType::kBF16) * kWidth * static_cast<size_t>(inputs.count);
    const size_t sums = kRow * static_cast<size_t>(norm_.num_partials);
    memory_ = Buffer(std::max(read, kRow) + 2 * kRow + sums, Memory::kDevice);
    device::fill_zero(memory_.data(), memory_.bytes(), stream_.handle());
    std::byte* written = memory_.at(memory_.bytes() - 2 * kRow - sums);
    product_.weight.data = product_.x = memory_.data();
    norm_.weight = memory_.floats();
    norm_.residual = written;
    norm_.out = written + kRow;
    sums_ = reinterpret_cast<float*>(written + 2 * kRow);
    enqueue();  // what runs for the first time is loaded
    graph_ = std::make_unique<device::Graph>(stream_.handle(), [this] { enqueue(); });
    device::synchronize(stream_.handle());
  }

  /// Seconds of a round, the median of all repeats.
  double run() const {
    std::vector<device::Event> events(1 + kRepeats);
    events.front().record(stream_.handle());
    for (size_t i = 1; i < events.size(); ++i) {
      graph_->launch(stream_.handle());
      events[i].record(stream_.handle());
    }
    events.back().wait();
    std::vector<double> seconds;
    for (size_t i = 1; i < events.size(); ++i) {
      seconds.push_back(events[i].seconds_since(events[i - 1]));
    }
    const auto median = seconds.begin() + kRepeats / 2;
    std::nth_element(seconds.begin(), median, seconds.end());
    return *median / kRounds;
  }

 private:
  void enqueue() {
    const ExecContext exec{.device = Device::kCuda, .stream = stream_.handle()};
    for (int round = 0; round < kRounds; ++round) {
      if (exchange_ != nullptr) {
        exchange_->send(exec, product_);
        exchange_->take(exec, norm_, /*shares_residual=*/false);
        continue;
      }
      product_.partials = sums_;
      norm_.delta_partials = sums_;
      OPENSPEC_ON_CUDA(linear_cuda, product_, exec);
      OPENSPEC_ON_CUDA(rms_norm_cuda, norm_, exec);
    }
  }

  SumExchange* exchange_;
  device::Stream stream_;
  Buffer memory_;
  LinearParams product_;
  RmsNormParams norm_;
  float* sums_ = nullptr;
  std::unique_ptr<device::Graph> graph_;
};

}  // namespace

ExchangeTiming time_exchange(int num_ranks) {
  TargetSpec spec;
  spec.hidden_size = kWidth;
  spec.vocab_size = kWidth;
  spec.layers.push_back(
      {AttentionSpec{
           .num_q_heads = 8, .num_kv_heads = 8, .head_dim = 64, .inv_freq = std::vector<float>(32)},
       DenseMlpSpec{.intermediate_size = kInputs}});
  DeviceExchange exchange({.spec = spec,
                           .dtype = DType::kBF16,
                           .device = Device::kCuda,
                           .limits = {},
                           .rank = {.size = num_ranks}});
  std::vector<std::unique_ptr<TimedRounds>> ranks(static_cast<size_t>(num_ranks));
  std::vector<double> seconds(ranks.size());
  ThreadTeam threads(num_ranks);
  const auto each = [&](const auto& body) {
    threads.run([&](int rank) {
      const device::Use use(exchange.device(rank));
      body(rank, static_cast<size_t>(rank));
    });
  };
  exchange.fail();  // nobody waits for others while they record
  each([&](int rank, size_t place) {
    ranks[place] = std::make_unique<TimedRounds>(TpRank{rank, num_ranks}, &exchange.rank(rank));
  });
  exchange.clear();
  each([&](int, size_t place) { seconds[place] = ranks[place]->run(); });
  exchange.check();
  const device::Use use(exchange.device(0));
  return {.shared = *std::max_element(seconds.begin(), seconds.end()),
          .alone = TimedRounds({0, num_ranks}, nullptr).run()};
}

}  // namespace openspec
