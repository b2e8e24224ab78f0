#pragma once

/// What the tests of CUDA linears with e4m3 weights share: a matrix on both sides, and what the
/// host makes of it in the order that linear.h and linear_cuda state.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/linear_testing.h"
#include "kernels/linear/wgmma.h"

namespace openspec::testing {

/// By its definition; 0x7f and 0xff are no numbers.
inline float value_of_code(uint8_t code) {
  static const std::vector<float> values = [] {
    std::vector<float> all;
    for (int of = 0; of < 256; ++of) {
      const int exponent = of >> 3 & 15, mantissa = of & 7;
      const auto scaled = static_cast<float>(exponent == 0 ? mantissa : 8 + mantissa);
      const float value = std::ldexp(scaled, std::max(exponent, 1) - 10);
      all.push_back((of & 0x80) != 0 ? -value : value);
    }
    return all;
  }();
  return values[code];
}

inline std::vector<uint8_t> random_codes(size_t count, uint64_t seed) {
  std::vector<uint8_t> codes(count);
  const std::vector<uint16_t> random = random_bf16(count, 1.0f, seed);
  for (size_t i = 0; i < count; ++i) {
    codes[i] = static_cast<uint8_t>(random[i] ^ random[i] >> 8);
    if ((codes[i] & 0x7f) == 0x7f) codes[i] = 0x3c;
  }
  return codes;
}

// Whole numbers from -4 to 4: as codes and as activations. Sums of their products are exact in any
// order and by any instruction.
inline std::vector<uint8_t> whole_codes(size_t count, uint64_t seed) {
  constexpr uint8_t kCodes[] = {0x00, 0x38, 0x40, 0x44, 0x48, 0xb8, 0xc0, 0xc4, 0xc8};
  std::vector<uint8_t> codes = random_codes(count, seed);
  for (uint8_t& code : codes) code = kCodes[code % std::size(kCodes)];
  return codes;
}
inline std::vector<uint16_t> whole_activations(size_t count, uint64_t seed) {
  std::vector<uint16_t> values(count);
  const std::vector<uint8_t> codes = whole_codes(count, seed);
  for (size_t i = 0; i < count; ++i) values[i] = to_bf16(value_of_code(codes[i]));
  return values;
}

/// A matrix of codes with scales of outputs [num_outputs], or of 8 outputs and a block of inputs
/// [num_outputs / 8][blocks], in the order of outputs; or a shard of one.
struct CodedMatrix {
  Shape shape;
  ScaleKind kind = ScaleKind::kOutput;
  std::vector<uint8_t> codes;  // [num_outputs, num_inputs]
  std::vector<float> scales;
  LinearShard shard;

  /// The layout alone.
  PackedLinear layout() const {
    PackedLinear weight = packed(shape, nullptr);
    weight.format = MatrixFormat::kE4M3;
    weight.scale_kind = kind;
    weight.shard = shard;
    return weight;
  }
  float scale(int output, int input) const {
    if (kind == ScaleKind::kOutput) return scales[static_cast<size_t>(output)];
    const PackedLinear weight = layout();
    return scales[static_cast<size_t>(output / 8 * weight.num_scale_blocks() +
                                      weight.scale_block(input) - weight.scale_block(0))];
  }
  const uint8_t& code(int output, int input) const {
    return codes[static_cast<size_t>(output) * static_cast<size_t>(shape.num_inputs) +
                 static_cast<size_t>(input)];
  }

  /// Outputs [begin, end) of a matrix of one tensor; or of both of SwiGLU's.
  CodedMatrix of_outputs(int begin, int end) const {
    CodedMatrix part = *this;
    const int halves = shape.epilogue == kSwiGlu ? 2 : 1;
    part.shape.num_outputs = (end - begin) * halves;
    part.shard = {.first_output = begin * halves, .whole_outputs = shape.num_outputs};
    const size_t per_scale = kind == ScaleKind::kOutput ? 1 : 8;
    const auto row = static_cast<size_t>(shape.num_inputs);
    const size_t scale_row = scales.size() * per_scale / static_cast<size_t>(shape.num_outputs);
    part.codes.clear();
    part.scales.clear();
    for (int half = 0; half < halves; ++half) {
      const auto first = static_cast<size_t>(half * shape.num_outputs / halves + begin);
      const auto count = static_cast<size_t>(end - begin);
      part.codes.insert(part.codes.end(), &codes[first * row], &codes[0] + (first + count) * row);
      part.scales.insert(part.scales.end(), &scales[first / per_scale * scale_row],
                         &scales[0] + (first + count) / per_scale * scale_row);
    }
    return part;
  }
  /// Splits [begin, end).
  CodedMatrix of_splits(int begin, int end) const {
    CodedMatrix part = *this;
    const int first = split_inputs(shape.num_inputs, shape.num_splits, begin).begin;
    const int last = split_inputs(shape.num_inputs, shape.num_splits, end - 1).end;
    part.shape.num_inputs = last - first;
    part.shard = {.first_input = first, .whole_inputs = shape.num_inputs};
    part.codes.clear();
    for (int output = 0; output < shape.num_outputs; ++output) {
      part.codes.insert(part.codes.end(), &code(output, first), &code(output, last - 1) + 1);
    }
    if (kind == ScaleKind::kOutput) return part;
    part.scales.clear();
    for (int output = 0; output < shape.num_outputs; output += 8) {
      for (int block = first / kScaleInputs; block <= (last - 1) / kScaleInputs; ++block) {
        part.scales.push_back(scale(output, block * kScaleInputs));
      }
    }
    return part;
  }

