#include <array>

#include "kernels/block_conv_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

float rounded(float x, DType dtype) { return dtype == DType::kF32 ? x : from_bf16(to_bf16(x)); }

/// One number of the output, by the contract.
float expected(const ConvCase& c, DType dtype, int row, int column) {
  const auto input = [&](int of) {
    const auto at = static_cast<size_t>(of * c.width + column);
    if (c.num_partials == 0) return rounded(c.x[at], dtype);
    float sum = c.partials[at];
    for (size_t i = 1; i < static_cast<size_t>(c.num_partials); ++i) {
      sum += c.partials[at + i * static_cast<size_t>(c.num_rows * c.width)];
    }
    return rounded(sum, dtype);
  };
  const auto term = [&](int tap, int of) {
    const int at = c.num_own() + tap * c.width / c.group + column / c.group;
    const float own = rounded(c.own[static_cast<size_t>(row * c.own_stride() + at)], dtype);
    const float base = c.base[static_cast<size_t>(tap * c.width + column)];
    return rounded(input(of) * rounded(base + own, dtype), dtype);
  };
  const int parent = c.parents[static_cast<size_t>(row)];
  const float here = term(0, row);
  return parent < 0 ? here : rounded(here + term(1, parent), dtype);
}

}  // namespace

TEST(rows_are_mixed_with_those_they_follow) {
  Rng rng(1);
  for_each_isa([&] {
    for (const DType dtype : both_dtypes()) {
      for (const auto& [num_rows, width, group] :
           {std::array{1, 16, 8}, std::array{9, 48, 16}, std::array{70, 320, 16},
            std::array{3, 2560, 32}}) {
        for (const int num_partials : {0, 1, 3}) {
          const ConvCase c(rng, num_rows, width, group, num_partials);
          const Buffer out = run_cpu(c, dtype);
          for (int row = 0; row < num_rows; ++row) {
            for (int column = 0; column < width; ++column) {
              CHECK_EQ(out[static_cast<size_t>(row * width + column)],
                       expected(c, dtype, row, column));
            }
          }
        }
      }
    }
  });
}

TEST(blocks_do_not_see_each_other) {
  Rng rng(2);
  ConvCase c(rng, 3, 64, 16);
  c.parents = {-1, 0, -1};
  const Buffer before = run_cpu(c, DType::kF32);
  for (size_t i = 0; i < 128; ++i) c.x[i] = std::numeric_limits<float>::quiet_NaN();
  const Buffer after = run_cpu(c, DType::kF32);
  CHECK(after.same(128, before, 128, 64));
  CHECK(!after.same(0, before, 0, 128));
}

TEST(groups_that_no_kernel_takes_are_refused) {
  for (const int group : {0, 4, 24}) {
    BlockConvParams params;
    params.width = 64;
    params.group = group;
    CHECK_THROWS(block_conv_cpu({}, params), EngineError, "groups");
  }
}
