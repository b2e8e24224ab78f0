#include <cmath>

#include "linear_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

void check_against_reference(int num_outputs, int num_inputs, int num_rows, DType dtype,
                             DType out_dtype, LinearEpilogue epilogue,
                             LinearLayout layout = LinearLayout::kLines) {
  Rng rng(static_cast<uint64_t>(num_outputs * 1000 + num_inputs));
  const Matrix matrix(rng, num_outputs, num_inputs, epilogue, layout);
  Buffer x(rng.normals(static_cast<size_t>(num_rows * num_inputs)), dtype);
  const Buffer out = run(matrix, x, 0, num_rows, 2, out_dtype);
  for (int row = 0; row < num_rows; ++row) {
    for (int column = 0; column < matrix.width(); ++column) {
      const double expected = matrix.expected(x, row, column);
      const double found =
          static_cast<double>(out[static_cast<size_t>(row * matrix.width() + column)]);
      const double error = 1e-5 * (1 + std::sqrt(num_inputs)) * (1 + std::abs(expected));
      CHECK_NEAR(found, expected, tolerance(out_dtype, std::abs(expected), error));
    }
  }
}

}  // namespace

TEST(matches_reference_for_odd_sizes) {
  for_each_isa([] {
    for (const int num_outputs : {1, 31, 32, 33, 96, 250}) {
      for (const int num_inputs : {1, 7, 64, 129}) {
        for (const int num_rows : {1, 3, 7, 20}) {
          check_against_reference(num_outputs, num_inputs, num_rows, DType::kF32, DType::kF32,
                                  LinearEpilogue::kNone);
        }
      }
    }
  });
}

TEST(matches_reference_for_every_type) {
  for_each_isa([] {
    for (const DType x : both_dtypes()) {
      for (const DType out : both_dtypes()) {
        for (const LinearEpilogue epilogue : {LinearEpilogue::kNone, LinearEpilogue::kSwiGlu}) {
          check_against_reference(166, 70, 2, x, out, epilogue);
          check_against_reference(166, 71, 19, x, out, epilogue);
        }
      }
    }
  });
}

TEST(long_inner_dimension_is_cut_without_a_trace) {
  for_each_isa([] {
    check_against_reference(70, 1500, 40, DType::kF32, DType::kF32, LinearEpilogue::kNone);
  });
}

namespace {

void check_row_invariance(Rng& rng, int num_inputs, DType dtype, LinearEpilogue epilogue,
                          LinearLayout layout) {
  const Matrix matrix(rng, 204, num_inputs, epilogue, layout);
  constexpr int kRows = 200;
  Buffer x(rng.normals(static_cast<size_t>(kRows * matrix.num_inputs)), dtype);
  const size_t width = static_cast<size_t>(matrix.width());
  Buffer alone(kRows * width, DType::kF32);
  for (int row = 0; row < kRows; ++row) {
    const Buffer one = run(matrix, x, row, 1, 1, DType::kF32);
    for (size_t i = 0; i < width; ++i) alone.set(static_cast<size_t>(row) * width + i, one[i]);
  }
  std::vector<int> counts = {97, 200};
  for (int count = 1; count <= 70; ++count) counts.push_back(count);
  for (const int num_rows : counts) {
    const int first = rng.integer(0, kRows - num_rows);
    const Buffer out = run(matrix, x, first, num_rows, rng.integer(1, 5), DType::kF32);
    CHECK(out.same(0, alone, static_cast<size_t>(first) * width,
                   static_cast<size_t>(num_rows) * width));
  }
}

}  // namespace

TEST(rows_are_invariant_bit_for_bit) {
  for_each_isa([] {
    Rng rng(3);
    for (const DType dtype : both_dtypes()) {
      for (const LinearEpilogue epilogue : {LinearEpilogue::kNone, LinearEpilogue::kSwiGlu}) {
        check_row_invariance(rng, 700, dtype, epilogue, LinearLayout::kLines);
      }
    }
  });
}

TEST(matrix_unit_matches_reference_and_is_row_invariant) {
  if (!has_matrix_unit()) {
    CHECK(linear_layout_cpu(320) == LinearLayout::kLines);
    return;
  }
  CHECK(linear_layout_cpu(320) == LinearLayout::kPairs);
  CHECK(linear_layout_cpu(48) == LinearLayout::kLines);
  Rng rng(5);
  for (const DType dtype : both_dtypes()) {
    for (const LinearEpilogue epilogue : {LinearEpilogue::kNone, LinearEpilogue::kSwiGlu}) {
      for (const DType out : both_dtypes()) {
        for (const int num_outputs : {2, 34, 250}) {
          for (const int num_rows : {1, 5, 6, 11, 16, 17, 50}) {
            check_against_reference(num_outputs, 96, num_rows, dtype, out, epilogue,
                                    LinearLayout::kPairs);
          }
        }
      }
      check_row_invariance(rng, 704, dtype, epilogue, LinearLayout::kPairs);
    }
  }
}

