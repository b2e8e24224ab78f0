// Linears with e4m3 weights: every code, the order of sums with scales, and the same bits by every
// kernel, for every number of rows, in shards and through an exchange.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/exchange_testing.h"
#include "cuda/linear_fp8_testing.h"

namespace {

using namespace openspec;
using namespace openspec::testing;

NeedsDevice needs_device;

constexpr ScaleKind kKinds[] = {ScaleKind::kOutput, ScaleKind::kBlock};

std::string name_of(const CodedMatrix& matrix) {
  return matrix.shape.name + (matrix.kind == ScaleKind::kBlock ? ", blocks" : ", outputs");
}
[[noreturn]] void fail(const CodedMatrix& matrix, int num_rows, const std::string& what) {
  FAIL(name_of(matrix) + ", " + std::to_string(num_rows) + " rows: " + what);
}

// Inputs of models and their splits; chains of all lengths that have a kernel of their own and of
// others, blocks that begin anywhere in a chain, and such as a split cuts.
const std::vector<Shape>& coded_shapes() {
  static const std::vector<Shape> all = {
      {"tiny gate_up", 608, 320, kSwiGlu},
      {"tiny down", 320, 1216, kNone, 4},
      {"0.6B gate_up", 1024, 1024, kSwiGlu},
      {"0.6B down", 256, 3072, kNone, 4},
      {"4B qkv", 1536, 2560},
      {"4B o", 320, 4096, kNone, 4},
      {"4B gate_up", 1216, 2560, kSwiGlu},
      {"4B down", 320, 9728, kNone, 4},
      {"8B qkv", 768, 4096},
      {"14B gate_up", 512, 5120, kSwiGlu},
      {"14B o", 2560, 5120, kNone, 8},
      {"14B down", 320, 17408, kNone, 8},
      {"Llama 8B down", 320, 14336, kNone, 4},
      {"Qwen2.5 0.5B qkv", 1152, 896},
      {"Qwen2.5 7B down", 320, 18944, kNone, 4},
      {"Qwen2.5 72B down", 320, 29568, kNone, 8},
      {"one step", 16, 16},
      {"empty chains", 48, 80},
      {"empty chains, swiglu", 48, 48, kSwiGlu},
      {"three uneven splits", 176, 944, kNone, 3},
      {"more splits than steps", 32, 32, kNone, 4},
  };
  return all;
}
const Shape& coded_shape(const std::string& name) {
  return *std::find_if(coded_shapes().begin(), coded_shapes().end(),
                       [&](const Shape& shape) { return shape.name == name; });
}

bool wgmma_takes(const PackedLinear& weight) { return cuda::linear_wgmma_takes(weight, kMaxRows); }

/// Row `row` of each split of two results of so many rows.
bool has_row(const CodedMatrix& matrix, Out out, const std::vector<uint8_t>& got, int num_rows,
             int row, const std::vector<uint8_t>& expected, int num_expected, int expected_row) {
  const size_t bytes =
      static_cast<size_t>(matrix.shape.num_columns()) * (out == Out::kBF16 ? 2 : 4);
  const int num_parts = out == Out::kPartials ? matrix.shape.num_splits : 1;
  for (int part = 0; part < num_parts; ++part) {
    const auto at = static_cast<size_t>(part * num_rows + row) * bytes;
    const auto expected_at = static_cast<size_t>(part * num_expected + expected_row) * bytes;
    if (std::memcmp(&got[at], &expected[expected_at], bytes) != 0) return false;
  }
  return true;
}

/// What a rank has in its inbox after a round, by the sums of all splits: those of the rows that it
/// takes, and in the first one all that the first rank adds.
std::vector<uint8_t> inbox_of(const std::vector<uint8_t>& partials, const Shape& shape,
                              const RoundForm& form, int rank, int num_rows) {
  const auto width = static_cast<size_t>(shape.num_outputs);
  const int num_sums = form.num_sums(shape.num_splits);
  std::vector<uint8_t> inbox(static_cast<size_t>(num_sums * form.inbox_rows) * width * 4, 0xff);
  for (int row = 0; row < num_rows; ++row) {
    if (form.owners.exist() && form.owners.rank_of(row) != rank) continue;
    const int place = form.owners.exist() ? form.owners.place_of(row) : row;
    for (int sum = 0; sum < num_sums; ++sum) {
      const int last = sum + form.first_sum, first = sum == 0 ? 0 : last;
      for (size_t output = 0; output < width; ++output) {
        const auto split_sum = [&](int split) {
          const auto at = static_cast<size_t>(split * num_rows + row) * width + output;
          return element(partials, Out::kF32, at);
        };
        float of_all = split_sum(first);
        for (int split = first + 1; split <= last; ++split) of_all += split_sum(split);
        const auto at = static_cast<size_t>(sum * form.inbox_rows + place) * width + output;
        std::memcpy(&inbox[at * 4], &of_all, 4);
      }
    }
  }
  return inbox;
}

/// The columns of x [num_rows, width] that the inputs of a part read.
std::vector<uint16_t> inputs_of(const CodedMatrix& part, const std::vector<uint16_t>& x,
                                size_t width, int num_rows) {
  std::vector<uint16_t> own;
  for (size_t row = 0; row < static_cast<size_t>(num_rows); ++row) {
    const auto from = x.begin() + static_cast<ptrdiff_t>(row * width) + part.shard.first_input;
    own.insert(own.end(), from, from + part.shape.num_inputs);
  }
  return own;
}

}  // namespace

