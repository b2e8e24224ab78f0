#include "kernels/norm/rms_norm.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "cuda/cuda_testing.h"
#include "cuda/norm_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

using Bits = std::vector<uint16_t>;
constexpr float kEps = 1e-6f;

struct Input {
  size_t num_rows = 0;
  size_t width = 0;
  Bits residual;                // [num_rows, width]
  Bits delta;                   // the same, or empty
  std::vector<float> partials;  // [num_partials, num_rows, width], or empty
  std::vector<float> weight;
  bool starts_residual = false;
  bool rounds_once = false;

  size_t num_partials() const { return partials.size() / residual.size(); }
};

enum class Delta { kNone, kRow, kPartials };

Input random_input(Rng& rng, size_t num_rows, size_t width, Delta kind, size_t num_partials = 0) {
  Input input = {num_rows, width, to_bf16(rng.normals(num_rows * width, 3)), {}, {}, {}, false};
  if (kind == Delta::kRow) input.delta = to_bf16(rng.normals(num_rows * width));
  if (kind == Delta::kPartials) input.partials = rng.normals(num_partials * num_rows * width);
  input.weight = rng.normals(width);
  return input;
}

/// Rows [begin, begin + count) of `input` as an input of their own.
Input rows_of(const Input& input, size_t begin, size_t count) {
  Input part = {count, input.width, {}, {}, {}, input.weight, input.starts_residual};
  const auto append = [&](auto& to, const auto& from, size_t first_row) {
    if (from.empty()) return;
    const auto first = from.begin() + static_cast<std::ptrdiff_t>(first_row * input.width);
    to.insert(to.end(), first, first + static_cast<std::ptrdiff_t>(count * input.width));
  };
  append(part.residual, input.residual, begin);
  append(part.delta, input.delta, begin);
  for (size_t i = 0; i < input.num_partials(); ++i) {
    append(part.partials, input.partials, i * input.num_rows + begin);
  }
  return part;
}

RmsNormParams shape_of(const Input& input) {
  RmsNormParams params;
  params.num_partials = static_cast<int>(input.num_partials());
  params.starts_residual = input.starts_residual;
  params.rounds_once = input.rounds_once;
  params.num_rows = static_cast<int>(input.num_rows);
  params.width = static_cast<int>(input.width);
  params.eps = kEps;
  params.dtype = DType::kBF16;
  return params;
}

struct Result {
  Bits residual;
  Bits out;
};

Result run_cuda(const Input& input, const RowTerms& terms = {}) {
  const DeviceBuffer residual(input.residual), delta(input.delta), partials(input.partials),
      weight(input.weight), out(input.residual.size() * 2);
  RmsNormParams params = shape_of(input);
  params.residual = residual.data();
  if (!input.delta.empty()) params.delta = delta.data();
  if (!input.partials.empty()) params.delta_partials = partials.as<float>();
  params.terms = terms;
  params.weight = weight.as<float>();
  params.out = out.data();
  CHECK_CUDA(rms_norm_cuda(params, nullptr));
  CHECK(residual.guard_is_whole() && out.guard_is_whole());
  return {residual.download<uint16_t>(), out.download<uint16_t>()};
}

Result run_cpu(const Input& input) {
  ThreadPool pool(4);
  Result result = {input.residual, Bits(input.residual.size())};
  RmsNormParams params = shape_of(input);
  params.residual = result.residual.data();
  if (!input.delta.empty()) params.delta = input.delta.data();
  if (!input.partials.empty()) params.delta_partials = input.partials.data();
  params.weight = input.weight.data();
  params.out = result.out.data();
  rms_norm_cpu({.pool = &pool}, params);
  return result;
}

/// The same input with the partials summed on the host.
Input with_summed_partials(const Input& input) {
  Input summed = input;
  summed.partials.clear();
  for (size_t i = 0; i < input.residual.size(); ++i) {
    float sum = input.partials[i];
    for (size_t k = 1; k < input.num_partials(); ++k) {
      sum += input.partials[k * input.residual.size() + i];
    }
    summed.delta.push_back(to_bf16(sum));
  }
  return summed;
}

