// A matrix computed in shards, by outputs and by inputs: the bits of the whole.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cuda/linear_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

// Rows [0, kMaxRows) of `of`, columns [begin, end) of `width`.
std::vector<uint16_t> columns(const std::vector<uint16_t>& of, int width, int begin, int end) {
  std::vector<uint16_t> cut;
  for (auto row = of.begin(); row != of.end(); row += width) {
    cut.insert(cut.end(), row + begin, row + end);
  }
  return cut;
}

// A part of a problem's matrix, and the activations that it reads, as a device would hold them.
class Shard {
 public:
  // Units [begin, end) of the outputs.
  static std::unique_ptr<Shard> of_outputs(const Problem& problem, int begin, int end) {
    const Shape& shape = problem.shape();
    const int halves = shape.epilogue == kSwiGlu ? 2 : 1;
    const int first = begin * kLinearUnit, count = (end - begin) * kLinearUnit;
    std::vector<uint16_t> rows;
    for (int half = 0; half < halves; ++half) {
      const auto from = problem.weights().begin() +
                        int64_t{half * problem.num_columns() + first / halves} * shape.num_inputs;
      rows.insert(rows.end(), from, from + int64_t{count / halves} * shape.num_inputs);
    }
    return std::make_unique<Shard>(
        Shape{shape.name, count, shape.num_inputs, shape.epilogue, shape.num_splits},
        LinearShard{.first_output = first, .whole_outputs = shape.num_outputs}, rows, problem.x());
  }
  // Splits [begin, end).
  static std::unique_ptr<Shard> of_inputs(const Problem& problem, int begin, int end) {
    const Shape& shape = problem.shape();
    const int first = split_inputs(shape.num_inputs, shape.num_splits, begin).begin;
    const int last = split_inputs(shape.num_inputs, shape.num_splits, end - 1).end;
    return std::make_unique<Shard>(
        Shape{shape.name, shape.num_outputs, last - first, shape.epilogue, shape.num_splits},
        LinearShard{.first_input = first, .whole_inputs = shape.num_inputs},
        columns(problem.weights(), shape.num_inputs, first, last),
        columns(problem.x(), shape.num_inputs, first, last));
  }
  Shard(const Shape& shape, const LinearShard& shard, const std::vector<uint16_t>& rows,
        const std::vector<uint16_t>& x)
      : shape_(shape),
        shard_(shard),
        packed_(linear_packed_bytes_cuda(shape.num_outputs, shape.num_inputs)),
        x_(x) {
    const DeviceBuffer source(rows);
    CHECK_CUDA(
        linear_pack_cuda(weight(), source.data(), 0, shape.num_outputs, packed_.data(), nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  const Shape& shape() const { return shape_; }
  PackedLinear weight() const {
    PackedLinear weight = packed(shape_, packed_.data());
    weight.shard = shard_;
    return weight;
  }
  LinearParams params(int num_rows, Out out, void* to) const {
    LinearParams params;
    params.weight = weight();
    params.x = x_.data();
    params.out = out == Out::kPartials ? nullptr : to;
    params.partials = out == Out::kPartials ? static_cast<float*>(to) : nullptr;
    params.num_rows = num_rows;
    params.dtype = DType::kBF16;
    params.out_dtype = out == Out::kF32 ? DType::kF32 : DType::kBF16;
    return params;
  }

 private:
  Shape shape_;
  LinearShard shard_;
  DeviceBuffer packed_, x_;
};

using Shards = std::vector<std::unique_ptr<Shard>>;

std::vector<int> row_counts(const Shape& shape) {
  std::vector<int> counts = {1,  2,  7,  8,  9,  16,  17,  24,  25,  27,  32, 33,
                             48, 64, 65, 96, 97, 128, 129, 192, 200, 255, 256};
  const bool is_thorough = shape.name == "0.6B o" || shape.name == "32B down" ||
                           shape.name == "tiny down" || shape.name == "tiny gate_up";
  for (int count = 1; is_thorough && count <= kMaxRows; ++count) counts.push_back(count);
  return counts;
}

// What shards of the outputs compute: into their columns of one buffer, or each its own splits'
// sums, put side by side here.
std::vector<uint8_t> gathered(const Problem& problem, const Shards& shards, int num_rows, Out out) {
  const size_t row_bytes = problem.row_bytes(out);
  const int num_parts = out == Out::kPartials ? problem.shape().num_splits : 1;
  const size_t num_result_rows = static_cast<size_t>(num_rows * num_parts);
  std::vector<uint8_t> result(num_result_rows * row_bytes);
  const DeviceBuffer whole(result.size());
  size_t first = 0;  // byte of a row
  for (const std::unique_ptr<Shard>& shard : shards) {
    const size_t width =
        static_cast<size_t>(shard->shape().num_columns()) * (out == Out::kBF16 ? 2 : 4);
    if (out == Out::kPartials) {
      const DeviceBuffer sums(num_result_rows * width);
      CHECK_CUDA(linear_cuda(shard->params(num_rows, out, sums.data()), nullptr));
      const std::vector<uint8_t> found = sums.download<uint8_t>();
      CHECK(sums.guard_is_whole());
      for (size_t row = 0; row < num_result_rows; ++row) {
        std::copy_n(&found[row * width], width, &result[row * row_bytes + first]);
      }
    } else {
      LinearParams params = shard->params(num_rows, out, whole.as<uint8_t>() + first);
      params.out_stride = problem.num_columns();
      CHECK_CUDA(linear_cuda(params, nullptr));
    }
    first += width;
  }
  CHECK(whole.guard_is_whole());
  return out == Out::kPartials ? result : whole.download<uint8_t>();
}

}  // namespace

TEST(shards_of_the_outputs_have_the_bits_of_the_whole) {
  for (const Shape& shape : shapes()) {
    Problem& problem = problem_of(shape);
    const int num_units = shape.num_outputs / kLinearUnit;
    for (const int num_shards : {2, 4}) {
      if (num_units < num_shards) continue;
      Shards shards;
      for (int i = 0; i < num_shards; ++i) {
        shards.push_back(Shard::of_outputs(problem, num_units * i / num_shards,
                                           num_units * (i + 1) / num_shards));
      }
      for (const Out out : outs(shape)) {
        for (const int num_rows : row_counts(shape)) {
          const std::vector<uint8_t> expected = problem.run(0, num_rows, out);
          if (gathered(problem, shards, num_rows, out) != expected) {
            problem.fail(std::to_string(num_shards) + " shards by outputs have other bits",
                         num_rows);
          }
        }
      }
    }
  }
}

// As tensor parallelism does: every shard puts its splits' sums at the whole's places, and one sum
// of all of them follows.
TEST(shards_of_the_inputs_have_the_sums_of_the_whole) {
  for (const Shape& shape : shapes()) {
    if (shape.num_splits == 1 || shape.num_inputs < shape.num_splits * kSplitUnit) continue;
    Problem& problem = problem_of(shape);
    const int n = shape.num_splits;
    std::vector<std::vector<int>> cuts = {{0, n / 2, n}, {0, 1, n}, {}};
    for (int split = 0; split <= n; ++split) cuts.back().push_back(split);
    for (const std::vector<int>& cut : cuts) {
      Shards shards;
      for (size_t i = 0; i + 1 < cut.size(); ++i) {
        shards.push_back(Shard::of_inputs(problem, cut[i], cut[i + 1]));
      }
      for (const int num_rows : row_counts(shape)) {
        const std::vector<uint8_t> expected = problem.run(0, num_rows, Out::kPartials);
        const std::vector<uint8_t> whole = problem.run(0, num_rows, Out::kF32);
        const size_t split_bytes = expected.size() / static_cast<size_t>(n);
        const DeviceBuffer partials(expected.size());
        for (size_t i = 0; i < shards.size(); ++i) {
          CHECK_CUDA(
              linear_cuda(shards[i]->params(num_rows, Out::kPartials, partials.data()), nullptr));
          const std::vector<uint8_t> found = partials.download<uint8_t>();
          const auto end = static_cast<ptrdiff_t>(split_bytes) * cut[i + 1];
          const bool is_same = std::equal(found.begin(), found.begin() + end, expected.begin());
          const bool is_rest = std::all_of(found.begin() + end, found.end(),
                                           [](uint8_t byte) { return byte == 0xff; });
          if (!is_same || !is_rest || !partials.guard_is_whole()) {
            problem.fail("shard " + std::to_string(i) + " of " + std::to_string(shards.size()) +
                             " by inputs has other sums or places",
                         num_rows);
          }
        }
        if (sum_of_partials(partials.download<uint8_t>(), n) != whole) {
          problem.fail("the shards' sum is not the whole's", num_rows);
        }
      }
    }
  }
}

TEST(shards_that_would_change_a_sum_are_refused) {
  Problem& problem = problem_named("0.6B o");
  const std::unique_ptr<Shard> shard = Shard::of_inputs(problem, 1, 3);
  const DeviceBuffer out(size_t{4} * 1024 * 4 * 4);
  const LinearParams legal = shard->params(4, Out::kPartials, out.data());
  CHECK_CUDA(linear_cuda(legal, nullptr));
  const auto refuses = [&](const auto& change) {
    LinearParams params = legal;
    change(params);
    return linear_cuda(params, nullptr) == static_cast<int>(cudaErrorInvalidValue);
  };
  CHECK(refuses([&](LinearParams& p) { p.partials = nullptr, p.out = out.data(); }));
  CHECK(refuses([](LinearParams& p) { p.weight.shard.first_input += 16; }));
  CHECK(refuses([](LinearParams& p) { p.weight.num_inputs -= 16; }));
  CHECK(refuses([](LinearParams& p) { p.weight.num_splits = 3; }));  // with other borders
  CHECK(refuses([](LinearParams& p) { p.weight.shard.first_input = 1536; }));
  CHECK(refuses([](LinearParams& p) { p.weight.shard.whole_outputs = 2048; }));
}
