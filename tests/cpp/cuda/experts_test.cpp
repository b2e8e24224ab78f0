// Experts on CUDA against linear_cuda, expert by expert, and sums on the host: the same bits,
// whichever rows there are besides.

#include "kernels/experts/experts.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>
#include <vector>

#include "cuda/linear_fp8_testing.h"
#include "kernels/norm/rms_norm.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

struct Layer {
  int num_experts, top_k, hidden, inner;
  bool norm_top_k = true;
};

constexpr Layer kTiny = {8, 2, 64, 48};
constexpr Layer kLayers[] = {kTiny,
                             {128, 8, 2048, 768},       // Qwen3-30B-A3B
                             {32, 8, 4096, 1536},       // 235B-A22B's width
                             {16, 3, 320, 176, false},  // chains that differ, some empty
                             {512, 10, 64, 48},
                             {16, 16, 128, 32}};

struct Rows {
  std::vector<int32_t> expert;
  std::vector<float> weight;
  std::vector<uint16_t> out;
};

/// Rows that are added up: a residual that their terms start. All its memory is there before, so
/// that the norm overlaps the kernel before it as in a step.
class Sum {
 public:
  Sum(int width, const DeviceBuffer& out)
      : width_(width),
        out_(out),
        weight_(std::vector<float>(static_cast<size_t>(width), 1.0f)),
        normed_(out.bytes()) {}

  void add_up(const RowTerms& terms) const {
    CHECK_CUDA(rms_norm_cuda({.residual = out_.data(),
                              .terms = terms,
                              .starts_residual = true,
                              .weight = weight_.as<float>(),
                              .out = normed_.data(),
                              .num_rows = static_cast<int>(out_.bytes()) / 2 / width_,
                              .width = width_,
                              .dtype = DType::kBF16},
                             nullptr));
  }

 private:
  int width_;
  const DeviceBuffer& out_;
  const DeviceBuffer weight_, normed_;
};

/// A router and experts on the device.
class Experts {
 public:
  /// `kind`: of the experts' scales; kNone: they are bf16.
  explicit Experts(const Layer& shape, ScaleKind kind = ScaleKind::kNone)
      : layer(shape),
        kind_(kind),
        router_(pack_numbers(1, num_outputs(), shape.hidden, kNone)),
        gate_up_(pack(shape.num_experts, 2 * shape.inner, shape.hidden, kSwiGlu)),
        down_(pack(shape.num_experts, shape.hidden, shape.inner, kNone)) {}

