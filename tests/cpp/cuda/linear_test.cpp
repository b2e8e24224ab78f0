#include "kernels/linear/linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "cuda/linear_testing.h"

namespace {

using namespace openspec;
using namespace openspec::testing;

NeedsDevice needs_device;

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

TEST(selects_outputs) {
  const int n = 320, k = 176, count = 96;
  const std::vector<uint16_t> rows = random_bf16(static_cast<size_t>(n) * k, 1.0f, 3);
  const auto shape_of = [&](int outputs) {
    return PackedLinear{.num_outputs = outputs, .num_inputs = k, .layout = LinearLayout::kTiles};
  };
  const auto pack = [&](const std::vector<uint16_t>& from, int outputs) {
    auto packed = std::make_unique<DeviceBuffer>(from.size() * 2);
    const DeviceBuffer source(from);
    CHECK_CUDA(
        linear_pack_cuda(shape_of(outputs), source.data(), 0, outputs, packed->data(), nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    return packed;
  };
  std::vector<int32_t> outputs(count);
  std::vector<uint16_t> chosen;
  for (int i = 0; i < count; ++i) {
    outputs[static_cast<size_t>(i)] = (i * 53 + 7) % n;
    const auto row = rows.begin() + outputs[static_cast<size_t>(i)] * k;
    chosen.insert(chosen.end(), row, row + k);
  }
  const auto whole = pack(rows, n), expected = pack(chosen, count);
  const DeviceBuffer list(outputs), packed(chosen.size() * 2);
  LinearSelectParams params = {.from = shape_of(n),
                               .output = list.as<int32_t>(),
                               .to = shape_of(count),
                               .packed = packed.data()};
  params.from.data = whole->data();
  CHECK_CUDA(linear_select_cuda(params, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK(packed.download<uint16_t>() == expected->download<uint16_t>());
  CHECK(packed.guard_is_whole());
  params.to.num_outputs = 90;
  CHECK_EQ(linear_select_cuda(params, nullptr), static_cast<int>(cudaErrorInvalidValue));
  params.to.num_outputs = count;
  params.from.format = MatrixFormat::kE4M3;
  CHECK_EQ(linear_select_cuda(params, nullptr), static_cast<int>(cudaErrorInvalidValue));
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
      const std::vector<uint8_t> sums = sum_of_partials(partials, shape.num_splits);
      std::vector<uint8_t> rounded_sums(size * 2);
      for (size_t i = 0; i < size; ++i) {
        const uint16_t bits = to_bf16(element(sums, Out::kF32, i));
        std::memcpy(&rounded_sums[2 * i], &bits, 2);
      }
      if (sums != whole) problem.fail("the partials' sum is not the fp32 output", num_rows);
      if (rounded_sums != rounded) problem.fail("nor rounded the bf16 output", num_rows);
    }
  }
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
