// Matrices of e4m3 codes with scales of outputs and of blocks.

#include <algorithm>
#include <cmath>

#include "linear_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

float value_of(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                   : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return code & 0x80 ? -size : size;
}

const std::vector<uint8_t>& finite_codes() {
  static const std::vector<uint8_t> codes = [] {
    std::vector<uint8_t> all;
    for (int code = 0; code < 256; ++code) {
      if ((code & 0x7f) != 0x7f) all.push_back(static_cast<uint8_t>(code));
    }
    return all;
  }();
  return codes;
}

int num_blocks(int num_inputs) { return (num_inputs + kScaleInputs - 1) / kScaleInputs; }

struct Coded : Matrix {
  std::vector<uint8_t> codes;       // [num_outputs, num_inputs]
  std::vector<float> whole_scales;  // [num_outputs, blocks of the whole's inputs]
  std::vector<float> table;

  Coded(Rng& rng, int outputs, int inputs, LinearEpilogue what, LinearLayout layout, ScaleKind kind)
      : Coded(rng, outputs, inputs, what, layout, kind, {}, {}, {}) {}
  // Without codes: random ones, and scales.
  Coded(Rng& rng, int outputs, int inputs, LinearEpilogue what, LinearLayout layout, ScaleKind kind,
        LinearShard shard, std::vector<uint8_t> given, std::vector<float> given_scales)
      : Matrix(rng, outputs, inputs, what, layout),
        codes(std::move(given)),
        whole_scales(std::move(given_scales)) {
    view.shard = shard;
    view.format = MatrixFormat::kE4M3;
    view.scale_kind = kind;
    const int blocks = num_blocks(view.whole_inputs());
    while (codes.size() < values.size())
      codes.push_back(finite_codes()[static_cast<size_t>(rng.integer(0, 253))]);
    for (int i = static_cast<int>(whole_scales.size()); i < outputs * blocks; ++i) {
      const bool is_same = kind == ScaleKind::kOutput && i % blocks > 0;
      whole_scales.push_back(is_same ? whole_scales.back() : std::exp(rng.normal()) * 1e-3f);
    }
    table.assign(static_cast<size_t>(view.num_scales()), 0.0f);
    for (int n = 0; n < outputs; ++n) {
      for (int b = view.scale_block(0); b <= view.scale_block(inputs - 1); ++b) {
        table[static_cast<size_t>(view.scale_at(n, b - view.scale_block(0)))] = scale(n, b);
      }
    }
    packed.assign(linear_packed_bytes_cpu(view), 0xff);
    for (int row = 0; row < outputs;) {
      const int count = std::min(outputs - row, rng.integer(1, 100));
      linear_pack_cpu(view, &codes[static_cast<size_t>(row * inputs)], row, count, packed.data());
      row += count;
    }
    view.data = packed.data();
    view.scales = table.data();
    for (size_t i = 0; i < values.size(); ++i) {
      const int input = static_cast<int>(i) % inputs;
      values[i] = value_of(codes[i]) * scale(static_cast<int>(i) / inputs, view.scale_block(input));
    }
  }
  float scale(int output, int block) const {
    return whole_scales[static_cast<size_t>(output * num_blocks(view.whole_inputs()) + block)];
  }
  float code_value(int output, int input) const {
    return value_of(codes[static_cast<size_t>(output * num_inputs + input)]);
  }
  Coded inputs(Rng& rng, int begin, int end) const {
    std::vector<uint8_t> part;
    for (auto row = codes.begin(); row != codes.end(); row += num_inputs) {
      part.insert(part.end(), row + begin, row + end);
    }
    Coded shard(rng, num_outputs, end - begin, epilogue, view.layout, view.scale_kind,
                {.first_input = begin, .whole_inputs = num_inputs}, std::move(part), whole_scales);
    shard.view.num_splits = view.num_splits;
    return shard;
  }
};

