#include "kernels/experts/experts.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "cuda/linear_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

struct Layer {
  int num_experts, top_k, hidden, inner;
  bool norm_top_k = true;
};

constexpr Layer kLayers[] = {{128, 8, 2048, 768},       // Qwen3-30B-A3B
                             {32, 8, 4096, 1536},       // 235B-A22B's width
                             {16, 3, 320, 176, false},  // chains that differ, some empty
                             {512, 10, 64, 48},
                             {16, 16, 128, 32}};

float from_bits(uint16_t bits) { return from_bf16(bits); }

/// A router and experts on the device, and the same numbers on the host.
class Experts {
 public:
  explicit Experts(const Layer& shape)
      : layer(shape),
        router_(pack(1, shape.num_experts, shape.hidden, kNone, router_numbers, 1.5f)),
        gate_up_(pack(shape.num_experts, 2 * shape.inner, shape.hidden, kSwiGlu, gate_up, 1.5f)),
        down_(pack(shape.num_experts, shape.hidden, shape.inner, kNone, down, 1.5f)) {}

  struct Rows {
    std::vector<int32_t> expert;
    std::vector<float> weight;
    std::vector<uint16_t> out;
  };
  /// `span`: of each row, -1 padding.
  Rows run(const std::vector<uint16_t>& x, const std::vector<int32_t>& span) const {
    const int num_rows = static_cast<int>(span.size());
    const auto pairs = static_cast<size_t>(num_rows * layer.top_k);
    const DeviceBuffer rows(x), spans(span);
    const DeviceBuffer expert(pairs * 4), weight(pairs * 4), out(x.size() * 2);
    const DeviceBuffer route_space(route_experts_workspace_bytes_cuda(num_rows, layer.num_experts));
    const DeviceBuffer space(experts_workspace_bytes_cuda(num_rows, layer.hidden, layer.inner,
                                                          layer.num_experts, layer.top_k));
    CHECK_CUDA(route_experts_cuda({.router = router_.first,
                                   .x = rows.data(),
                                   .row_span = spans.as<int32_t>(),
                                   .expert = expert.as<int32_t>(),
                                   .weight = weight.as<float>(),
                                   .num_rows = num_rows,
                                   .top_k = layer.top_k,
                                   .norm_top_k = layer.norm_top_k,
                                   .dtype = DType::kBF16,
                                   .workspace = route_space.data()},
                                  nullptr));
    CHECK_CUDA(experts_cuda({.gate_up = gate_up_,
                             .down = down_,
                             .x = rows.data(),
                             .expert = expert.as<int32_t>(),
                             .weight = weight.as<float>(),
                             .out = out.data(),
                             .num_rows = num_rows,
                             .top_k = layer.top_k,
                             .dtype = DType::kBF16,
                             .workspace = space.data()},
                            nullptr));
    Rows found{expert.download<int32_t>(), weight.download<float>(), out.download<uint16_t>()};
    for (const DeviceBuffer* buffer : {&expert, &weight, &out, &route_space, &space}) {
      CHECK(buffer->guard_is_whole());
    }
    return found;
  }

  Layer layer;
  std::vector<uint16_t> router_numbers, gate_up, down;  // [count, outputs, inputs]