void check_result(const Input& input, const Result& result) {
  CHECK(result.residual == run_cpu(input).residual);
  for (size_t row = 0; row < input.num_rows; ++row) {
    const uint16_t* x = result.residual.data() + row * input.width;
    const double scale = exact_scale(x, input.width, static_cast<double>(kEps));
    for (size_t i = 0; i < input.width; ++i) {
      const float got = from_bf16(result.out[row * input.width + i]);
      const auto allowed = input.rounds_once ? normed_once(x[i], scale, input.weight[i])
                                             : normed(x[i], scale, input.weight[i]);
      if (got != allowed[0] && got != allowed[1]) CHECK_EQ(got, allowed[0]);
    }
  }
}

Bits row_of(const Bits& rows, size_t row, size_t width) {
  const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(row * width);
  return Bits(begin, begin + static_cast<std::ptrdiff_t>(width));
}

}  // namespace

TEST(rms_norm_matches_reference) {
  Rng rng(1);
  for (const size_t width : {16, 48, 320, 1024, 1280, 1296, 2048, 2560, 2576, 4096, 5120, 8192}) {
    for (const size_t num_rows : {1, 5}) {
      for (const Delta kind : {Delta::kNone, Delta::kRow}) {
        const Input input = random_input(rng, num_rows, width, kind);
        check_result(input, run_cuda(input));
      }
      for (const size_t num_partials : {1, 2, 3, 4, 6, 8, 12}) {
        const Input input = random_input(rng, num_rows, width, Delta::kPartials, num_partials);
        check_result(input, run_cuda(input));
      }
    }
  }
  const Input many = random_input(rng, 5000, 320, Delta::kPartials, 4);
  check_result(many, run_cuda(many));
}

TEST(rms_norm_that_rounds_once_matches_reference) {
  Rng rng(10);
  for (const size_t width : {48, 320, 2560, 4096, 5120, 12288}) {
    for (const Delta kind : {Delta::kNone, Delta::kRow, Delta::kPartials}) {
      if (width > 8192 && kind != Delta::kNone) continue;
      Input input = random_input(rng, 5, width, kind, 4);
      const Result twice = run_cuda(input);
      input.rounds_once = true;
      const Result once = run_cuda(input);
      check_result(input, once);
      CHECK(once.residual == twice.residual);
      CHECK(once.out != twice.out);
    }
  }
}

// Zeros of both signs stay what they are, and nothing of what was there before is read.
TEST(rms_norm_starts_a_residual) {
  Rng rng(8);
  for (const size_t width : {320, 2560, 5120}) {
    for (const Delta kind : {Delta::kRow, Delta::kPartials}) {
      Input input = random_input(rng, 9, width, kind, 4);
      input.starts_residual = true;
      std::fill(input.residual.begin(), input.residual.end(), uint16_t{0x7fc0});
      const uint16_t zeros[] = {0x0000, 0x8000};
      for (size_t i = 0; i < 2 && kind == Delta::kRow; ++i) input.delta[5 + i] = zeros[i];
      const Result result = run_cuda(input);
      check_result(input, result);
      CHECK(result.residual == (kind == Delta::kRow ? input : with_summed_partials(input)).delta);
    }
  }
}

// Up to 256 wide rows of partial sums are normed by clusters, their sums by a block each.
TEST(rms_norm_of_partials_is_that_of_their_rounded_sum) {
  Rng rng(2);
  for (const size_t width : {320, 2560, 4096, 5120, 8192}) {
    for (const size_t num_partials : {1, 2, 3, 4, 8}) {
      for (const size_t num_rows : {9, 200, 257}) {
        const Input input = random_input(rng, num_rows, width, Delta::kPartials, num_partials);
        const Result result = run_cuda(input);
        const Result summed = run_cuda(with_summed_partials(input));
        CHECK(result.residual == summed.residual);
        CHECK(result.out == summed.out);
      }
    }
  }
}