// Row k of x is 1 at input k: its outputs are the weights of k, by each kernel.
TEST(every_code_has_its_value) {
  const int num_inputs = 512;
  std::vector<uint16_t> x(static_cast<size_t>(num_inputs * num_inputs));
  for (int k = 0; k < num_inputs; ++k) x[static_cast<size_t>(k * num_inputs + k)] = to_bf16(1.0f);
  const DeviceBuffer device_x(x);
  for (const ScaleKind kind : kKinds) {
    CodedMatrix matrix = coded_matrix({"codes", 256, num_inputs}, kind);
    for (size_t i = 0; i < matrix.codes.size(); ++i) {
      const auto code = static_cast<uint8_t>(i + i / 512 * 7);
      matrix.codes[i] = (code & 0x7f) == 0x7f ? 0x80 : code;
    }
    std::fill(matrix.scales.begin(), matrix.scales.end(), 1.0f);
    const DeviceMatrix device(matrix);
    for (const By by : {By::kStream, By::kWgmma}) {
      if (by == By::kWgmma && !wgmma_takes(device.weight())) continue;
      for (const int num_rows : {1, 8, 16, 24, 32, 64, 128, 512}) {
        for (int first = 0; first + num_rows <= num_inputs; first += num_rows < 8 ? 37 : num_rows) {
          const std::vector<uint8_t> got =
              outputs_of(device.weight(), device_x.as<uint16_t>() + first * num_inputs, num_rows,
                         Out::kF32, by);
          for (int row = 0; row < num_rows; ++row) {
            for (int output = 0; output < 256; ++output) {
              const float value = element(got, Out::kF32, static_cast<size_t>(row * 256 + output));
              if (value != value_of_code(matrix.code(output, first + row))) {
                fail(matrix, num_rows, "code " + std::to_string(matrix.code(output, first + row)));
              }
            }
          }
        }
      }
    }
  }
}

// Whole numbers, whose segments are exact in any order, and scales that make every further step
// round: the host in the order of the text, bit for bit.
TEST(sums_are_taken_in_the_order_of_the_text) {
  for (const Shape& shape : coded_shapes()) {
    if (shape.epilogue == kSwiGlu) continue;  // see powers_of_two_may_be_part_of_the_weights
    const auto width = static_cast<size_t>(shape.num_inputs);
    const std::vector<uint16_t> x = whole_activations(width * kMaxRows, 31);
    const DeviceBuffer device_x(x);
    for (const ScaleKind kind : kKinds) {
      const CodedMatrix matrix = coded_matrix(shape, kind, true);
      const DeviceMatrix device(matrix);
      for (const By by : {By::kDispatch, By::kStream, By::kWgmma}) {
        if (by == By::kWgmma && !wgmma_takes(device.weight())) continue;
        for (const int num_rows : {1, 7, 8, 16, 24, 25, 33, 64, 100, 128, 200, 256}) {
          const std::vector<uint8_t> got =
              outputs_of(device.weight(), device_x.data(), num_rows, Out::kPartials, by);
          for (int sample = 0; sample < 60; ++sample) {
            const int row = sample * 7 % num_rows, output = sample * 29 % shape.num_outputs;
            for (int split = 0; split < shape.num_splits; ++split) {
              const size_t at =
                  static_cast<size_t>(split * num_rows + row) * shape.num_outputs + output;
              const float expected = matrix.split_sum(&x[row * width], output, split);
              if (std::memcmp(&got[4 * at], &expected, 4) != 0) {
                fail(matrix, num_rows,
                     "row " + std::to_string(row) + " output " + std::to_string(output) +
                         " split " + std::to_string(split) + " is " +
                         std::to_string(element(got, Out::kPartials, at)) + ", not " +
                         std::to_string(expected));
              }
            }
          }
        }
      }
    }
  }
}

