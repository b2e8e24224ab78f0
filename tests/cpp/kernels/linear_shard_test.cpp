// A matrix whose sums are of splits, whole and in shards: the same bits.

#include <algorithm>

#include "linear_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

std::vector<int> row_counts() {
  std::vector<int> counts = {48, 64, 65, 84, 85, 97, 128, 168, 169, 200, 255, 256};
  for (int count = 1; count <= 40; ++count) counts.push_back(count);
  return counts;
}

// Inputs [begin, end) of every row.
Buffer columns(const Buffer& x, int num_inputs, int begin, int end) {
  std::vector<float> values;
  for (size_t row = 0; row < x.size(); row += static_cast<size_t>(num_inputs)) {
    for (int k = begin; k < end; ++k) values.push_back(x[row + static_cast<size_t>(k)]);
  }
  return Buffer(values, x.dtype());
}

void write_partials(const Matrix& matrix, Buffer& x, int num_rows, int num_threads,
                    Buffer& partials) {
  run_linear(matrix, x, 0, num_rows, num_threads,
             [&](LinearParams& params) { params.partials = static_cast<float*>(partials.data()); });
  CHECK(partials.guard_is_whole());
}

// ((s0 + s1) + s2) + ...
Buffer added(const Buffer& partials, int num_splits) {
  const size_t size = partials.size() / static_cast<size_t>(num_splits);
  Buffer sums(size, DType::kF32);
  for (size_t i = 0; i < size; ++i) {
    float sum = partials[i];
    for (size_t at = i + size; at < partials.size(); at += size) sum += partials[at];
    sums.set(i, sum);
  }
  return sums;
}

}  // namespace

// A split is a matrix of its own: the sums are those of the unsplit matrices of its inputs.
TEST(a_product_is_the_sum_of_its_splits) {
  for_each_isa([] {
    Rng rng(12);
    for (const LinearLayout layout : layouts()) {
      for (const auto& [num_inputs, num_splits] :
           {std::pair{1216, 4}, {1216, 8}, {96, 3}, {2496, 2}}) {
        Matrix whole(rng, 70, num_inputs, LinearEpilogue::kNone, layout);
        whole.view.num_splits = num_splits;
        for (const DType dtype : both_dtypes()) {
          for (const int num_rows : {1, 2, 6, 7, 40, 101}) {
            Buffer x(rng.normals(static_cast<size_t>(num_rows * num_inputs)), dtype);
            const size_t size = static_cast<size_t>(num_rows) * 70;
            Buffer partials(size * static_cast<size_t>(num_splits), DType::kF32);
            write_partials(whole, x, num_rows, 2, partials);
            for (int split = 0; split < num_splits; ++split) {
              const InputRange inputs = split_inputs(num_inputs, num_splits, split);
              Matrix alone = whole.shard_of_inputs(rng, inputs.begin, inputs.end);
              alone.view.shard = {};
              alone.view.num_splits = 1;
              Buffer own = columns(x, num_inputs, inputs.begin, inputs.end);
              const Buffer sums = run(alone, own, 0, num_rows, 1, DType::kF32);
              CHECK(sums.same(0, partials, static_cast<size_t>(split) * size, size));
            }
            const Buffer sums = added(partials, num_splits);
            for (const DType out : both_dtypes()) {
              const Buffer found = run(whole, x, 0, num_rows, 2, out);
              std::vector<float> expected(size);
              for (size_t i = 0; i < size; ++i) expected[i] = sums[i];
              CHECK(found.same(0, Buffer(expected, out), 0, size));
            }
          }
        }
      }
    }
  });
}

TEST(rows_of_split_sums_are_invariant) {
  for_each_isa([] {
    Rng rng(13);
    for (const LinearLayout layout : layouts()) {
      Matrix matrix(rng, 204, 1216, LinearEpilogue::kNone, layout);
      matrix.view.num_splits = 4;
      Buffer x(rng.normals(size_t{256} * 1216), DType::kF32);
      const Buffer all = run(matrix, x, 0, 256, 2, DType::kF32);
      for (const int num_rows : row_counts()) {
        const int first = rng.integer(0, 256 - num_rows);
        const Buffer out = run(matrix, x, first, num_rows, rng.integer(1, 5), DType::kF32);
        CHECK(out.same(0, all, static_cast<size_t>(first) * 204,
                       static_cast<size_t>(num_rows) * 204));
      }
    }
  });
}

namespace {

// Shards side by side in rows that are wider than all of them.
void check_shards_of_outputs(Rng& rng, const Matrix& whole, DType dtype, int num_shards) {
  constexpr int kRows = 256, kMargin = 3;
  Buffer x(rng.normals(static_cast<size_t>(kRows * whole.num_inputs)), dtype);
  const Buffer expected = run(whole, x, 0, kRows, 2, DType::kF32);
  const int width = whole.width(), stride = width + kMargin;
  std::vector<Matrix> shards;
  for (int i = 0; i < num_shards; ++i) {
    shards.push_back(
        whole.shard_of_outputs(rng, width * i / num_shards, width * (i + 1) / num_shards));
  }
  for (const int num_rows : row_counts()) {
    Buffer out(static_cast<size_t>(num_rows * stride), DType::kF32);
    const Buffer untouched = out;
    int column = 0;
    for (const Matrix& shard : shards) {
      run_linear(shard, x, 0, num_rows, rng.integer(1, 3), [&](LinearParams& params) {
        params.out = static_cast<float*>(out.data()) + column;
        params.out_stride = stride;
      });
      column += shard.width();
    }
    CHECK(out.guard_is_whole());
    for (int row = 0; row < num_rows; ++row) {
      const size_t at = static_cast<size_t>(row * stride);
      CHECK(out.same(at, expected, static_cast<size_t>(row * width), static_cast<size_t>(width)));
      CHECK(out.same(at + static_cast<size_t>(width), untouched, 0, kMargin));
    }
  }
}

}  // namespace