// Terms lie in any order, and rows may lack some of them, or all.
TEST(rms_norm_of_terms_is_that_of_their_rounded_sum) {
  Rng rng(12);
  for (const size_t width : {48, 320, 2048, 4096, 5120, 8192}) {
    for (const size_t num_terms : {1, 3, 8, 10, 16}) {
      for (const bool has_places : {false, true}) {
        Input input = random_input(rng, 23, width, Delta::kNone);
        const size_t count = input.num_rows * num_terms;
        const Bits rows = to_bf16(rng.normals(count * width));
        const std::vector<float> weight = rng.normals(count);
        std::vector<int32_t> owner(count), place(count);
        std::iota(place.begin(), place.end(), 0);
        if (has_places) std::shuffle(place.begin(), place.end(), std::mt19937(1));
        for (int32_t& o : owner) o = rng.integer(-1, 6);
        std::fill_n(owner.begin(), num_terms, -1);
        for (size_t row = 0; row < input.num_rows; ++row) {
          std::vector<float> sum(width, 0.0f);
          for (size_t term = row * num_terms; term < (row + 1) * num_terms; ++term) {
            const auto from = static_cast<size_t>(place[term]) * width;
            for (size_t i = 0; i < width && owner[term] >= 0; ++i) {
              sum[i] = std::fma(weight[term], from_bf16(rows[from + i]), sum[i]);
            }
          }
          for (const float value : sum) input.delta.push_back(to_bf16(value));
        }
        const DeviceBuffer terms(rows), places(place), owners(owner), weights(weight);
        RowTerms given = {terms.data(), nullptr, owners.as<int32_t>(), weights.as<float>(),
                          static_cast<int>(num_terms)};
        if (has_places) given.place = places.as<int32_t>();
        const Result summed = run_cuda(input);
        input.delta.clear();
        const Result result = run_cuda(input, given);
        CHECK(result.residual == summed.residual);
        CHECK(result.out == summed.out);
      }
    }
  }
}

TEST(rms_norm_rows_are_invariant_bit_for_bit) {
  Rng rng(3);
  constexpr size_t kRows = 256;
  struct Added {
    Delta kind;
    size_t num_partials;
  };
  for (const size_t width : {1024, 2560, 2576, 4096, 5120, 8192}) {
    for (const Added added : {Added{Delta::kNone, 0}, Added{Delta::kRow, 0},
                              Added{Delta::kPartials, 4}, Added{Delta::kPartials, 7}}) {
      const Input input = random_input(rng, kRows, width, added.kind, added.num_partials);
      const Result all = run_cuda(input);
      for (const size_t count : {1, 2, 3, 5, 8, 16, 24, 33, 64, 100, 128, 255}) {
        const size_t begin = static_cast<size_t>(rng.integer(0, static_cast<int>(kRows - count)));
        const Result some = run_cuda(rows_of(input, begin, count));
        const auto begins_at = static_cast<std::ptrdiff_t>(begin * width);
        CHECK(std::equal(some.out.begin(), some.out.end(), all.out.begin() + begins_at));
        CHECK(std::equal(some.residual.begin(), some.residual.end(),
                         all.residual.begin() + begins_at));
      }
    }
  }
}

