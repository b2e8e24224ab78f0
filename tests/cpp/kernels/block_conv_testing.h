#pragma once

/// What the tests of convolutions along blocks share, on the CPU and on CUDA.

#include "kernels/drafts/block_conv.h"
#include "kernels/kernel_testing.h"

namespace openspec::testing {

/// Blocks of one to five rows, then a row of padding. The rows' own coefficients are the second
/// half of wider rows.
struct ConvCase {
  ConvCase(Rng& rng, int num_rows, int width, int group, int num_partials = 0)
      : num_rows(num_rows), width(width), group(group), num_partials(num_partials) {
    int left = 0;
    for (int row = 0; row < num_rows; ++row) {
      parents.push_back(left == 0 || row + 1 == num_rows ? -1 : row - 1);
      left = left == 0 ? rng.integer(0, 4) : left - 1;
    }
    const auto count = static_cast<size_t>(num_rows * width);
    if (num_partials == 0) x = rng.normals(count, 2.0f);
    if (num_partials > 0) partials = rng.normals(count * static_cast<size_t>(num_partials));
    own = rng.normals(static_cast<size_t>(num_rows * own_stride()), 0.4f);
    base = rng.normals(static_cast<size_t>(kConvTaps * width));
  }

  int num_own() const { return kConvTaps * width / group; }
  int own_stride() const { return 2 * num_own(); }
  /// Its shapes, for arrays to be filled in.
  BlockConvParams params(DType dtype) const {
    BlockConvParams params;
    params.num_partials = num_partials;
    params.own_stride = own_stride();
    params.num_rows = num_rows;
    params.width = width;
    params.group = group;
    params.dtype = dtype;
    return params;
  }

  int num_rows, width, group, num_partials;
  std::vector<int32_t> parents;
  std::vector<float> x, partials, own, base;
};

/// What the CPU's op makes of it.
inline Buffer run_cpu(const ConvCase& c, DType dtype) {
  ThreadPool pool(2);
  Buffer x(c.x, dtype), own(c.own, dtype), out(static_cast<size_t>(c.num_rows * c.width), dtype);
  BlockConvParams params = c.params(dtype);
  params.row_parent = c.parents.data();
  params.x = c.num_partials == 0 ? x.data() : nullptr;
  params.partials = c.num_partials == 0 ? nullptr : c.partials.data();
  params.own =
      static_cast<std::byte*>(own.data()) + static_cast<size_t>(c.num_own()) * dtype_bytes(dtype);
  params.base = c.base.data();
  params.out = out.data();
  block_conv_cpu({.pool = &pool}, params);
  CHECK(out.guard_is_whole());
  return out;
}

}  // namespace openspec::testing