// Each row of 2048 as among others and alone, each kernel as the others.
TEST(rows_are_invariant) {
  constexpr int kAll = 2048;
  for (const Shape& shape : coded_shapes()) {
    const auto width = static_cast<size_t>(shape.num_inputs);
    const DeviceBuffer x(random_bf16(width * kAll, 1.5f, 32));
    for (const ScaleKind kind : kKinds) {
      const CodedMatrix matrix = coded_matrix(shape, kind);
      const DeviceMatrix device(matrix);
      for (const Out out : outs(shape)) {
        const std::vector<uint8_t> expected = outputs_of(device.weight(), x.data(), kAll, out);
        const auto check = [&](int first, int num_rows, By by) {
          const std::vector<uint8_t> got =
              outputs_of(device.weight(), x.as<uint16_t>() + first * width, num_rows, out, by);
          for (int row = 0; row < num_rows; ++row) {
            if (!has_row(matrix, out, got, num_rows, row, expected, kAll, first + row)) {
              fail(matrix, num_rows,
                   "row " + std::to_string(row) + " has other bits among 2048, by way " +
                       std::to_string(static_cast<int>(by)));
            }
          }
        };
        for (int num_rows = 1; num_rows <= 25; ++num_rows) {
          check(num_rows * 13, num_rows, By::kDispatch);
        }
        for (const int num_rows :
             {32, 33, 64, 65, 96, 97, 128, 129, 192, 193, 256, 257, 550, 1024}) {
          check(num_rows, num_rows, By::kDispatch);
        }
        for (const int num_rows : {1, 9, 24, 40}) check(5, num_rows, By::kStream);
        if (!wgmma_takes(device.weight())) continue;
        for (const int num_rows : {1, 9, 24, 32}) check(7, num_rows, By::kWgmma);
      }
    }
  }
}

// Tiles that leave a remainder everywhere: units, chains and blocks that end within a stage, rows.
TEST(the_plan_of_tiles_does_not_matter) {
  const Shape shapes[] = {{"65 units", 1040, 336},
                          {"uneven chains, three splits", 272, 16 * 85, kNone, 3},
                          {"uneven chains, swiglu", 512, 16 * 37, kSwiGlu},
                          {"aligned chains, four splits", 320, 2048, kNone, 4}};
  for (const Shape& shape : shapes) {
    const DeviceBuffer x(random_bf16(static_cast<size_t>(300) * shape.num_inputs, 1.0f, 33));
    for (const ScaleKind kind : kKinds) {
      const CodedMatrix matrix = coded_matrix(shape, kind);
      const DeviceMatrix device(matrix);
      if (!wgmma_takes(device.weight())) continue;
      for (const int num_rows : {1, 31, 97, 300}) {
        for (const Out out : outs(shape)) {
          const std::vector<uint8_t> expected =
              outputs_of(device.weight(), x.data(), num_rows, out, By::kStream);
          for (const int tile_rows : {32, 64, 96, 128}) {
            for (const int cluster : {1, 2}) {
              if (cluster == 2 && tile_rows < 96) continue;
              // Where sums of chains and of splits are in shared memory, no ring fits beside 12.
              const bool has_few = tile_rows == 128 && kind == ScaleKind::kBlock &&
                                   shape.num_splits > 1 && out != Out::kPartials;
              for (int units = 1; units <= (has_few ? 8 : 12); ++units) {
                for (const int num_runs : {0, 7}) {
                  const cuda::WgmmaPlan plan = {tile_rows, units, cluster, num_runs};
                  const auto by_plan = [&](const LinearParams& params) {
                    return cuda::linear_wgmma_as(plan, params, nullptr);
                  };
                  if (outputs_of(device.weight(), x.data(), num_rows, out, by_plan) != expected) {
                    fail(matrix, num_rows,
                         "tiles of " + std::to_string(tile_rows) + " rows x " +
                             std::to_string(units) + " units, cluster " + std::to_string(cluster) +
                             ", " + std::to_string(num_runs) + " runs");
                  }
                }
              }
            }
          }
        }
      }
    }
  }
}