TEST(shards_of_the_outputs_have_the_bits_of_the_whole) {
  for_each_isa([] {
    Rng rng(10);
    for (const LinearLayout layout : layouts()) {
      for (const LinearEpilogue epilogue : {LinearEpilogue::kNone, LinearEpilogue::kSwiGlu}) {
        Matrix whole(rng, 204, 96, epilogue, layout);
        if (epilogue == LinearEpilogue::kNone) whole.view.num_splits = 2;
        for (const int num_shards : {2, 4}) {
          for (const DType dtype : both_dtypes()) {
            check_shards_of_outputs(rng, whole, dtype, num_shards);
          }
        }
      }
    }
  });
}

TEST(rows_of_bf16_outputs_may_lie_further_apart) {
  for_each_isa([] {
    Rng rng(14);
    for (const LinearLayout layout : layouts()) {
      const Matrix matrix(rng, 70, 64, LinearEpilogue::kNone, layout);
      Buffer x(rng.normals(size_t{20} * 64), DType::kBF16);
      const Buffer expected = run(matrix, x, 0, 20, 2, DType::kBF16);
      Buffer out(size_t{20} * 77, DType::kBF16);
      const Buffer untouched = out;
      run_linear(matrix, x, 0, 20, 2, [&](LinearParams& params) {
        params.out = out.data();
        params.out_dtype = DType::kBF16;
        params.out_stride = 77;
      });
      for (size_t row = 0; row < 20; ++row) {
        CHECK(out.same(row * 77, expected, row * 70, 70));
        CHECK(out.same(row * 77 + 70, untouched, 0, 7));
      }
    }
  });
}

// As tensor parallelism does: every shard puts its splits' sums at the whole's places.
TEST(shards_of_the_inputs_have_the_sums_of_the_whole) {
  for_each_isa([] {
    Rng rng(15);
    for (const LinearLayout layout : layouts()) {
      for (const int n : {4, 8}) {
        Matrix whole(rng, 70, 1216, LinearEpilogue::kNone, layout);
        whole.view.num_splits = n;
        std::vector<std::vector<int>> cuts = {{0, n / 2, n}, {0, 1, n}, {}};
        for (int i = 0; i <= n; ++i) cuts.back().push_back(i);
        for (const DType dtype : both_dtypes()) {
          for (const int num_rows : {1, 3, 6, 7, 16, 17, 100}) {
            Buffer x(rng.normals(static_cast<size_t>(num_rows * 1216)), dtype);
            const size_t split_size = static_cast<size_t>(num_rows) * 70;
            const Buffer untouched(split_size * static_cast<size_t>(n), DType::kF32);
            Buffer expected = untouched;
            write_partials(whole, x, num_rows, 2, expected);
            for (const std::vector<int>& cut : cuts) {
              Buffer partials = untouched;
              for (size_t i = 0; i + 1 < cut.size(); ++i) {
                const int begin = split_inputs(1216, n, cut[i]).begin;
                const int end = split_inputs(1216, n, cut[i + 1] - 1).end;
                const Matrix shard = whole.shard_of_inputs(rng, begin, end);
                Buffer own = columns(x, 1216, begin, end);
                write_partials(shard, own, num_rows, rng.integer(1, 3), partials);
                const size_t written = split_size * static_cast<size_t>(cut[i + 1]);
                CHECK(partials.same(0, expected, 0, written));
                CHECK(partials.same(written, untouched, written, partials.size() - written));
              }
            }
          }
        }
      }
    }
  });
}

TEST(shards_that_would_change_a_sum_are_refused) {
  Rng rng(11);
  Matrix matrix(rng, 64, 64, LinearEpilogue::kNone);
  Buffer x(rng.normals(64), DType::kF32);
  Buffer partials(size_t{4} * 64, DType::kF32);
  const auto take = [&](int num_splits, const LinearShard& shard) {
    matrix.view.num_splits = num_splits;
    matrix.view.shard = shard;
    write_partials(matrix, x, 1, 1, partials);
  };
  take(4, {.first_input = 32, .whole_inputs = 128});
  const char* kNoShard = "a shard is some";
  CHECK_THROWS(take(4, {.first_input = 16, .whole_inputs = 128}), EngineError, kNoShard);
  CHECK_THROWS(take(2, {.first_input = 32, .whole_inputs = 128}), EngineError, kNoShard);
  CHECK_THROWS(take(4, {.first_input = 96, .whole_inputs = 128}), EngineError, kNoShard);
  CHECK_THROWS(take(4, {.first_input = -32, .whole_inputs = 128}), EngineError, kNoShard);
  CHECK_THROWS(take(1, {.first_output = 32, .whole_outputs = 64}), EngineError, kNoShard);

  matrix.view.num_splits = 4;
  matrix.view.shard = {.first_input = 32, .whole_inputs = 128};
  CHECK_THROWS(run(matrix, x, 0, 1, 1, DType::kF32), EngineError, "stay apart");
  matrix.view.num_splits = 1;
  matrix.view.shard = {};
  const auto run_at = [&](int64_t stride) {
    run_linear(matrix, x, 0, 1, 1, [&](LinearParams& params) {
      params.out = partials.data();
      params.out_stride = stride;
    });
  };
  CHECK_THROWS(run_at(63), EngineError, "do not overlap");
  run_at(64);
}