// Two norms write the halves of one buffer; what lies between an output's rows stays as it was.
TEST(rms_norm_writes_rows_apart) {
  Rng rng(7);
  constexpr size_t kRows = 37;
  for (const size_t width : {16, 320, 2048, 2560, 4096, 8192}) {
    const Input inputs[2] = {random_input(rng, kRows, width, Delta::kNone),
                             random_input(rng, kRows, width, Delta::kPartials, 4)};
    const Result expected[2] = {run_cuda(inputs[0]), run_cuda(inputs[1])};
    const size_t stride = 2 * width + 8;
    const DeviceBuffer out(kRows * stride * 2);
    for (size_t half = 0; half < 2; ++half) {
      const Input& input = inputs[half];
      const DeviceBuffer residual(input.residual), partials(input.partials), weight(input.weight);
      RmsNormParams params = shape_of(input);
      params.residual = residual.data();
      if (!input.partials.empty()) params.delta_partials = partials.as<float>();
      params.weight = weight.as<float>();
      params.out = out.as<uint16_t>() + half * width;
      params.out_stride = static_cast<int64_t>(stride);
      CHECK_CUDA(rms_norm_cuda(params, nullptr));
      CHECK(residual.download<uint16_t>() == expected[half].residual);
      const Bits rows = out.download<uint16_t>();
      for (size_t row = 0; row < kRows; ++row) {
        for (size_t i = 0; i < stride; ++i) {
          const size_t from = i / width;
          const bool is_written = from <= half && from < 2;
          const uint16_t bits = is_written ? expected[from].out[row * width + i % width] : 0xffff;
          CHECK_EQ(rows[row * stride + i], bits);
        }
      }
    }
    CHECK(out.guard_is_whole());
  }
}

// Columns of wider rows, or rows wider than a step's, in place: others stay as they were.
TEST(rms_norm_of_slices_and_of_wide_rows) {
  Rng rng(9);
  struct Shape {
    size_t width, stride, first;
  };
  for (const Shape shape : {Shape{64, 192, 64}, Shape{2560, 3 * 2560, 2560}, Shape{4096, 20480, 0},
                            Shape{12288, 12288, 0}, Shape{24576, 24592, 16}}) {
    for (const size_t num_rows : {1, 19}) {
      const Input input = random_input(rng, num_rows, shape.width, Delta::kNone);
      Bits rows(num_rows * shape.stride, uint16_t{0x1234});
      for (size_t row = 0; row < num_rows; ++row) {
        std::copy_n(input.residual.begin() + static_cast<std::ptrdiff_t>(row * shape.width),
                    shape.width,
                    rows.begin() + static_cast<std::ptrdiff_t>(row * shape.stride + shape.first));
      }
      const DeviceBuffer slices(rows), weight(input.weight);
      RmsNormParams params = shape_of(input);
      params.residual = params.out = slices.as<uint16_t>() + shape.first;
      params.residual_stride = params.out_stride = static_cast<int64_t>(shape.stride);
      params.weight = weight.as<float>();
      CHECK_CUDA(rms_norm_cuda(params, nullptr));
      CHECK(slices.guard_is_whole());
      const Bits written = slices.download<uint16_t>();
      Result result = {input.residual, {}};
      for (size_t i = 0; i < written.size(); ++i) {
        const size_t column = i % shape.stride;
        if (column >= shape.first && column < shape.first + shape.width) {
          result.out.push_back(written[i]);
        } else {
          CHECK_EQ(written[i], uint16_t{0x1234});
        }
      }
      check_result(input, result);
    }
  }
}

TEST(rms_norm_keeps_nan_in_its_row) {
  Rng rng(4);
  constexpr size_t kRows = 17, kWidth = 2560, kKept = 11;
  const Input input = random_input(rng, kRows, kWidth, Delta::kPartials, 4);
  Input poisoned = input;
  for (size_t i = 0; i < poisoned.residual.size(); ++i) {
    if (i / kWidth == kKept) continue;
    poisoned.residual[i] = 0x7fc0;
    for (size_t k = 0; k < 4; ++k) poisoned.partials[k * poisoned.residual.size() + i] = NAN;
  }
  const Result result = run_cuda(poisoned);
  const Result expected = run_cuda(rows_of(input, kKept, 1));
  CHECK(row_of(result.out, kKept, kWidth) == expected.out);
  CHECK(row_of(result.residual, kKept, kWidth) == expected.residual);
  CHECK(std::isnan(from_bf16(result.out[0])));
}