  /// `span`: of each row, -1 padding.
  Rows run(const std::vector<uint16_t>& x, const std::vector<int32_t>& span) const {
    const int num_rows = static_cast<int>(span.size());
    const auto pairs = static_cast<size_t>(num_rows * layer.top_k);
    const DeviceBuffer rows(x), spans(span);
    const DeviceBuffer expert(pairs * 4), weight(pairs * 4), out(x.size() * 2);
    const DeviceBuffer counts(std::vector<uint64_t>{5, 7, 11});  // of what was before
    const DeviceBuffer route_space(route_experts_workspace_bytes_cuda(num_rows, layer.num_experts));
    const DeviceBuffer space(experts_workspace_bytes_cuda(num_rows, layer.hidden, layer.inner,
                                                          layer.num_experts, layer.top_k));
    const Sum sum(layer.hidden, out);
    CHECK_CUDA(route_experts_cuda({.router = router_.first,
                                   .num_experts = layer.num_experts,
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
    RowTerms terms;
    CHECK_CUDA(experts_cuda({.gate_up = gate_up_,
                             .down = down_,
                             .x = rows.data(),
                             .expert = expert.as<int32_t>(),
                             .weight = weight.as<float>(),
                             .terms = &terms,
                             .num_rows = num_rows,
                             .top_k = layer.top_k,
                             .dtype = DType::kBF16,
                             .counts = counts.as<ExpertCounts>(),
                             .workspace = space.data()},
                            nullptr));
    sum.add_up(terms);
    Rows found{expert.download<int32_t>(), weight.download<float>(), out.download<uint16_t>()};
    std::set<int32_t> distinct(found.expert.begin(), found.expert.end());
    distinct.erase(-1);
    const auto num_pairs = std::ranges::count_if(found.expert, [](int32_t e) { return e >= 0; });
    CHECK_EQ(
        counts.download<uint64_t>(),
        (std::vector<uint64_t>{6, 7 + distinct.size(), 11 + static_cast<uint64_t>(num_pairs)}));
    for (const DeviceBuffer* buffer : {&expert, &weight, &out, &route_space, &space}) {
      CHECK(buffer->guard_is_whole());
    }
    return found;
  }

  /// What comes of rows that go to `top_k` experts each, one group of them after the other, so that
  /// all experts have as many rows; and of that over and over again.
  std::vector<uint16_t> run_again(const std::vector<uint16_t>& x, int num_launches) const {
    const int num_rows = static_cast<int>(x.size()) / layer.hidden;
    std::vector<int32_t> experts(static_cast<size_t>(num_rows * layer.top_k));
    for (size_t i = 0; i < experts.size(); ++i) {
      experts[i] = static_cast<int32_t>(i) % layer.num_experts;
    }
    const DeviceBuffer rows(x), expert(experts), out(x.size() * 2);
    const DeviceBuffer weight(std::vector<float>(experts.size(), 1.0f));
    const DeviceBuffer space(experts_workspace_bytes_cuda(num_rows, layer.hidden, layer.inner,
                                                          layer.num_experts, layer.top_k));
    const Sum sum(layer.hidden, out);
    for (int i = 0; i < num_launches; ++i) {
      RowTerms terms;
      CHECK_CUDA(experts_cuda({.gate_up = gate_up_,
                               .down = down_,
                               .x = rows.data(),
                               .expert = expert.as<int32_t>(),
                               .weight = weight.as<float>(),
                               .terms = &terms,
                               .num_rows = num_rows,
                               .top_k = layer.top_k,
                               .dtype = DType::kBF16,
                               .workspace = space.data()},
                              nullptr));
      sum.add_up(terms);
    }
    return out.download<uint16_t>();
  }

  /// Of the router, of which the first are experts.
  int num_outputs() const { return (layer.num_experts + 15) / 16 * 16; }
  std::vector<uint16_t> logits(const std::vector<uint16_t>& x) const {
    return linear(router_.first, x, num_outputs());
  }

  /// What rows come to that are routed as `routes` says, one expert after the other.
  std::vector<uint16_t> expected(const std::vector<uint16_t>& x, const Rows& routes) const {
    const auto hidden = static_cast<size_t>(layer.hidden), top_k = static_cast<size_t>(layer.top_k);
    std::vector<float> sums(x.size());
    for (int e = 0; e < layer.num_experts; ++e) {
      std::vector<uint16_t> own;
      std::vector<size_t> pairs;
      for (size_t i = 0; i < routes.expert.size(); ++i) {
        if (routes.expert[i] != e) continue;
        const uint16_t* from = &x[i / top_k * hidden];
        own.insert(own.end(), from, from + hidden);
        pairs.push_back(i);
      }
      if (pairs.empty()) continue;
      const std::vector<uint16_t> rows =
          linear(down_.at(e), linear(gate_up_.at(e), own, layer.inner), layer.hidden);
      for (size_t i = 0; i < pairs.size(); ++i) {
        float* to = &sums[pairs[i] / top_k * hidden];
        for (size_t c = 0; c < hidden; ++c) {
          to[c] = std::fma(routes.weight[pairs[i]], from_bf16(rows[i * hidden + c]), to[c]);
        }
      }
    }
    return to_bf16(sums);
  }

  Layer layer;

 private:
  static std::vector<uint16_t> linear(const PackedLinear& weight, const std::vector<uint16_t>& x,
                                      int columns) {
    const auto num_rows = x.size() / static_cast<size_t>(weight.num_inputs);
    const DeviceBuffer in(x), out(num_rows * static_cast<size_t>(columns) * 2);
    CHECK_CUDA(linear_cuda({.weight = weight,
                            .x = in.data(),
                            .out = out.data(),
                            .num_rows = static_cast<int>(num_rows),
                            .dtype = DType::kBF16,
                            .out_dtype = DType::kBF16},
                           nullptr));
    return out.download<uint16_t>();
  }

  LinearStack pack(int count, int outputs, int inputs, LinearEpilogue epilogue) {
    return kind_ == ScaleKind::kNone ? pack_numbers(count, outputs, inputs, epilogue)
                                     : pack_codes(count, outputs, inputs, epilogue);
  }
  LinearStack pack_numbers(int count, int outputs, int inputs, LinearEpilogue epilogue) {
    const auto size = static_cast<size_t>(outputs) * static_cast<size_t>(inputs);
    const float scale = 1.5f / std::sqrt(static_cast<float>(inputs));
    return pack_all(packed({"", outputs, inputs, epilogue}, nullptr), count,
                    random_bf16(size * static_cast<size_t>(count), scale, buffers_.size() + 5));
  }
  LinearStack pack_codes(int count, int outputs, int inputs, LinearEpilogue epilogue) {
    const auto size = static_cast<size_t>(outputs) * static_cast<size_t>(inputs);
    PackedLinear first = packed({"", outputs, inputs, epilogue}, nullptr);
    first.format = MatrixFormat::kE4M3;
    first.scale_kind = kind_;
    std::vector<float> scales;
    for (const uint16_t bits :
         random_bf16(static_cast<size_t>(count * first.num_scales()), 1.0f, buffers_.size() + 6)) {
      scales.push_back(from_bf16(bits) / 50.0f / std::sqrt(static_cast<float>(inputs)));
    }
    first.scales = buffers_.emplace_back(std::make_unique<DeviceBuffer>(scales))->as<float>();
    return pack_all(first, count,
                    random_codes(size * static_cast<size_t>(count), buffers_.size() + 5));
  }
  /// `numbers`: [count, outputs, inputs].
  template <typename Number>
  LinearStack pack_all(const PackedLinear& first, int count, const std::vector<Number>& numbers) {
    const DeviceBuffer source(numbers);
    const auto& to = buffers_.emplace_back(std::make_unique<DeviceBuffer>(source.bytes()));
    LinearStack stack = {
        .first = first, .count = count, .bytes = source.bytes() / static_cast<size_t>(count)};
    stack.first.data = to->data();
    for (int i = 0; i < count; ++i) {
      CHECK_CUDA(linear_pack_cuda(first,
                                  source.as<uint8_t>() + stack.bytes * static_cast<size_t>(i), 0,
                                  first.num_outputs, const_cast<void*>(stack.at(i).data), nullptr));
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    return stack;
  }

  ScaleKind kind_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  LinearStack router_, gate_up_, down_;
};

/// The experts of a row are the best by its logits, and weights follow.
void check_route(const Layer& layer, const uint16_t* bits, const int32_t* expert,
                 const float* weight) {
  std::vector<int> order(static_cast<size_t>(layer.num_experts));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return from_bf16(bits[a]) > from_bf16(bits[b]); });
  const double most = from_bf16(bits[order[0]]);
  const auto exp_of = [&](int e) {
    return std::exp(static_cast<double>(from_bf16(bits[e])) - most);
  };
  double total = 0, chosen = 0;
  for (int e = 0; e < layer.num_experts; ++e) total += exp_of(e);
  order.resize(static_cast<size_t>(layer.top_k));
  for (const int e : order) chosen += exp_of(e);
  std::sort(order.begin(), order.end());
  for (size_t s = 0; s < order.size(); ++s) {
    CHECK_EQ(expert[s], order[s]);
    const double share = exp_of(order[s]) / (layer.norm_top_k ? chosen : total);
    CHECK(std::abs(static_cast<double>(weight[s]) / share - 1) < 2e-6);
  }
}

/// Rows of which `shared` is what all have in common: the nearer to 1, the fewer experts they meet.
std::vector<uint16_t> random_rows(int num_rows, int width, float shared) {
  const auto count = static_cast<size_t>(width);
  const std::vector<uint16_t> common = random_bf16(count, 1.7f, 77);
  std::vector<uint16_t> rows = random_bf16(static_cast<size_t>(num_rows) * count, 1.7f, 9);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = to_bf16(shared * from_bf16(common[i % count]) +
                      std::sqrt(1 - shared * shared) * from_bf16(rows[i]));
  }
  return rows;
}

void check_rows(const Experts& experts, float shared) {
  const Layer& layer = experts.layer;
  constexpr int kRows = 700;
  const auto hidden = static_cast<size_t>(layer.hidden), top_k = static_cast<size_t>(layer.top_k);
  const std::vector<uint16_t> x = random_rows(kRows, layer.hidden, shared);
  const Rows all = experts.run(x, std::vector<int32_t>(kRows, 0));
  const std::vector<uint16_t> logits = experts.logits(x);
  for (size_t row = 0; row < kRows; ++row) {
    check_route(layer, &logits[row * static_cast<size_t>(experts.num_outputs())],
                &all.expert[row * top_k], &all.weight[row * top_k]);
  }
  const std::vector<uint16_t> expected = experts.expected(x, all);
  CHECK(all.out == expected);
  Rng rng(3);
  std::vector<size_t> order(kRows);
  std::iota(order.begin(), order.end(), size_t{0});
  for (const int count : {1, 2, 3, 5, 7, 8, 9, 16, 17, 24, 33, 64, 65, 128, 200, 256, 400, 600}) {
    for (size_t i = 0; i < order.size(); ++i) {
      std::swap(order[i], order[static_cast<size_t>(rng.integer(0, kRows - 1))]);
    }
    std::vector<uint16_t> some;
    std::vector<int32_t> span;
    for (int i = 0; i < count; ++i) {
      const uint16_t* from = &x[order[static_cast<size_t>(i)] * hidden];
      some.insert(some.end(), from, from + hidden);
      span.push_back(i % 5 == 4 ? -1 : 0);
    }
    const Rows found = experts.run(some, span);
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      for (size_t s = 0; s < top_k; ++s) {
        const size_t at = i * top_k + s, of_all = order[i] * top_k + s;
        CHECK_EQ(found.expert[at], span[i] < 0 ? -1 : all.expert[of_all]);
        CHECK(span[i] < 0 || found.weight[at] == all.weight[of_all]);
      }
      if (span[i] < 0) continue;
      CHECK(std::equal(&found.out[i * hidden], &found.out[i * hidden] + hidden,
                       &expected[order[i] * hidden]));
    }
  }
}