// The same bits as adding it to the fp32 output, whatever computes that.
TEST(a_bias_is_added_before_the_rounding) {
  for_each_isa([] {
    Rng rng(8);
    for (const LinearLayout layout : {LinearLayout::kLines, LinearLayout::kPairs}) {
      if (layout == LinearLayout::kPairs && !has_matrix_unit()) continue;
      for (const int num_outputs : {1, 33, 250}) {
        Matrix matrix(rng, num_outputs, 96, LinearEpilogue::kNone, layout);
        const std::vector<float> bias = rng.normals(static_cast<size_t>(num_outputs), 20.0f);
        for (const DType dtype : both_dtypes()) {
          for (const int num_rows : {1, 5, 6, 7, 17, 50}) {
            Buffer x(rng.normals(static_cast<size_t>(num_rows) * 96), dtype);
            matrix.view.bias = nullptr;
            const Buffer plain = run(matrix, x, 0, num_rows, 2, DType::kF32);
            matrix.view.bias = bias.data();
            std::vector<float> expected(plain.size());
            for (size_t i = 0; i < expected.size(); ++i) {
              expected[i] = plain[i] + bias[i % static_cast<size_t>(num_outputs)];
            }
            for (const DType out : both_dtypes()) {
              const Buffer found = run(matrix, x, 0, num_rows, 2, out);
              CHECK(found.same(0, Buffer(expected, out), 0, expected.size()));
            }
          }
        }
      }
    }
  });
}

TEST(a_bias_of_split_or_gated_sums_is_refused) {
  Rng rng(9);
  Matrix matrix(rng, 64, 32, LinearEpilogue::kSwiGlu);
  const std::vector<float> bias(64);
  matrix.view.bias = bias.data();
  Buffer x(rng.normals(32), DType::kF32);
  CHECK_THROWS(run(matrix, x, 0, 1, 1, DType::kF32), EngineError, "has no bias");
}

TEST(packing_pads_with_zeros) {
  Rng rng(4);
  const Matrix matrix(rng, 2 * 33, 5, LinearEpilogue::kSwiGlu);
  // Two gate and two up panels; the second of each holds one real column, at an even place.
  for (const int panel : {2, 3}) {
    for (int k = 0; k < 5; ++k) {
      for (int i = 1; i < kLinearPanel; ++i) {
        const size_t at = static_cast<size_t>((panel * 5 + k) * kLinearPanel + i) * 2;
        CHECK_EQ(matrix.packed[at], 0);
        CHECK_EQ(matrix.packed[at + 1], 0);
      }
    }
  }
}

TEST(selected_outputs_are_packed_as_their_rows_are) {
  Rng rng(5);
  ThreadPool threads(3);
  for (const LinearLayout layout : {LinearLayout::kLines, LinearLayout::kPairs}) {
    const Matrix whole(rng, 150, 96, LinearEpilogue::kNone, layout);
    // Some of them twice, and panels that are not whole.
    const std::vector<int32_t> outputs = {149, 0,  3,  3,  31,  32,  33, 64, 100, 148, 17, 2,
                                          5,   8,  9,  1,  120, 121, 40, 41, 42,  43,  44, 45,
                                          46,  47, 48, 49, 50,  51,  52, 53, 54,  55,  16};
    std::vector<float> rows;
    for (const int32_t output : outputs) {
      const auto row = whole.values.begin() + output * whole.num_inputs;
      rows.insert(rows.end(), row, row + whole.num_inputs);
    }
    const Matrix expected(rng, static_cast<int>(outputs.size()), 96, LinearEpilogue::kNone, layout,
                          rows);
    std::vector<uint8_t> packed(expected.packed.size(), 0xee);
    linear_select_cpu({.pool = &threads}, {.from = whole.view,
                                           .output = outputs.data(),
                                           .to = expected.view,
                                           .packed = packed.data()});
    CHECK(packed == expected.packed);
  }
  const Matrix gated(rng, 64, 32, LinearEpilogue::kSwiGlu);
  std::vector<uint8_t> packed(gated.packed.size());
  const int32_t output = 0;
  CHECK_THROWS(
      linear_select_cpu(
          {.pool = &threads},
          {.from = gated.view, .output = &output, .to = gated.view, .packed = packed.data()}),
      EngineError, "of the same inputs and layout");
}