// Without a scale to speak of, the kernels of bf16 have the same sums of any numbers.
TEST(scales_of_one_give_the_bits_of_bf16) {
  for (const char* name : {"4B qkv", "4B o", "4B gate_up", "4B down", "empty chains, swiglu"}) {
    const Shape& shape = coded_shape(name);
    CodedMatrix matrix = coded_matrix(shape, ScaleKind::kOutput);
    std::fill(matrix.scales.begin(), matrix.scales.end(), 1.0f);
    const DeviceMatrix device(matrix);
    std::vector<uint16_t> values;
    for (const uint8_t code : matrix.codes) values.push_back(to_bf16(value_of_code(code)));
    const DeviceBuffer data(values.size() * 2), rows(values);
    const PackedLinear plain = packed(shape, data.data());
    CHECK_CUDA(linear_pack_cuda(plain, rows.data(), 0, shape.num_outputs, data.data(), nullptr));
    const DeviceBuffer x(random_bf16(static_cast<size_t>(550) * shape.num_inputs, 1.5f, 34));
    for (const Out out : outs(shape)) {
      for (const int num_rows : {1, 8, 16, 24, 25, 64, 256, 300, 550}) {
        if (outputs_of(device.weight(), x.data(), num_rows, out) !=
            outputs_of(plain, x.data(), num_rows, out)) {
          fail(matrix, num_rows, "other bits than of bf16");
        }
      }
    }
  }
}

// Of whole numbers, scales that are powers of two commute with the sums: the kernels of bf16 with
// scaled weights have the same bits. So the scales are where they belong, gate's and up's too.
TEST(powers_of_two_may_be_part_of_the_weights) {
  for (const Shape& shape : coded_shapes()) {
    const DeviceBuffer x(whole_activations(static_cast<size_t>(kMaxRows) * shape.num_inputs, 35));
    for (const ScaleKind kind : kKinds) {
      CodedMatrix matrix = coded_matrix(shape, kind, true);
      for (size_t i = 0; i < matrix.scales.size(); ++i) {
        matrix.scales[i] = std::ldexp(1.0f, static_cast<int>(i * 7 % 5) - 6);
      }
      const DeviceMatrix device(matrix);
      std::vector<uint16_t> values;
      for (int output = 0; output < shape.num_outputs; ++output) {
        for (int k = 0; k < shape.num_inputs; ++k) {
          values.push_back(
              to_bf16(value_of_code(matrix.code(output, k)) * matrix.scale(output, k)));
        }
      }
      const DeviceBuffer data(values.size() * 2), rows(values);
      const PackedLinear plain = packed(shape, data.data());
      CHECK_CUDA(linear_pack_cuda(plain, rows.data(), 0, shape.num_outputs, data.data(), nullptr));
      for (const Out out : outs(shape)) {
        for (const int num_rows : {3, 16, 20, 64, 100, 256}) {
          if (outputs_of(device.weight(), x.data(), num_rows, out) !=
              outputs_of(plain, x.data(), num_rows, out)) {
            fail(matrix, num_rows, "other bits than of scaled weights");
          }
        }
      }
    }
  }
}