 private:
  LinearStack pack(int count, int outputs, int inputs, LinearEpilogue epilogue,
                   std::vector<uint16_t>& numbers, float scale) {
    const auto size = static_cast<size_t>(outputs) * static_cast<size_t>(inputs);
    numbers = random_bf16(size * static_cast<size_t>(count),
                          scale / std::sqrt(static_cast<float>(inputs)), buffers_.size() + 5);
    const DeviceBuffer source(numbers);
    const auto& to = buffers_.emplace_back(std::make_unique<DeviceBuffer>(numbers.size() * 2));
    const PackedLinear one = packed({"", outputs, inputs, epilogue}, to->data());
    for (int i = 0; i < count; ++i) {
      const size_t at = static_cast<size_t>(i) * size;
      CHECK_CUDA(linear_pack_cuda(one, source.as<uint16_t>() + at, 0, outputs,
                                  to->as<uint16_t>() + at, nullptr));
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    return {.first = one, .count = count, .bytes = size * 2};
  }

  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  LinearStack router_, gate_up_, down_;
};

double dot(const uint16_t* a, const uint16_t* b, int count) {
  double sum = 0;
  for (int i = 0; i < count; ++i) {
    sum += static_cast<double>(from_bits(a[i])) * static_cast<double>(from_bits(b[i]));
  }
  return sum;
}

/// A row's experts are the best, but for those within a step of bf16 of the last; weights follow.
void check_route(const Experts& experts, const uint16_t* x, const int32_t* expert,
                 const float* weight) {
  const Layer& layer = experts.layer;
  std::vector<double> logits;
  for (int e = 0; e < layer.num_experts; ++e) {
    logits.push_back(
        dot(x, &experts.router_numbers[static_cast<size_t>(e * layer.hidden)], layer.hidden));
  }
  std::vector<double> sorted = logits;
  std::sort(sorted.rbegin(), sorted.rend());
  double total = 0, chosen = 0;
  for (const double logit : logits) total += std::exp(logit);
  for (int s = 0; s < layer.top_k; ++s) {
    CHECK(s == 0 || expert[s] > expert[s - 1]);
    CHECK(expert[s] >= 0 && expert[s] < layer.num_experts);
    const double logit = logits[static_cast<size_t>(expert[s])];
    const double last = sorted[static_cast<size_t>(layer.top_k - 1)];
    CHECK(logit >= last - std::abs(last) / 64 - 1e-3);
    chosen += std::exp(logit);
  }
  for (int s = 0; s < layer.top_k; ++s) {
    const double share = std::exp(logits[static_cast<size_t>(expert[s])]);
    CHECK_NEAR(static_cast<double>(weight[s]), share / (layer.norm_top_k ? chosen : total), 0.02);
  }
}

/// Relative error of a row, of what its experts make in double precision.
double row_error(const Experts& experts, const uint16_t* x, const int32_t* expert,
                 const float* weight, const uint16_t* out) {
  const Layer& layer = experts.layer;
  const auto hidden = static_cast<size_t>(layer.hidden), inner = static_cast<size_t>(layer.inner);
  std::vector<double> expected(hidden);
  for (int s = 0; s < layer.top_k; ++s) {
    const auto e = static_cast<size_t>(expert[s]);
    std::vector<double> activated(inner);
    for (size_t i = 0; i < inner; ++i) {
      const uint16_t* gate = &experts.gate_up[(e * 2 * inner + i) * hidden];
      const double sum = dot(x, gate, layer.hidden);
      activated[i] = sum / (1 + std::exp(-sum)) * dot(x, gate + inner * hidden, layer.hidden);
    }
    for (size_t c = 0; c < hidden; ++c) {
      double sum = 0;
      const uint16_t* row = &experts.down[(e * hidden + c) * inner];
      for (size_t i = 0; i < inner; ++i) {
        sum += activated[i] * static_cast<double>(from_bits(row[i]));
      }
      expected[c] += static_cast<double>(weight[s]) * sum;
    }
  }
  double error = 0, size = 0;
  for (size_t c = 0; c < hidden; ++c) {
    const double off = static_cast<double>(from_bits(out[c])) - expected[c];
    error += off * off;
    size += expected[c] * expected[c];
  }
  return std::sqrt(error / size);
}

}  // namespace

TEST(rows_are_those_of_double_precision_and_of_themselves_alone) {
  for (const Layer& layer : kLayers) {
    const Experts experts(layer);
    constexpr int kRows = 300;
    const auto hidden = static_cast<size_t>(layer.hidden), top_k = static_cast<size_t>(layer.top_k);
    const std::vector<uint16_t> x = random_bf16(kRows * hidden, 1.7f, 9);
    const Experts::Rows all = experts.run(x, std::vector<int32_t>(kRows, 0));
    for (size_t row = 0; row < 4; ++row) {
      const auto* expert = &all.expert[row * top_k];
      const auto* weight = &all.weight[row * top_k];
      check_route(experts, &x[row * hidden], expert, weight);
      CHECK(row_error(experts, &x[row * hidden], expert, weight, &all.out[row * hidden]) < 8e-3);
    }
    Rng rng(3);
    std::vector<size_t> order(kRows);
    std::iota(order.begin(), order.end(), size_t{0});
    for (const int count : {1, 2, 7, 8, 9, 16, 17, 24, 33, 64, 65, 128, 256}) {
      for (size_t i = 0; i < order.size(); ++i) {
        std::swap(order[i], order[static_cast<size_t>(rng.integer(0, kRows - 1))]);
      }
      if (count == 33) std::fill(order.begin(), order.end(), order[0]);  // one expert's rows
      std::vector<uint16_t> some;
      std::vector<int32_t> span;
      for (int i = 0; i < count; ++i) {
        const uint16_t* from = &x[order[static_cast<size_t>(i)] * hidden];
        some.insert(some.end(), from, from + hidden);
        span.push_back(i % 5 == 4 ? -1 : 0);
      }
      const Experts::Rows found = experts.run(some, span);
      for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
        for (size_t s = 0; s < top_k; ++s) {
          const size_t at = i * top_k + s, of_all = order[i] * top_k + s;
          CHECK_EQ(found.expert[at], span[i] < 0 ? -1 : all.expert[of_all]);
          CHECK(span[i] < 0 || found.weight[at] == all.weight[of_all]);
        }
        if (span[i] < 0) continue;
        CHECK(std::equal(&found.out[i * hidden], &found.out[i * hidden] + hidden,
                         &all.out[order[i] * hidden]));
      }
      if (count == 33) std::iota(order.begin(), order.end(), size_t{0});
    }
  }
}

TEST(equal_logits_go_to_the_lower_index) {
  const Experts experts({16, 3, 128, 32});
  const Experts::Rows found = experts.run(std::vector<uint16_t>(128), {0});
  CHECK(found.expert == (std::vector<int32_t>{0, 1, 2}));
  for (const float weight : found.weight) CHECK_NEAR(weight, 1.0f / 3, 1e-6f);
}
