#include "kernels/linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "cuda/cuda_testing.h"
#include "kernels/linear_tiles.cuh"

namespace {

using namespace openspec;
using namespace openspec::testing;

NeedsDevice needs_device;

enum class Out { kBF16, kF32, kPartials };
enum class By { kDispatch, kStream, kWgmma };

// Millions of values quickly; Rng is for what is few.
std::vector<uint16_t> random_bf16(size_t count, float scale, uint64_t seed) {
  std::vector<uint16_t> values(count);
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (uint16_t& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = to_bf16(static_cast<float>(static_cast<int32_t>(state >> 32)) * (scale * 0x1p-31f));
  }
  return values;
}

struct Shape {
  const char* name;
  int num_outputs;
  int num_inputs;
  LinearEpilogue epilogue = LinearEpilogue::kNone;
  int num_splits = 1;
};
constexpr LinearEpilogue kNone = LinearEpilogue::kNone;
constexpr LinearEpilogue kSwiGlu = LinearEpilogue::kSwiGlu;

// Inputs and splits as in the models, so that every length of chains occurs; outputs fewer where
// the matrix is large.
const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {
      {"tiny qkv", 768, 320},
      {"tiny o", 320, 512},
      {"tiny gate_up", 2432, 320, kSwiGlu},
      {"tiny down", 320, 1216},
      {"tiny lm_head", 4096, 320},
      {"0.6B qkv", 4096, 1024},
      {"0.6B o", 1024, 2048, kNone, 4},
      {"0.6B gate_up", 6144, 1024, kSwiGlu},
      {"0.6B down", 1024, 3072, kNone, 4},
      {"1.7B qkv", 4096, 2048},
      {"4B qkv", 6144, 2560},
      {"4B o", 2560, 4096, kNone, 4},
      {"4B gate_up", 19456, 2560, kSwiGlu},
      {"4B down", 2560, 9728, kNone, 4},
      {"4B lm_head", 8192, 2560},
      {"8B qkv", 1536, 4096},
      {"8B down", 1024, 12288, kNone, 4},
      {"14B gate_up", 2048, 5120, kSwiGlu},
      {"14B o", 1280, 5120, kNone, 2},
      {"14B down", 640, 17408, kNone, 4},
      {"32B o", 640, 8192, kNone, 2},
      {"32B down", 640, 25600, kNone, 8},
      {"draft fc", 640, 7680},
      {"wide draft fc", 640, 12800},
      {"one step", 16, 16},
      {"empty chains", 48, 80},
      {"empty chains, swiglu", 48, 48, kSwiGlu},
      {"three uneven splits", 176, 944, kNone, 3},
      {"more splits than steps", 32, 32, kNone, 4},
      {"activations in phases", 320, 17408},
  };
  return all;
}

constexpr int kMaxRows = 256;

