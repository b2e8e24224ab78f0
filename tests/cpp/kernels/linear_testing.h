#pragma once

/// What the tests of the CPU's linears share: a matrix, its shards, and their products.

#include <cmath>
#include <utility>

#include "kernel_testing.h"
#include "kernels/isa_cpu.h"
#include "kernels/linear/linear.h"

namespace openspec::testing {

struct Matrix {
  int num_outputs;
  int num_inputs;
  LinearEpilogue epilogue;
  std::vector<float> values;  // as stored: rounded to bf16
  std::vector<uint8_t> packed;
  PackedLinear view;

  Matrix(Rng& rng, int outputs, int inputs, LinearEpilogue what,
         LinearLayout layout = LinearLayout::kLines)
      : Matrix(rng, outputs, inputs, what, layout,
               rng.normals(static_cast<size_t>(outputs) * static_cast<size_t>(inputs), 0.3f)) {}
  // Packs in pieces of random size.
  Matrix(Rng& rng, int outputs, int inputs, LinearEpilogue what, LinearLayout layout,
         std::vector<float> numbers)
      : num_outputs(outputs), num_inputs(inputs), epilogue(what), values(std::move(numbers)) {
    Buffer source(values, DType::kBF16);
    for (size_t i = 0; i < values.size(); ++i) values[i] = source[i];
    view = {nullptr, outputs, inputs, layout, what};
    packed.assign(linear_packed_bytes_cpu(view), 0xff);
    view.data = packed.data();
    for (int row = 0; row < outputs;) {
      const int count = std::min(outputs - row, rng.integer(1, 100));
      const size_t offset = static_cast<size_t>(row) * static_cast<size_t>(inputs);
      linear_pack_cpu(view, static_cast<char*>(source.data()) + offset * sizeof(uint16_t), row,
                      count, packed.data());
      row += count;
    }
  }
  // Columns [begin, end) of the result.
  Matrix shard_of_outputs(Rng& rng, int begin, int end) const {
    std::vector<float> numbers;
    for (int part = 0; part < num_outputs; part += width()) {
      const auto row = [&](int column) { return values.begin() + (part + column) * num_inputs; };
      numbers.insert(numbers.end(), row(begin), row(end));
    }
    const int outputs = static_cast<int>(numbers.size()) / num_inputs;
    Matrix matrix(rng, outputs, num_inputs, epilogue, view.layout, std::move(numbers));
    matrix.view.shard = {.first_output = begin * (num_outputs / width()),
                         .whole_outputs = num_outputs};
    matrix.view.num_splits = view.num_splits;
    return matrix;
  }
  // Inputs [begin, end).
  Matrix shard_of_inputs(Rng& rng, int begin, int end) const {
    std::vector<float> numbers;
    for (auto row = values.begin(); row != values.end(); row += num_inputs) {
      numbers.insert(numbers.end(), row + begin, row + end);
    }
    Matrix matrix(rng, num_outputs, end - begin, epilogue, view.layout, std::move(numbers));
    matrix.view.num_splits = view.num_splits;
    matrix.view.shard = {.first_input = begin, .whole_inputs = num_inputs};
    return matrix;
  }
  int width() const { return epilogue == LinearEpilogue::kSwiGlu ? num_outputs / 2 : num_outputs; }
  double dot(const Buffer& x, int row, int output) const {
    double sum = 0;
    for (int k = 0; k < num_inputs; ++k) {
      sum += static_cast<double>(x[static_cast<size_t>(row * num_inputs + k)]) *
             static_cast<double>(values[static_cast<size_t>(output * num_inputs + k)]);
    }
    return sum;
  }
  double expected(const Buffer& x, int row, int column) const {
    if (epilogue == LinearEpilogue::kNone) return dot(x, row, column);
    const double gate = dot(x, row, column);
    return gate / (1 + std::exp(-gate)) * dot(x, row, column + width());
  }
};

// Multiplies rows of x from `first_row` on; complete(params) says where to.
template <typename Complete>
void run_linear(const Matrix& matrix, Buffer& x, int first_row, int num_rows, int num_threads,
                const Complete& complete) {
  ThreadPool pool(num_threads);
  std::vector<float> workspace =
      poisoned_floats(linear_workspace_bytes_cpu(num_rows, matrix.num_inputs, matrix.view.layout));
  LinearParams params;
  params.weight = matrix.view;
  params.x = static_cast<char*>(x.data()) +
             static_cast<size_t>(first_row * matrix.num_inputs) * dtype_bytes(x.dtype());
  params.num_rows = num_rows;
  params.dtype = x.dtype();
  params.workspace = workspace.data();
  complete(params);
  linear_cpu({.pool = &pool}, params);
}

inline Buffer run(const Matrix& matrix, Buffer& x, int first_row, int num_rows, int num_threads,
                  DType out_dtype) {
  Buffer out(static_cast<size_t>(num_rows * matrix.width()), out_dtype);
  run_linear(matrix, x, first_row, num_rows, num_threads, [&](LinearParams& params) {
    params.out = out.data();
    params.out_dtype = out_dtype;
  });
  CHECK(out.guard_is_whole());
  return out;
}

inline std::vector<LinearLayout> layouts() {
  if (!has_matrix_unit()) return {LinearLayout::kLines};
  return {LinearLayout::kLines, LinearLayout::kPairs};
}

}  // namespace openspec::testing