/// As many rows as a segment or a tile of rows has at most, and one more. All go to the same
/// experts, for each is a multiple of one row, or all but one do.
void check_borders(const Experts& experts) {
  constexpr size_t kMultiples = 4;
  const auto hidden = static_cast<size_t>(experts.layer.hidden);
  const std::vector<uint16_t> two = random_rows(2, experts.layer.hidden, 0.0f);
  std::vector<uint16_t> kinds;
  for (size_t i = 0; i < 2 * kMultiples; ++i) {
    const size_t from = i / kMultiples * hidden;
    for (size_t c = 0; c < hidden; ++c) {
      const float value = std::ldexp(from_bf16(two[from + c]), static_cast<int>(i % kMultiples));
      kinds.push_back(to_bf16(value));
    }
  }
  const Rows routes = experts.run(kinds, std::vector<int32_t>(2 * kMultiples, 0));
  const std::vector<uint16_t> expected = experts.expected(kinds, routes);
  for (const size_t count :
       {8, 9, 16, 17, 24, 25, 32, 33, 40, 64, 65, 96, 97, 160, 161, 320, 321}) {
    for (const size_t other : {count, count / 2}) {
      std::vector<uint16_t> x, out;
      for (size_t row = 0; row < count; ++row) {
        const size_t kind = row % kMultiples + (row == other ? kMultiples : 0);
        const auto from = static_cast<ptrdiff_t>(kind * hidden);
        const auto to = from + static_cast<ptrdiff_t>(hidden);
        x.insert(x.end(), kinds.begin() + from, kinds.begin() + to);
        out.insert(out.end(), expected.begin() + from, expected.begin() + to);
      }
      CHECK(experts.run(x, std::vector<int32_t>(count, 0)).out == out);
    }
  }
}

}  // namespace