  /// The sum of a split for one row of x, of which it has its own inputs.
  float split_sum(const uint16_t* x, int output, int split) const {
    const PackedLinear weight = layout();
    const cuda::StepRange steps = cuda::split_steps(weight, split);
    float sum = 0;
    for (int chain = 0; chain < kLinearChains; ++chain) {
      const int end = cuda::chain_begin(steps.begin, steps.end, chain + 1) * cuda::kLinearStep;
      float chain_sum = 0, segment = 0;
      for (int k = cuda::chain_begin(steps.begin, steps.end, chain) * cuda::kLinearStep; k < end;
           ++k) {
        segment += from_bf16(x[k]) * value_of_code(code(output, k));
        if (kind == ScaleKind::kOutput) continue;
        if (k + 1 == end || weight.scale_block(k + 1) != weight.scale_block(k)) {
          chain_sum = std::fmaf(segment, scale(output, k), chain_sum);
          segment = 0;
        }
      }
      if (kind == ScaleKind::kOutput) chain_sum = segment;
      sum = chain == 0 ? chain_sum : sum + chain_sum;
    }
    return kind == ScaleKind::kOutput ? sum * scale(output, 0) : sum;
  }
};

/// A matrix with numbers of every finite code, or whole ones, and scales of each sign and size.
inline CodedMatrix coded_matrix(const Shape& shape, ScaleKind kind, bool is_whole = false) {
  CodedMatrix matrix = {shape, kind, {}, {}, {}};
  const size_t count = static_cast<size_t>(shape.num_outputs) * shape.num_inputs;
  matrix.codes = is_whole ? whole_codes(count, 21) : random_codes(count, 22);
  for (const uint16_t bits :
       random_bf16(static_cast<size_t>(matrix.layout().num_scales()), 0.02f, 23)) {
    matrix.scales.push_back(from_bf16(bits) * 1.0001f);
  }
  return matrix;
}

/// A coded matrix on the device, packed in pieces that begin with `begins`.
class DeviceMatrix {
 public:
  explicit DeviceMatrix(const CodedMatrix& matrix, std::vector<int> begins = {0})
      : weight_(matrix.layout()), data_(matrix.codes.size()), scales_(packed_scales(matrix)) {
    weight_.data = data_.data();
    weight_.scales = scales_.as<float>();
    begins.push_back(weight_.num_outputs);
    for (size_t i = 0; i + 1 < begins.size(); ++i) {
      const auto at = [&](int row) {
        return matrix.codes.begin() + int64_t{row} * weight_.num_inputs;
      };
      const DeviceBuffer rows(std::vector<uint8_t>(at(begins[i]), at(begins[i + 1])));
      CHECK_CUDA(linear_pack_cuda(weight_, rows.data(), begins[i], begins[i + 1] - begins[i],
                                  data_.data(), nullptr));
      CHECK_CUDA(cudaDeviceSynchronize());
    }
    CHECK(data_.guard_is_whole());
  }

  const PackedLinear& weight() const { return weight_; }
  std::vector<uint8_t> packed_bytes() const { return data_.download<uint8_t>(); }

 private:
  static std::vector<float> packed_scales(const CodedMatrix& matrix) {
    const PackedLinear weight = matrix.layout();
    const int num_blocks = matrix.kind == ScaleKind::kOutput ? 1 : weight.num_scale_blocks();
    std::vector<float> table(static_cast<size_t>(weight.num_scales()));
    for (int output = 0; output < weight.num_outputs; ++output) {
      for (int block = 0; block < num_blocks; ++block) {
        const int input =
            std::max(0, (weight.scale_block(0) + block) * kScaleInputs - weight.shard.first_input);
        table[static_cast<size_t>(weight.scale_at(output, block))] = matrix.scale(output, input);
      }
    }
    return table;
  }

  PackedLinear weight_;
  DeviceBuffer data_, scales_;
};

/// What `launch(params)` writes for so many rows, and nothing behind it.
template <typename Launch>
std::vector<uint8_t> outputs_of(const PackedLinear& weight, const void* x, int num_rows, Out out,
                                const Launch& launch) {
  const size_t num_splits = out == Out::kPartials ? static_cast<size_t>(weight.num_splits) : 1;
  const size_t count = static_cast<size_t>(num_rows) * static_cast<size_t>(linear_width(weight));
  const DeviceBuffer to(count * num_splits * (out == Out::kBF16 ? 2 : 4));
  LinearParams params;
  params.weight = weight;
  params.x = x;
  params.out = out == Out::kPartials ? nullptr : to.data();
  params.partials = out == Out::kPartials ? to.as<float>() : nullptr;
  params.num_rows = num_rows;
  params.dtype = DType::kBF16;
  params.out_dtype = out == Out::kF32 ? DType::kF32 : DType::kBF16;
  CHECK_CUDA(launch(params));
  const std::vector<uint8_t> bytes = to.download<uint8_t>();
  CHECK(to.guard_is_whole());
  return bytes;
}
inline std::vector<uint8_t> outputs_of(const PackedLinear& weight, const void* x, int num_rows,
                                       Out out, By by = By::kDispatch) {
  return outputs_of(weight, x, num_rows, out, [&](const LinearParams& params) {
    return by == By::kDispatch ? linear_cuda(params, nullptr)
           : by == By::kStream ? cuda::linear_stream(params, nullptr)
                               : cuda::linear_wgmma(params, nullptr);
  });
}

}  // namespace openspec::testing