// Launches that depend on each other overlap (launch.cuh); each has to wait for the one before it.
void check_order(const Input& input) {
  constexpr int kLaunches = 40;
  const DeviceBuffer weight(input.weight), partials(input.partials);
  const Bits start = input.delta.empty() ? input.residual : input.delta;
  DeviceBuffer residual(input.residual), first(start), second(start.size() * 2);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const auto launch_all = [&](bool waits) {
    for (int i = 0; i < kLaunches; ++i) {
      RmsNormParams params = shape_of(input);
      params.residual = residual.data();
      if (input.partials.empty()) {
        params.delta = i % 2 == 0 ? first.data() : second.data();
      } else {
        params.delta_partials = partials.as<float>();
      }
      params.weight = weight.as<float>();
      params.out = i % 2 == 0 ? second.data() : first.data();
      CHECK_CUDA(rms_norm_cuda(params, stream));
      if (waits) CHECK_CUDA(cudaStreamSynchronize(stream));
    }
  };
  launch_all(true);
  const Result expected = {residual.download<uint16_t>(), first.download<uint16_t>()};

  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  launch_all(false);
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int replay = 0; replay < 3; ++replay) {
    residual.upload(input.residual);
    first.upload(start);
    second.poison();
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaGraphLaunch(executable, stream));
    CHECK(residual.download<uint16_t>() == expected.residual);
    CHECK(first.download<uint16_t>() == expected.out);
  }
  CHECK_CUDA(cudaGraphExecDestroy(executable));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
}

TEST(rms_norm_in_a_graph_follows_the_order_of_the_stream) {
  Rng rng(5);
  check_order(random_input(rng, 16, 2560, Delta::kRow));
  check_order(random_input(rng, 16, 5120, Delta::kPartials, 4));
}

TEST(rms_norm_refuses_what_it_cannot_do) {
  Rng rng(6);
  const Input input = random_input(rng, 2, 64, Delta::kRow);
  const DeviceBuffer residual(input.residual), delta(input.delta), partials(64 * 4 * 4),
      weight(input.weight), out(input.residual.size() * 2);
  RmsNormParams good = shape_of(input);
  good.residual = residual.data();
  good.delta = delta.data();
  good.weight = weight.as<float>();
  good.out = out.data();
  const auto result_of = [&](auto change) {
    RmsNormParams params = good;
    change(params);
    return rms_norm_cuda(params, nullptr);
  };
  constexpr int kInvalid = cudaErrorInvalidValue;
  CHECK_EQ(result_of([](RmsNormParams& p) { p.dtype = DType::kF32; }), kInvalid);
  CHECK_EQ(result_of([](RmsNormParams& p) { p.width = 24; }), kInvalid);
  CHECK_EQ(result_of([](RmsNormParams& p) { p.width = 8208; }), kInvalid);
  CHECK_EQ(result_of([](RmsNormParams& p) { ++p.weight; }), kInvalid);
  CHECK_EQ(result_of([](RmsNormParams& p) { p.out_stride = 56; }), kInvalid);
  CHECK_EQ(result_of([](RmsNormParams& p) { p.out_stride = 132; }), kInvalid);
  CHECK_EQ(result_of([](RmsNormParams& p) { p.out_stride = -64; }), kInvalid);
  CHECK_EQ(result_of([&](RmsNormParams& p) {
             p.delta_partials = partials.as<float>();
             p.num_partials = 2;
           }),
           kInvalid);
  CHECK_EQ(result_of([&](RmsNormParams& p) {
             p.delta = nullptr;
             p.delta_partials = partials.as<float>();
           }),
           kInvalid);
  CHECK_EQ(result_of([](RmsNormParams& p) { p.num_rows = 0; }), static_cast<int>(cudaSuccess));
  CHECK(residual.download<uint16_t>() == input.residual);
  CHECK_EQ(out.download<uint16_t>()[0], 0xffff);
}