// The contract's order of sums, of one output's whole row.
float in_order(const Coded& matrix, const Buffer& x, int row, int output) {
  const PackedLinear& view = matrix.view;
  float product = 0;
  for (int split = 0; split < view.num_splits; ++split) {
    float chain = 0, segment = 0;
    const InputRange inputs = view.inputs_of(split);
    for (int k = inputs.begin; k < inputs.end; ++k) {
      segment = std::fma(x[static_cast<size_t>(row * matrix.num_inputs + k)],
                         matrix.code_value(output, k), segment);
      const bool ends = view.scale_kind == ScaleKind::kBlock && (k + 1) % kScaleInputs == 0;
      if (!ends && k + 1 < inputs.end) continue;
      chain = std::fma(segment, matrix.scale(output, k / kScaleInputs), chain);
      segment = 0;
    }
    product = split == 0 ? chain : product + chain;
  }
  return product;
}

template <typename Body>
void for_each_kind(const Body& body) {
  for_each_isa([&] {
    for (const LinearLayout layout : layouts()) {
      for (const ScaleKind kind : {ScaleKind::kOutput, ScaleKind::kBlock}) body(layout, kind);
    }
  });
}

}  // namespace

TEST(every_finite_code_has_its_value) {
  for_each_kind([](LinearLayout layout, ScaleKind kind) {
    Rng rng(20);
    // A column of codes a row of x, so that each stands at every place of a line.
    std::vector<uint8_t> codes;
    for (size_t i = 0; i < size_t{254} * 64; ++i)
      codes.push_back(finite_codes()[(i / 64 + i % 64) % 254]);
    const Coded matrix(rng, 254, 64, LinearEpilogue::kNone, layout, kind, {}, codes,
                       std::vector<float>(254, 1.0f));
    for (const int num_rows : {1, 3, 64}) {
      Buffer x(std::vector<float>(static_cast<size_t>(num_rows) * 64), DType::kF32);
      for (int row = 0; row < num_rows; ++row) x.set(static_cast<size_t>(row * 64 + row), 1.0f);
      const Buffer out = run(matrix, x, 0, num_rows, 1, DType::kF32);
      for (int row = 0; row < num_rows; ++row) {
        for (int n = 0; n < 254; ++n) {
          CHECK_EQ(out[static_cast<size_t>(row * 254 + n)], matrix.code_value(n, row));
        }
      }
    }
  });
}

TEST(codes_match_the_reference) {
  for_each_kind([](LinearLayout layout, ScaleKind kind) {
    Rng rng(21);
    for (const LinearEpilogue epilogue : {LinearEpilogue::kNone, LinearEpilogue::kSwiGlu}) {
      for (const int num_outputs : {2, 34, 166}) {
        for (const int num_inputs : {32, 160, 1216, 71}) {
          if (layout == LinearLayout::kPairs && num_inputs == 71) continue;
          const Coded matrix(rng, num_outputs, num_inputs, epilogue, layout, kind);
          for (const int num_rows : {1, 6, 7, 50}) {
            Buffer x(rng.normals(static_cast<size_t>(num_rows * num_inputs), 0.02f), DType::kF32);
            const Buffer out = run(matrix, x, 0, num_rows, 2, DType::kF32);
            for (int i = 0; i < num_rows * matrix.width(); ++i) {
              const double expected = matrix.expected(x, i / matrix.width(), i % matrix.width());
              CHECK_NEAR(static_cast<double>(out[static_cast<size_t>(i)]), expected, 1e-4);
            }
          }
        }
      }
    }
  });
}