/// A matrix on both sides, activations for kMaxRows rows, and room for their outputs.
class Problem {
 public:
  explicit Problem(const Shape& shape)
      : shape_(shape),
        weights_(random_bf16(elements(shape.num_outputs), 0.06f, 1)),
        x_(random_bf16(elements(kMaxRows), 1.5f, 2)),
        packed_(linear_packed_bytes_cuda(shape.num_outputs, shape.num_inputs)),
        device_x_(x_),
        out_(static_cast<size_t>(kMaxRows) * shape.num_outputs * 4 * shape.num_splits) {
    const DeviceBuffer rows(weights_);
    CHECK_CUDA(
        linear_pack_cuda(weight(), rows.data(), 0, shape.num_outputs, packed_.data(), nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  const Shape& shape() const { return shape_; }
  const std::vector<uint16_t>& x() const { return x_; }
  const std::vector<uint16_t>& weights() const { return weights_; }
  int num_columns() const {
    return shape_.epilogue == kSwiGlu ? shape_.num_outputs / 2 : shape_.num_outputs;
  }
  size_t row_bytes(Out out) const {
    return static_cast<size_t>(num_columns()) * (out == Out::kBF16 ? 2 : 4);
  }
  PackedLinear weight() const {
    PackedLinear weight;
    weight.data = packed_.data();
    weight.num_outputs = shape_.num_outputs;
    weight.num_inputs = shape_.num_inputs;
    weight.dtype = DType::kBF16;
    weight.epilogue = shape_.epilogue;
    weight.layout = LinearLayout::kTiles;
    weight.num_splits = shape_.num_splits;
    return weight;
  }
  LinearParams params(int num_rows, Out out, const void* x) const {
    LinearParams params;
    params.weight = weight();
    params.x = x;
    params.out = out == Out::kPartials ? nullptr : out_.data();
    params.partials = out == Out::kPartials ? out_.as<float>() : nullptr;
    params.num_rows = num_rows;
    params.dtype = DType::kBF16;
    params.out_dtype = out == Out::kF32 ? DType::kF32 : DType::kBF16;
    return params;
  }

  /// Rows [first_row, first_row + num_rows) of x(): the output's bytes, and nothing behind them.
  std::vector<uint8_t> run(int first_row, int num_rows, Out out, By by = By::kDispatch,
                           const cuda::StreamPlan& plan = {}) {
    return run(params(num_rows, out, device_x_.as<uint16_t>() + elements(first_row)), out, by,
               plan);
  }
  std::vector<uint8_t> run(const LinearParams& params, Out out, By by,
                           const cuda::StreamPlan& plan = {}) {
    poison(params.num_rows, out);
    switch (by) {
      case By::kDispatch:
        CHECK_CUDA(linear_cuda(params, nullptr));
        break;
      case By::kStream:
        CHECK_CUDA(cuda::linear_stream(params, nullptr, plan));
        break;
      case By::kWgmma:
        CHECK_CUDA(cuda::linear_wgmma(params, nullptr));
        break;
    }
    return output(params.num_rows, out);
  }
  /// Before launches that `output` reads the result of.
  void poison(int num_rows, Out out) {
    CHECK_CUDA(cudaMemset(out_.data(), 0xff, output_bytes(num_rows, out) + kGuard));
  }
  std::vector<uint8_t> output(int num_rows, Out out) const {
    const size_t bytes = output_bytes(num_rows, out);
    CHECK_CUDA(cudaDeviceSynchronize());
    std::vector<uint8_t> result(bytes + kGuard);
    CHECK_CUDA(cudaMemcpy(result.data(), out_.data(), result.size(), cudaMemcpyDeviceToHost));
    for (size_t i = bytes; i < result.size(); ++i) {
      if (result[i] != 0xff) fail("written behind the last row", num_rows);
    }
    result.resize(bytes);
    return result;
  }
  const void* device_x() const { return device_x_.data(); }

  void check_same_rows(const std::vector<uint8_t>& result, int result_row,
                       const std::vector<uint8_t>& expected, int expected_row, int count, Out out,
                       const std::string& what) const {
    const size_t width = row_bytes(out);
    if (std::memcmp(result.data() + width * static_cast<size_t>(result_row),
                    expected.data() + width * static_cast<size_t>(expected_row),
                    width * static_cast<size_t>(count)) != 0) {
      FAIL(std::string(shape_.name) + ": other bits, " + what);
    }
  }
  [[noreturn]] void fail(const std::string& what, int num_rows) const {
    FAIL(std::string(shape_.name) + ", " + std::to_string(num_rows) + " rows: " + what);
  }

  /// sum_k x[row, k] * W[output, k], and the sum of the products' magnitudes.
  struct Product {
    double value = 0.0;
    double magnitude = 0.0;
  };
  Product product(int row, int output) const {
    Product sum;
    const uint16_t* x = &x_[elements(row)];
    const uint16_t* w = &weights_[elements(output)];
    for (int k = 0; k < shape_.num_inputs; ++k) {
      const double term = static_cast<double>(from_bf16(x[k])) * from_bf16(w[k]);
      sum.value += term;
      sum.magnitude += std::abs(term);
    }
    return sum;
  }
  /// The matrix unit may cut a step's sum to 22 bits or so of what is largest in it, once per step
  /// of a chain; the chains and splits are added with rounding.
  double product_error(const Product& product) const {
    const int chain = shape_.num_inputs / 16 / 8 / shape_.num_splits + 2;
    return product.magnitude * (chain + kLinearChains + shape_.num_splits) * 0x1p-22;
  }

 private:
  static constexpr size_t kGuard = 256;

  size_t output_bytes(int num_rows, Out out) const {
    return row_bytes(out) * static_cast<size_t>(num_rows) *
           static_cast<size_t>(out == Out::kPartials ? shape_.num_splits : 1);
  }
  size_t elements(int rows) const {
    return static_cast<size_t>(rows) * static_cast<size_t>(shape_.num_inputs);
  }

  Shape shape_;
  std::vector<uint16_t> weights_;
  std::vector<uint16_t> x_;
  DeviceBuffer packed_;
  DeviceBuffer device_x_;
  DeviceBuffer out_;
};

/// Made once: the tests go through the same shapes.
Problem& problem_of(const Shape& shape) {
  static std::map<std::string, std::unique_ptr<Problem>> problems;
  std::unique_ptr<Problem>& problem = problems[shape.name];
  if (problem == nullptr) problem = std::make_unique<Problem>(shape);
  return *problem;
}
Problem& problem_named(const std::string& name) {
  for (const Shape& shape : shapes()) {
    if (name == shape.name) return problem_of(shape);
  }
  throw check_test::Failure("no shape " + name);
}

float element(const std::vector<uint8_t>& bytes, Out out, size_t index) {
  if (out == Out::kBF16) {
    uint16_t bits;
    std::memcpy(&bits, &bytes[2 * index], 2);
    return from_bf16(bits);
  }
  float value;
  std::memcpy(&value, &bytes[4 * index], 4);
  return value;
}

std::vector<Out> outs(const Shape& shape) {
  if (shape.epilogue == kSwiGlu) return {Out::kBF16};
  return {Out::kBF16, Out::kF32, Out::kPartials};
}

void check_against_reference(const Problem& problem, const std::vector<uint8_t>& result,
                             int num_rows, Out out) {
  const size_t columns = static_cast<size_t>(problem.num_columns());
  Rng rng(num_rows);
  for (int sample = 0; sample < 40; ++sample) {
    const int column = sample == 0   ? 0
                       : sample == 1 ? problem.num_columns() - 1
                                     : rng.integer(0, problem.num_columns() - 1);
    for (int row = 0; row < num_rows; row += 1 + num_rows / 24) {
      const float value =
          element(result, out, static_cast<size_t>(row) * columns + static_cast<size_t>(column));
      const Problem::Product product = problem.product(row, column);
      double expected = product.value;
      double bound = problem.product_error(product);
      // Half a unit in the last place of what is rounded to bf16: at most 2^-8 of it.
      if (out == Out::kBF16) bound += std::abs(expected) * 0x1p-8 * 1.01;
      if (problem.shape().epilogue == kSwiGlu) {
        // Four roundings to bf16: gate, up, silu and the result; silu passes the gate's on with its
        // own condition.
        const Problem::Product up = problem.product(row, problem.num_columns() + column);
        const double gate = product.value;
        const double sigmoid = 1.0 / (1.0 + std::exp(-gate));
        const double slope = std::abs(sigmoid * (1.0 + gate * (1.0 - sigmoid)));
        expected = gate * sigmoid * up.value;
        bound = std::abs(expected) * 3 * 0x1p-8 +
                std::abs(up.value) * slope *
                    (std::abs(gate) * 0x1p-8 + problem.product_error(product)) +
                std::abs(gate * sigmoid) * problem.product_error(up);
        bound = 1.05 * bound + 1e-30;  // products of the errors
      }
      if (!(std::abs(value - expected) <= bound)) {
        problem.fail("row " + std::to_string(row) + " column " + std::to_string(column) + " is " +
                         std::to_string(value) + ", not " + std::to_string(expected) + " +- " +
                         std::to_string(bound),
                     num_rows);
      }
    }
  }
}

TEST(splits_depend_on_the_shape) {
  CHECK_EQ(linear_num_splits_cuda(2560, 4096), 4);
  CHECK_EQ(linear_num_splits_cuda(2560, 9728), 4);
  CHECK_EQ(linear_num_splits_cuda(6144, 2560), 2);
  CHECK_EQ(linear_num_splits_cuda(19456, 2560), 1);
  CHECK_EQ(linear_num_splits_cuda(151936, 2560), 1);
  CHECK_EQ(linear_num_splits_cuda(320, 512), 1);
  CHECK_EQ(linear_num_splits_cuda(1024, 2048), 4);
  CHECK_EQ(linear_num_splits_cuda(1024, 3072), 4);
  CHECK_EQ(linear_num_splits_cuda(2048, 6144), 8);
  CHECK_EQ(linear_num_splits_cuda(4096, 12288), 4);
  CHECK_EQ(linear_num_splits_cuda(5120, 17408), 4);
  CHECK_EQ(linear_num_splits_cuda(5120, 25600), 8);
}

TEST(packs_piece_by_piece) {
  for (const LinearEpilogue epilogue : {kNone, kSwiGlu}) {
    const int n = 96, k = 176;
    const size_t size = static_cast<size_t>(n) * k;
    const std::vector<uint16_t> rows = random_bf16(size, 1.0f, 3);
    PackedLinear shape;
    shape.num_outputs = n;
    shape.num_inputs = k;
    shape.epilogue = epilogue;
    shape.layout = LinearLayout::kTiles;
    std::vector<uint16_t> expected(size);
    for (int output = 0; output < n; ++output) {
      int unit = output / 16, row = output % 16;
      if (epilogue == kSwiGlu) {
        const bool is_up = output >= n / 2;
        unit = output % (n / 2) / 8;
        row = output % (n / 2) % 8 + (is_up ? 8 : 0);
      }
      for (int i = 0; i < k; ++i) {
        const int at = ((unit * (k / 8) + i / 8) * 16 + row) * 8 + i % 8;
        expected[static_cast<size_t>(at)] = rows[static_cast<size_t>(output * k + i)];
      }
    }
    for (const std::vector<int>& ends : {std::vector<int>{96}, {48, 96}, {1, 21, 70, 96}}) {
      CHECK_EQ(linear_packed_bytes_cuda(n, k), size * 2);
      const DeviceBuffer packed(size * 2);
      int begin = 0;
      for (const int end : ends) {
        const DeviceBuffer piece(
            std::vector<uint16_t>(rows.begin() + begin * k, rows.begin() + end * k));
        CHECK_CUDA(
            linear_pack_cuda(shape, piece.data(), begin, end - begin, packed.data(), nullptr));
        CHECK_CUDA(cudaDeviceSynchronize());
        begin = end;
      }
      CHECK(packed.download<uint16_t>() == expected);
      CHECK(packed.guard_is_whole());
    }
  }
}

TEST(matches_the_reference) {
  for (const Shape& shape : shapes()) {
    Problem& problem = problem_of(shape);
    for (const Out out : outs(shape)) {
      if (out == Out::kPartials) continue;  // see partials_add_up
      for (const int num_rows : {1, 7, 16, 27, 64, 133}) {
        if (out == Out::kF32 && num_rows != 7 && num_rows != 64) continue;
        check_against_reference(problem, problem.run(0, num_rows, out), num_rows, out);
      }
    }
  }
}

// The heart of the matter: the same row has the same bits whatever the number of rows and its
// place, for every kernel, variant and epilogue.
TEST(rows_are_invariant) {
  for (const Shape& shape : shapes()) {
    Problem& problem = problem_of(shape);
    const std::string name = shape.name;
    const bool is_thorough = name == "4B o" || name == "tiny down" || name == "0.6B gate_up";
    for (const Out out : outs(shape)) {
      if (out == Out::kPartials) continue;
      const std::vector<uint8_t> expected = problem.run(0, kMaxRows, out);
      for (int num_rows = 1; num_rows <= kMaxRows; ++num_rows) {
        const bool is_edge = num_rows % 8 <= 1 && (num_rows <= 33 || num_rows % 64 <= 1);
        if (!is_edge && (!is_thorough || out == Out::kF32) && num_rows != 5 && num_rows != 100) {
          continue;
        }
        const int last = kMaxRows - num_rows;
        for (const int first_row : {0, last / 2, last}) {
          if (first_row == last / 2 && num_rows > 64) continue;
          problem.check_same_rows(
              problem.run(first_row, num_rows, out), 0, expected, first_row, num_rows, out,
              std::to_string(num_rows) + " rows from " + std::to_string(first_row));
        }
      }
    }
  }
}

TEST(other_rows_do_not_matter) {
  for (const char* name :
       {"tiny down", "tiny gate_up", "4B qkv", "4B o", "0.6B gate_up", "activations in phases"}) {
    Problem& problem = problem_named(name);
    const size_t k = static_cast<size_t>(problem.shape().num_inputs);
    const std::vector<uint8_t> expected = problem.run(0, kMaxRows, Out::kBF16);
    for (const int num_rows : {2, 8, 13, 16, 24, 32, 64, 200}) {
      for (const int kept : {0, num_rows / 2, num_rows - 1}) {
        std::vector<uint16_t> x(static_cast<size_t>(num_rows) * k);
        for (size_t i = 0; i < x.size(); ++i) x[i] = i % 3 == 0 ? 0x7f80 : 0xffc1;  // inf, nan
        const auto from = problem.x().begin() + kept * static_cast<ptrdiff_t>(k);
        std::copy(from, from + static_cast<ptrdiff_t>(k),
                  x.begin() + kept * static_cast<ptrdiff_t>(k));
        const DeviceBuffer device_x(x);
        const LinearParams params = problem.params(num_rows, Out::kBF16, device_x.data());
        problem.check_same_rows(problem.run(params, Out::kBF16, By::kDispatch), kept, expected,
                                kept, 1, Out::kBF16, "others are not finite");
        problem.check_same_rows(problem.run(params, Out::kBF16, By::kStream), kept, expected, kept,
                                1, Out::kBF16, "others are not finite, linear_stream");
      }
    }
  }
}

TEST(partials_add_up) {
  for (const Shape& shape : shapes()) {
    if (shape.epilogue == kSwiGlu) continue;
    Problem& problem = problem_of(shape);
    const size_t n = static_cast<size_t>(shape.num_outputs);
    for (const int num_rows : {1, 3, 8, 16, 17, 32, 48, 64, 65, 128, 256}) {
      const size_t size = static_cast<size_t>(num_rows) * n;
      const std::vector<uint8_t> partials = problem.run(0, num_rows, Out::kPartials);
      const std::vector<uint8_t> whole = problem.run(0, num_rows, Out::kF32);
      const std::vector<uint8_t> rounded = problem.run(0, num_rows, Out::kBF16);
      std::vector<uint8_t> sums(size * 4), rounded_sums(size * 2);
      for (size_t i = 0; i < size; ++i) {
        float sum = element(partials, Out::kPartials, i);
        for (int split = 1; split < shape.num_splits; ++split) {
          sum += element(partials, Out::kPartials, static_cast<size_t>(split) * size + i);
        }
        const uint16_t bits = to_bf16(sum);
        std::memcpy(&sums[4 * i], &sum, 4);
        std::memcpy(&rounded_sums[2 * i], &bits, 2);
      }
      if (sums != whole) problem.fail("the partials' sum is not the fp32 output", num_rows);
      if (rounded_sums != rounded) problem.fail("nor rounded the bf16 output", num_rows);
    }
  }
}

// Also where linear_cuda would not choose linear_wgmma.
TEST(wgmma_gives_the_bits_of_stream) {
  for (const Shape& shape : shapes()) {
    Problem& problem = problem_of(shape);
    if (!cuda::linear_wgmma_takes(problem.weight(), kMaxRows)) continue;
    for (const Out out : outs(shape)) {
      for (const int num_rows :
           {1, 8, 9, 16, 17, 24, 25, 32, 33, 64, 65, 96, 97, 128, 129, 192, 256}) {
        if (problem.run(0, num_rows, out, By::kWgmma) !=
            problem.run(0, num_rows, out, By::kStream)) {
          problem.fail("linear_wgmma and linear_stream differ", num_rows);
        }
      }
    }
  }
}

TEST(the_plan_does_not_matter) {
  for (const char* name : {"4B qkv", "4B o", "4B down", "0.6B gate_up", "tiny down"}) {
    Problem& problem = problem_named(name);
    const Out out = problem.shape().num_splits > 1 ? Out::kPartials : Out::kBF16;
    for (const int num_rows : {1, 8, 16, 24, 32, 64}) {
      const std::vector<uint8_t> expected = problem.run(0, num_rows, out, By::kStream);
      for (const int blocks_per_sm : {1, 2, 3}) {
        for (const int ring_kib : {33, 48, 100}) {
          if (problem.run(0, num_rows, out, By::kStream, {blocks_per_sm, ring_kib}) != expected) {
            problem.fail("depends on the plan", num_rows);
          }
        }
      }
    }
  }
}

// Blocks that draw their work from one workspace, which every launch leaves as it found it. All
// shapes follow one another without waiting, as in a model; then some at a time, so that a launch
// often meets the one that it shares multiprocessors with.
TEST(drawing_work_does_not_matter) {
  const DeviceBuffer workspace(std::vector<uint8_t>(kLinearWorkspaceBytesCuda, 0));
  const auto is_zero = [&] {
    return workspace.download<uint8_t>() == std::vector<uint8_t>(kLinearWorkspaceBytesCuda, 0);
  };
  const auto out_of = [](const Shape& shape) {
    return shape.num_splits > 1 ? Out::kPartials : Out::kBF16;
  };
  for (const int num_rows : {1, 8, 9, 16, 17, 24, 25, 32}) {
    std::map<std::string, std::vector<uint8_t>> expected;
    for (const Shape& shape : shapes()) {
      expected[shape.name] = problem_of(shape).run(0, num_rows, out_of(shape), By::kStream);
    }
    for (const int blocks_per_sm : {1, 2}) {
      for (const size_t at_a_time : {shapes().size(), size_t{3}}) {
        for (size_t first = 0; first < shapes().size(); first += at_a_time) {
          const size_t end = std::min(first + at_a_time, shapes().size());
          for (size_t i = first; i < end; ++i) {
            problem_of(shapes()[i]).poison(num_rows, out_of(shapes()[i]));
          }
          for (int repeat = 0; repeat < 4; ++repeat) {
            for (size_t i = first; i < end; ++i) {
              const Problem& problem = problem_of(shapes()[i]);
              LinearParams params =
                  problem.params(num_rows, out_of(shapes()[i]), problem.device_x());
              params.workspace = workspace.as<float>();
              CHECK_CUDA(cuda::linear_stream(params, nullptr, {.blocks_per_sm = blocks_per_sm}));
            }
          }
          for (size_t i = first; i < end; ++i) {
            const Problem& problem = problem_of(shapes()[i]);
            if (problem.output(num_rows, out_of(shapes()[i])) != expected[shapes()[i].name]) {
              problem.fail("other bits where blocks draw their work", num_rows);
            }
          }
          CHECK(is_zero());
        }
      }
    }
  }
  CHECK(workspace.guard_is_whole());
}

TEST(runs_in_a_graph) {
  Problem& first = problem_named("0.6B gate_up");
  Problem& second = problem_named("4B o");
  const std::vector<uint8_t> first_expected = first.run(0, 8, Out::kBF16);
  const std::vector<uint8_t> second_expected = second.run(0, 16, Out::kPartials);
  const DeviceBuffer first_x(
      std::vector<uint16_t>(first.x().begin(), first.x().begin() + 8 * 1024));
  const DeviceBuffer second_x(
      std::vector<uint16_t>(second.x().begin(), second.x().begin() + 16 * 4096));
  DeviceBuffer first_out(first_expected.size()), second_out(second_expected.size());
  LinearParams first_params = first.params(8, Out::kBF16, first_x.data());
  LinearParams second_params = second.params(16, Out::kPartials, second_x.data());
  first_params.out = first_out.data();
  second_params.partials = second_out.as<float>();
  const DeviceBuffer workspace(std::vector<uint8_t>(kLinearWorkspaceBytesCuda, 0));
  first_params.workspace = second_params.workspace = workspace.as<float>();

  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < 4; ++i) {
    CHECK_CUDA(linear_cuda(first_params, stream));
    CHECK_CUDA(linear_cuda(second_params, stream));
  }
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  for (int i = 0; i < 3; ++i) {
    first_out.poison();
    second_out.poison();
    CHECK_CUDA(cudaGraphLaunch(replay, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK(first_out.download<uint8_t>() == first_expected);
    CHECK(second_out.download<uint8_t>() == second_expected);
    CHECK(first_out.guard_is_whole());
    CHECK(second_out.guard_is_whole());
  }
  CHECK_CUDA(cudaGraphExecDestroy(replay));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
}

TEST(rejects_what_it_does_not_do) {
  Problem& problem = problem_named("tiny qkv");
  LinearParams params = problem.params(4, Out::kBF16, nullptr);
  params.dtype = DType::kF32;
  CHECK_EQ(linear_cuda(params, nullptr), static_cast<int>(cudaErrorInvalidValue));
  params.dtype = DType::kBF16;
  params.weight.num_inputs = 328;
  CHECK_EQ(linear_cuda(params, nullptr), static_cast<int>(cudaErrorInvalidValue));
  params.weight.num_inputs = 320;
  params.weight.layout = LinearLayout::kPairs;
  CHECK_EQ(linear_cuda(params, nullptr), static_cast<int>(cudaErrorInvalidValue));
  params.weight.layout = LinearLayout::kTiles;
  params.num_rows = 0;
  CHECK_CUDA(linear_cuda(params, nullptr));
}

}  // namespace
