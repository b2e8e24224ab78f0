#pragma once

/// What the tests of the CUDA linears share: the shapes, and a matrix on both sides.

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/cuda_testing.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/tiles.cuh"

namespace openspec::testing {

enum class Out { kBF16, kF32, kPartials };
enum class By { kDispatch, kStream, kWgmma };

// Millions of values quickly; Rng is for what is few.
inline std::vector<uint16_t> random_bf16(size_t count, float scale, uint64_t seed) {
  std::vector<uint16_t> values(count);
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (uint16_t& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = to_bf16(static_cast<float>(static_cast<int32_t>(state >> 32)) * (scale * 0x1p-31f));
  }
  return values;
}

constexpr LinearEpilogue kNone = LinearEpilogue::kNone;
constexpr LinearEpilogue kSwiGlu = LinearEpilogue::kSwiGlu;

struct Shape {
  std::string name;
  int num_outputs;
  int num_inputs;
  LinearEpilogue epilogue = kNone;
  int num_splits = 1;

  int num_columns() const { return epilogue == kSwiGlu ? num_outputs / 2 : num_outputs; }
};

inline PackedLinear packed(const Shape& shape, const void* data) {
  PackedLinear weight;
  weight.data = data;
  weight.num_outputs = shape.num_outputs;
  weight.num_inputs = shape.num_inputs;
  weight.epilogue = shape.epilogue;
  weight.layout = LinearLayout::kTiles;
  weight.num_splits = shape.num_splits;
  return weight;
}

// Inputs and splits as in the models, so that every length of chains occurs; outputs fewer where
// the matrix is large, but for one with so many units of short chains that rings go round.
inline const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {
      {"tiny qkv", 768, 320},
      {"tiny o", 320, 512, kNone, 4},
      {"tiny gate_up", 2432, 320, kSwiGlu},
      {"tiny down", 320, 1216, kNone, 4},
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
      {"14B o", 5120, 5120, kNone, 8},
      {"14B down", 640, 17408, kNone, 8},
      {"32B o", 640, 8192, kNone, 8},
      {"32B down", 640, 25600, kNone, 8},
      {"4B fc of three", 640, 7680, kNone, 4},
      {"4B fc of five", 640, 12800, kNone, 4},
      {"14B fc of three", 640, 15360, kNone, 8},
      {"Llama 8B down", 640, 14336, kNone, 4},
      {"Qwen2.5 0.5B qkv", 1152, 896},
      {"Qwen2.5 1.5B qkv", 2048, 1536},
      {"Qwen2.5 7B qkv", 1536, 3584},
      {"Qwen2.5 7B o", 640, 3584, kNone, 4},
      {"Qwen2.5 7B down", 640, 18944, kNone, 4},
      {"Qwen2.5 14B qkv", 1024, 5120},
      {"Qwen2.5 14B down", 640, 13824, kNone, 8},
      {"Qwen2.5 72B down", 320, 29568, kNone, 8},
      {"Nemo o", 640, 4096, kNone, 8},
      {"Nemo down", 640, 14336, kNone, 8},
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
  int num_columns() const { return shape_.num_columns(); }
  size_t row_bytes(Out out) const {
    return static_cast<size_t>(num_columns()) * (out == Out::kBF16 ? 2 : 4);
  }
  PackedLinear weight() const { return packed(shape_, packed_.data()); }
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
      FAIL(shape_.name + ": other bits, " + what);
    }
  }
  [[noreturn]] void fail(const std::string& what, int num_rows) const {
    FAIL(shape_.name + ", " + std::to_string(num_rows) + " rows: " + what);
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
inline Problem& problem_of(const Shape& shape) {
  static std::map<std::string, std::unique_ptr<Problem>> problems;
  std::unique_ptr<Problem>& problem = problems[shape.name];
  if (problem == nullptr) problem = std::make_unique<Problem>(shape);
  return *problem;
}
inline Problem& problem_named(const std::string& name) {
  for (const Shape& shape : shapes()) {
    if (name == shape.name) return problem_of(shape);
  }
  throw check_test::Failure("no shape " + name);
}

inline float element(const std::vector<uint8_t>& bytes, Out out, size_t index) {
  if (out == Out::kBF16) {
    uint16_t bits;
    std::memcpy(&bits, &bytes[2 * index], 2);
    return from_bf16(bits);
  }
  float value;
  std::memcpy(&value, &bytes[4 * index], 4);
  return value;
}

/// The bytes of an fp32 product: the sums of `num_splits` splits, one after another, in order.
inline std::vector<uint8_t> sum_of_partials(const std::vector<uint8_t>& partials, int num_splits) {
  const size_t size = partials.size() / 4 / static_cast<size_t>(num_splits);
  std::vector<uint8_t> sums(size * 4);
  for (size_t i = 0; i < size; ++i) {
    float sum = element(partials, Out::kPartials, i);
    for (int split = 1; split < num_splits; ++split) {
      sum += element(partials, Out::kPartials, static_cast<size_t>(split) * size + i);
    }
    std::memcpy(&sums[4 * i], &sum, 4);
  }
  return sums;
}

inline std::vector<Out> outs(const Shape& shape) {
  if (shape.epilogue == kSwiGlu) return {Out::kBF16};
  return {Out::kBF16, Out::kF32, Out::kPartials};
}

}  // namespace openspec::testing