// Blocks that splits cut, and splits of several blocks.
TEST(chains_take_segments_in_the_order_of_the_contract) {
  for_each_kind([](LinearLayout layout, ScaleKind kind) {
    if (layout == LinearLayout::kPairs || cpu_isa() == Isa::kBaseline) return;  // parts; not fused
    Rng rng(22);
    for (const auto& [num_inputs, num_splits] :
         {std::pair{96, 1}, {1216, 8}, {1600, 1}, {2496, 2}}) {
      Coded matrix(rng, 70, num_inputs, LinearEpilogue::kNone, layout, kind);
      matrix.view.num_splits = num_splits;
      for (const int num_rows : {1, 6, 7, 101}) {
        Buffer x(rng.normals(static_cast<size_t>(num_rows * num_inputs)), DType::kF32);
        const Buffer out = run(matrix, x, 0, num_rows, 2, DType::kF32);
        for (int i = 0; i < num_rows * 70; i += 13) {
          CHECK_EQ(out[static_cast<size_t>(i)], in_order(matrix, x, i / 70, i % 70));
        }
      }
    }
  });
}

TEST(rows_of_products_with_codes_are_invariant) {
  for_each_kind([](LinearLayout layout, ScaleKind kind) {
    Rng rng(23);
    Coded matrix(rng, 204, 1216, LinearEpilogue::kNone, layout, kind);
    matrix.view.num_splits = 4;
    for (const DType dtype : both_dtypes()) {
      Buffer x(rng.normals(size_t{256} * 1216), dtype);
      const Buffer all = run(matrix, x, 0, 256, 2, DType::kF32);
      for (const int num_rows : {1, 2, 3, 4, 5, 6, 7, 13, 14, 16, 17, 40, 84, 85, 97, 200, 255}) {
        const int first = rng.integer(0, 256 - num_rows);
        const Buffer out = run(matrix, x, first, num_rows, rng.integer(1, 5), DType::kF32);
        CHECK(out.same(0, all, static_cast<size_t>(first) * 204,
                       static_cast<size_t>(num_rows) * 204));
      }
    }
  });
}

// A block of inputs may lie on two ranks: each multiplies its own splits' segments by its scale.
TEST(shards_of_inputs_have_the_sums_of_the_whole_with_codes) {
  for_each_kind([](LinearLayout layout, ScaleKind kind) {
    Rng rng(24);
    constexpr int kInputs = 1216, kSplits = 4, kOutputs = 70;
    Coded whole(rng, kOutputs, kInputs, LinearEpilogue::kNone, layout, kind);
    whole.view.num_splits = kSplits;
    for (const int num_rows : {1, 7, 100}) {
      Buffer x(rng.normals(static_cast<size_t>(num_rows * kInputs)), DType::kF32);
      const size_t split_size = static_cast<size_t>(num_rows * kOutputs);
      const auto sums_of = [&](const Coded& matrix, Buffer& in, Buffer& to) {
        run_linear(matrix, in, 0, num_rows, 2,
                   [&](LinearParams& params) { params.partials = static_cast<float*>(to.data()); });
      };
      Buffer expected(split_size * kSplits, DType::kF32), found = expected;
      sums_of(whole, x, expected);
      for (int split = 0; split < kSplits; ++split) {
        const InputRange range = split_inputs(kInputs, kSplits, split);
        const Coded shard = whole.inputs(rng, range.begin, range.end);
        std::vector<float> own;
        for (int row = 0; row < num_rows; ++row) {
          for (int k = range.begin; k < range.end; ++k) {
            own.push_back(x[static_cast<size_t>(row * kInputs + k)]);
          }
        }
        Buffer in(own, DType::kF32);
        sums_of(shard, in, found);
      }
      CHECK(found.same(0, expected, 0, expected.size()));
    }
  });
}

TEST(codes_without_scales_are_refused) {
  Rng rng(25);
  Coded matrix(rng, 32, 32, LinearEpilogue::kNone, LinearLayout::kLines, ScaleKind::kOutput);
  Buffer x(rng.normals(32), DType::kF32);
  matrix.view.scales = nullptr;
  CHECK_THROWS(run(matrix, x, 0, 1, 1, DType::kF32), EngineError, "codes have scales");
}