TEST(rows_are_those_of_linears_whatever_is_besides) {
  for (const Layer& layer : kLayers) {
    const Experts experts(layer);
    for (const float shared : {0.0f, 0.8f}) check_rows(experts, shared);
  }
}

TEST(experts_of_codes_do_so_too) {
  for (const ScaleKind kind : {ScaleKind::kOutput, ScaleKind::kBlock}) {
    // Of the last one blocks of scales end within whole slots.
    for (const Layer& layer : {kTiny, kLayers[1], kLayers[3], Layer{8, 2, 64, 1536}}) {
      const Experts experts(layer, kind);
      for (const float shared : {0.0f, 0.8f}) check_rows(experts, shared);
    }
  }
}

// Codes of the first layer are streamed up to 127 rows, of the second, whose blocks are alone on a
// multiprocessor, up to 31; of the last they have tiles of up to 160 rows from 156 rows on.
TEST(segments_and_tiles_have_any_length) {
  for (const ScaleKind kind : {ScaleKind::kNone, ScaleKind::kOutput, ScaleKind::kBlock}) {
    for (const Layer& layer :
         {Layer{128, 8, 768, 256}, Layer{16, 4, 4096, 256}, kLayers[3], Layer{3, 2, 256, 128}}) {
      check_borders(Experts(layer, kind));
    }
  }
}

// Of two blocks that share a tile of up to 32 rows one copies them all. However late a thread of
// the other block begins, which takes many launches to see, kernels end.
TEST(tiles_of_few_rows_end) {
  for (const ScaleKind kind : {ScaleKind::kNone, ScaleKind::kBlock}) {
    const Experts experts({64, 8, 768, 256}, kind);
    const std::vector<uint16_t> x = random_rows(64 * 28 / 8, 768, 0.0f);
    CHECK(experts.run_again(x, 20000) == experts.run_again(x, 1));
  }
}

TEST(a_step_of_padding_goes_nowhere) {
  const Experts experts(kTiny);
  for (const int num_rows : {1, 8, 9, 40}) {
    const auto count = static_cast<size_t>(num_rows);
    const Rows found =
        experts.run(random_rows(num_rows, kTiny.hidden, 0.0f), std::vector<int32_t>(count, -1));
    for (const int32_t expert : found.expert) CHECK_EQ(expert, -1);
    for (const uint16_t bits : found.out) CHECK_EQ(bits, 0);
  }
}

TEST(equal_logits_go_to_the_lower_index) {
  const Experts experts({16, 3, 128, 32});
  const Rows found = experts.run(std::vector<uint16_t>(128), {0});
  CHECK(found.expert == (std::vector<int32_t>{0, 1, 2}));
  for (const float weight : found.weight) CHECK_NEAR(weight, 1.0f / 3, 1e-6f);
}