TEST(a_bias_is_added_to_the_scaled_sum) {
  for (const ScaleKind kind : kKinds) {
    const CodedMatrix matrix = coded_matrix(coded_shape("Qwen2.5 0.5B qkv"), kind);
    const DeviceMatrix device(matrix);
    const auto width = static_cast<size_t>(matrix.shape.num_outputs);
    const std::vector<float> bias = Rng(36).normals(width, 20.0f);
    const DeviceBuffer device_bias(bias);
    const DeviceBuffer x(
        random_bf16(static_cast<size_t>(kMaxRows) * matrix.shape.num_inputs, 1.5f, 37));
    for (const int num_rows : {1, 8, 9, 24, 27, 64, 100, 256}) {
      PackedLinear weight = device.weight();
      const std::vector<uint8_t> sums = outputs_of(weight, x.data(), num_rows, Out::kF32);
      weight.bias = device_bias.as<float>();
      for (const By by : {By::kDispatch, By::kStream}) {
        const std::vector<uint8_t> got = outputs_of(weight, x.data(), num_rows, Out::kF32, by);
        for (size_t i = 0; i < width * static_cast<size_t>(num_rows); ++i) {
          if (element(got, Out::kF32, i) != element(sums, Out::kF32, i) + bias[i % width]) {
            fail(matrix, num_rows, "bias");
          }
        }
      }
    }
  }
}

TEST(pieces_are_packed_like_the_whole) {
  for (const LinearEpilogue epilogue : {kNone, kSwiGlu}) {
    const CodedMatrix matrix = coded_matrix({"pieces", 96, 176, epilogue}, ScaleKind::kOutput);
    const std::vector<uint8_t> expected = DeviceMatrix(matrix).packed_bytes();
    for (const std::vector<int>& begins : {std::vector<int>{0, 48}, {0, 1, 21, 70}}) {
      CHECK(DeviceMatrix(matrix, begins).packed_bytes() == expected);
    }
  }
}

TEST(shards_have_the_bits_of_the_whole) {
  for (const Shape& shape : coded_shapes()) {
    const auto width = static_cast<size_t>(shape.num_inputs);
    const std::vector<uint16_t> x = random_bf16(width * 300, 1.5f, 38);
    const DeviceBuffer device_x(x);
    const int halves = shape.epilogue == kSwiGlu ? 2 : 1;
    const int num_units = shape.num_outputs / kLinearUnit, n = shape.num_splits;
    for (const ScaleKind kind : kKinds) {
      const CodedMatrix matrix = coded_matrix(shape, kind);
      const DeviceMatrix whole(matrix);
      for (const int num_rows : {1, 16, 24, 33, 64, 128, 200, 256, 300}) {
        const Out out = n > 1 ? Out::kPartials : Out::kBF16;
        const std::vector<uint8_t> expected =
            outputs_of(whole.weight(), device_x.data(), num_rows, out);
        const size_t bytes = out == Out::kBF16 ? 2 : 4;
        if (num_units > 2) {
          const int cut = num_units / 3 * kLinearUnit / halves;
          const int end = shape.num_outputs / halves;
          for (const auto& [first, last] : {std::pair{0, cut}, {cut, end}}) {
            const DeviceMatrix part(matrix.of_outputs(first, last));
            const std::vector<uint8_t> got =
                outputs_of(part.weight(), device_x.data(), num_rows, out);
            const size_t row_bytes = static_cast<size_t>(last - first) * bytes;
            for (int row = 0; row < num_rows * (out == Out::kPartials ? n : 1); ++row) {
              const size_t at = (static_cast<size_t>(row) * end + first) * bytes;
              if (std::memcmp(&got[row * row_bytes], &expected[at], row_bytes) != 0) {
                fail(matrix, num_rows, "a shard of outputs has other bits");
              }
            }
          }
        }
        if (n == 1 || shape.num_inputs < n * kSplitUnit) continue;
        const size_t split_bytes = expected.size() / static_cast<size_t>(n);
        for (int split = 0; split < n; split += n / 2 > 0 ? n / 2 : 1) {
          const int last = std::min(n, split + std::max(1, n / 2));
          const CodedMatrix part = matrix.of_splits(split, last);
          const DeviceMatrix device(part);
          const DeviceBuffer part_x(inputs_of(part, x, width, num_rows));
          const std::vector<uint8_t> got =
              outputs_of(device.weight(), part_x.data(), num_rows, out);
          if (std::memcmp(&got[split * split_bytes], &expected[split * split_bytes],
                          (last - split) * split_bytes) != 0) {
            fail(matrix, num_rows, "a shard of splits has other sums");
          }
        }
      }
    }
  }
}

// To all, to the owners of rows, and there with splits that the first rank has added; by the kernel
// for any device, too.
TEST(ranks_send_the_sums_of_the_whole) {
  for (const Shape& shape :
       {coded_shape("4B o"), coded_shape("14B o"), coded_shape("Qwen2.5 72B down"),
        coded_shape("three uneven splits"), Shape{"2560 outputs", 2560, 1072, kNone, 4},
        Shape{"5120 outputs", 5120, 1120, kNone, 8}}) {
    const auto width = static_cast<size_t>(shape.num_inputs);
    const std::vector<uint16_t> x = random_bf16(width * 550, 1.5f, 39);
    const DeviceBuffer device_x(x);
    const int n = shape.num_splits;
    for (const ScaleKind kind : kKinds) {
      const CodedMatrix matrix = coded_matrix(shape, kind);
      const std::vector<CodedMatrix> parts = {matrix.of_splits(0, n / 2),
                                              matrix.of_splits(n / 2, n)};
      const DeviceMatrix whole(matrix),
          ranks_own[] = {DeviceMatrix(parts[0]), DeviceMatrix(parts[1])};
      for (const int num_rows : {1, 8, 24, 33, 64, 128, 200, 256, 257, 550}) {
        const std::vector<uint8_t> partials =
            outputs_of(whole.weight(), device_x.data(), num_rows, Out::kPartials);
        const RoundForm form = round_form(2, n, num_rows, shape.num_outputs);
        for (const By by : {By::kDispatch, By::kStream}) {
          const Ranks ranks(2, inbox_floats(2, n, num_rows, shape.num_outputs));
          for (int rank = 0; rank < 2; ++rank) {
            const CodedMatrix& part = parts[static_cast<size_t>(rank)];
            const DeviceBuffer part_x(inputs_of(part, x, width, num_rows));
            LinearParams params;
            params.weight = ranks_own[rank].weight();
            params.x = part_x.data();
            params.num_rows = num_rows;
            params.dtype = DType::kBF16;
            params.exchange = &ranks[rank];
            const bool streams = by == By::kStream;
            if (streams) params.partials = reinterpret_cast<float*>(ranks[rank].memory[rank]);
            CHECK_CUDA(streams ? cuda::linear_stream(params, nullptr)
                               : linear_cuda(params, nullptr));
            CHECK_CUDA(cudaDeviceSynchronize());
          }
          for (int rank = 0; rank < 2; ++rank) {
            const std::vector<uint8_t> expected = inbox_of(partials, shape, form, rank, num_rows);
            std::vector<uint8_t> inbox(expected.size());
            const std::byte* sums = ranks[rank].memory[rank];
            if (form.owners.exist()) sums += kInboxSlots * ranks[rank].floats.slot * sizeof(float);
            CHECK_CUDA(cudaMemcpy(inbox.data(), sums, inbox.size(), cudaMemcpyDeviceToHost));
            if (inbox != expected) fail(matrix, num_rows, "an inbox has other sums");
          }
        }
      }
    }
  }
}

TEST(scales_that_are_missing_or_of_no_use_are_refused) {
  const CodedMatrix matrix = coded_matrix(coded_shape("empty chains"), ScaleKind::kOutput);
  const DeviceMatrix device(matrix);
  const DeviceBuffer x(random_bf16(static_cast<size_t>(4) * matrix.shape.num_inputs, 1.0f, 40));
  const DeviceBuffer out(static_cast<size_t>(4) * matrix.shape.num_outputs * 4);
  LinearParams legal;
  legal.weight = device.weight();
  legal.x = x.data();
  legal.out = out.data();
  legal.num_rows = 4;
  legal.dtype = DType::kBF16;
  CHECK_CUDA(linear_cuda(legal, nullptr));
  const auto refuses = [&](const auto& change) {
    LinearParams params = legal;
    change(params.weight);
    return linear_cuda(params, nullptr) == static_cast<int>(cudaErrorInvalidValue);
  };
  CHECK(refuses([](PackedLinear& weight) { weight.scales = nullptr; }));
  CHECK(refuses([](PackedLinear& weight) { weight.scale_kind = ScaleKind::kNone; }));
  CHECK(refuses([](PackedLinear& weight) { weight.format = MatrixFormat::kBF16; }));
}
