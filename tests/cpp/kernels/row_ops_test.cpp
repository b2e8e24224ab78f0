#include <cmath>

#include "kernel_testing.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/steps/embedding.h"
#include "kernels/steps/gather_rows.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

double square(double x) { return x * x; }

double inverse_rms_of(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += square(value);
  return 1 / std::sqrt(sum / static_cast<double>(x.size()) + 1e-6);
}

double rounded(double x, DType dtype) {
  return dtype == DType::kBF16 ? static_cast<double>(from_bf16(to_bf16(static_cast<float>(x)))) : x;
}

struct NormCase {
  Buffer residual;
  Buffer delta;
  Buffer out;
};

NormCase run_norm(const std::vector<float>& residual, const std::vector<float>& delta,
                  const std::vector<float>& weight, DType dtype, int num_threads) {
  NormCase norm = {Buffer(residual, dtype), Buffer(delta, dtype), Buffer(residual.size(), dtype)};
  ThreadPool pool(num_threads);
  RmsNormParams params;
  params.residual = norm.residual.data();
  params.delta = delta.empty() ? nullptr : norm.delta.data();
  params.weight = weight.data();
  params.out = norm.out.data();
  params.num_rows = static_cast<int>(residual.size() / weight.size());
  params.width = static_cast<int>(weight.size());
  params.dtype = dtype;
  rms_norm_cpu({.pool = &pool}, params);
  CHECK(norm.out.guard_is_whole() && norm.residual.guard_is_whole());
  return norm;
}

}  // namespace

TEST(rms_norm_matches_reference) {
  for_each_isa([] {
    Rng rng(1);
    for (const DType dtype : both_dtypes()) {
      for (const int width : {1, 15, 64, 320, 333, 2560}) {
        for (const bool has_delta : {false, true}) {
          const int num_rows = rng.integer(1, 30);
          const size_t size = static_cast<size_t>(num_rows * width);
          const std::vector<float> residual = rng.normals(size, 3);
          const std::vector<float> delta = has_delta ? rng.normals(size) : std::vector<float>();
          const std::vector<float> weight = rng.normals(static_cast<size_t>(width));
          const NormCase norm = run_norm(residual, delta, weight, dtype, 2);
          const Buffer before(residual, dtype);
          for (size_t row = 0; row < static_cast<size_t>(num_rows); ++row) {
            std::vector<double> x;
            for (size_t i = 0; i < weight.size(); ++i) {
              const size_t at = row * weight.size() + i;
              const double sum = static_cast<double>(before[at]) +
                                 (has_delta ? static_cast<double>(norm.delta[at]) : 0.0);
              x.push_back(rounded(sum, dtype));
              CHECK_NEAR(static_cast<double>(norm.residual[at]), x.back(), 1e-6 * std::abs(sum));
            }
            const double scale = inverse_rms_of(x);
            for (size_t i = 0; i < weight.size(); ++i) {
              const double expected = x[i] * scale * static_cast<double>(weight[i]);
              CHECK_NEAR(static_cast<double>(norm.out[row * weight.size() + i]), expected,
                         tolerance(dtype, std::abs(expected), 2e-6 * (1 + std::abs(expected))));
            }
          }
        }
      }
    }
  });
}

TEST(rms_norm_rows_are_invariant_bit_for_bit) {
  for_each_isa([] {
    Rng rng(2);
    for (const DType dtype : both_dtypes()) {
      const std::vector<float> weight = rng.normals(1000);
      const std::vector<float> residual = rng.normals(70 * 1000);
      const std::vector<float> delta = rng.normals(70 * 1000);
      const NormCase all = run_norm(residual, delta, weight, dtype, 3);
      for (size_t row = 0; row < 70; ++row) {
        const auto part = [&](const std::vector<float>& from) {
          const auto begin = from.begin() + static_cast<std::ptrdiff_t>(row * 1000);
          return std::vector<float>(begin, begin + 1000);
        };
        const NormCase one = run_norm(part(residual), part(delta), weight, dtype, 1);
        CHECK(one.out.same(0, all.out, row * 1000, 1000));
        CHECK(one.residual.same(0, all.residual, row * 1000, 1000));
      }
    }
  });
}

TEST(rms_norm_takes_its_delta_as_partial_sums) {
  for_each_isa([] {
    Rng rng(7);
    for (const DType dtype : both_dtypes()) {
      for (const size_t num_partials : {1, 2, 3, 5}) {
        constexpr size_t kRows = 19, kWidth = 333, kSize = kRows * kWidth;
        const std::vector<float> weight = rng.normals(kWidth);
        const std::vector<float> residual = rng.normals(kSize, 3);
        const std::vector<float> partials = rng.normals(num_partials * kSize);
        std::vector<float> sums;
        for (size_t i = 0; i < kSize; ++i) {
          float sum = partials[i];
          for (size_t k = 1; k < num_partials; ++k) sum += partials[k * kSize + i];
          sums.push_back(sum);
        }
        const NormCase expected = run_norm(residual, sums, weight, dtype, 1);

        Buffer updated(residual, dtype), out(kSize, dtype);
        ThreadPool pool(2);
        RmsNormParams params;
        params.residual = updated.data();
        params.delta_partials = partials.data();
        params.num_partials = static_cast<int>(num_partials);
        params.weight = weight.data();
        params.out = out.data();
        params.num_rows = kRows;
        params.width = kWidth;
        params.dtype = dtype;
        rms_norm_cpu({.pool = &pool}, params);
        CHECK(out.guard_is_whole() && updated.guard_is_whole());
        CHECK(updated.same(0, expected.residual, 0, kSize));
        CHECK(out.same(0, expected.out, 0, kSize));
      }
    }
  });
}

// Columns of wider rows, in place: the columns beside them stay as they were.
TEST(rms_norm_of_slices_of_rows) {
  for_each_isa([] {
    Rng rng(9);
    for (const DType dtype : both_dtypes()) {
      constexpr size_t kRows = 11, kWidth = 320, kStride = 3 * kWidth;
      const std::vector<float> weight = rng.normals(kWidth);
      const std::vector<float> rows = rng.normals(kRows * kStride);
      Buffer slices(rows, dtype);
      const Buffer before(rows, dtype);
      ThreadPool pool(2);
      RmsNormParams params;
      params.residual = static_cast<std::byte*>(slices.data()) + kWidth * dtype_bytes(dtype);
      params.residual_stride = params.out_stride = kStride;
      params.weight = weight.data();
      params.out = params.residual;
      params.num_rows = kRows;
      params.width = kWidth;
      params.dtype = dtype;
      rms_norm_cpu({.pool = &pool}, params);
      CHECK(slices.guard_is_whole());
      for (size_t row = 0; row < kRows; ++row) {
        const size_t at = row * kStride + kWidth;
        std::vector<float> alone;
        for (size_t i = 0; i < kWidth; ++i) alone.push_back(before[at + i]);
        const NormCase expected = run_norm(alone, {}, weight, dtype, 1);
        CHECK(slices.same(at, expected.out, 0, kWidth));
        CHECK(slices.same(at - kWidth, before, at - kWidth, kWidth));
        CHECK(slices.same(at + kWidth, before, at + kWidth, kWidth));
      }
    }
  });
}

// Two norms write the halves of one buffer; what lies between an output's rows stays as it was.
TEST(rms_norm_writes_rows_apart) {
  for_each_isa([] {
    Rng rng(9);
    for (const DType dtype : both_dtypes()) {
      for (const size_t width : {1, 64, 333}) {
        constexpr size_t kRows = 70;
        const size_t size = kRows * width;
        const size_t stride = 2 * width + 3;
        const std::vector<float> weight = rng.normals(width);
        Buffer out(std::vector<float>(kRows * stride, -7.0f), dtype);
        std::vector<NormCase> expected;
        for (size_t half = 0; half < 2; ++half) {
          const std::vector<float> residual = rng.normals(size, 3);
          expected.push_back(run_norm(residual, {}, weight, dtype, 1));
          Buffer kept(residual, dtype);
          ThreadPool pool(2);
          RmsNormParams params;
          params.residual = kept.data();
          params.weight = weight.data();
          params.out = static_cast<char*>(out.data()) + half * width * dtype_bytes(dtype);
          params.out_stride = static_cast<int64_t>(stride);
          params.num_rows = kRows;
          params.width = static_cast<int>(width);
          params.dtype = dtype;
          rms_norm_cpu({.pool = &pool}, params);
          CHECK(out.guard_is_whole());
        }
        for (size_t row = 0; row < kRows; ++row) {
          CHECK(out.same(row * stride, expected[0].out, row * width, width));
          CHECK(out.same(row * stride + width, expected[1].out, row * width, width));
          for (size_t i = 2 * width; i < stride; ++i) CHECK_EQ(out[row * stride + i], -7.0f);
        }
      }
    }
  });
}

TEST(gather_rows_copies_rows_and_leaves_gaps) {
  Rng rng(8);
  constexpr int64_t kInRows = 11;
  for (const int64_t width : {4, 148, 70000}) {
    for (const int64_t gap : {0, 12}) {
      for (const bool has_row : {true, false}) {
        const int num_rows = has_row ? 40 : static_cast<int>(kInRows);
        std::vector<uint8_t> in;
        for (int64_t i = 0; i < kInRows * width; ++i) {
          in.push_back(static_cast<uint8_t>(rng.integer(0, 254)));
        }
        std::vector<int32_t> row;
        for (int i = 0; i < num_rows; ++i) row.push_back(rng.integer(-1, kInRows - 1));
        std::vector<uint8_t> out(static_cast<size_t>(num_rows * (width + gap)), 0xff);
        GatherRowsParams params;
        params.row = has_row ? row.data() : nullptr;
        params.in = in.data();
        params.out = out.data();
        params.num_rows = num_rows;
        params.width_bytes = width;
        params.out_stride = width + gap;
        ThreadPool pool(2);
        gather_rows_cpu({.pool = &pool}, params);
        for (int64_t to = 0; to < num_rows; ++to) {
          const int64_t from = has_row ? row[static_cast<size_t>(to)] : to;
          for (int64_t i = 0; i < width + gap; ++i) {
            const int got = out[static_cast<size_t>(to * (width + gap) + i)];
            const bool is_copied = from >= 0 && i < width;
            CHECK_EQ(got, is_copied ? in[static_cast<size_t>(from * width + i)] : 0xff);
          }
        }
      }
    }
  }
}

TEST(embedding_copies_and_converts) {
  for_each_isa([] {
    Rng rng(3);
    for (const DType dtype : both_dtypes()) {
      Buffer table(rng.normals(50 * 37), DType::kBF16);
      std::vector<int32_t> tokens;
      for (int i = 0; i < 600; ++i) tokens.push_back(rng.integer(0, 49));
      Buffer out(600 * 37, dtype);
      ThreadPool pool(2);
      EmbeddingParams params;
      params.token = tokens.data();
      params.table = table.data();
      params.out = out.data();
      params.num_rows = 600;
      params.width = 37;
      params.dtype = dtype;
      embedding_cpu({.pool = &pool}, params);
      CHECK(out.guard_is_whole());
      for (size_t i = 0; i < out.size(); ++i) {
        CHECK_EQ(out[i], table[static_cast<size_t>(tokens[i / 37]) * 37 + i % 37]);
      }
    }
  });
}

TEST(rope_angles_are_rounded_once) {
  for_each_isa([] {
    constexpr int kHalf = 64;
    std::vector<float> inv_freq;
    for (int j = 0; j < kHalf; ++j) {
      inv_freq.push_back(static_cast<float>(std::pow(1e6, -j / 64.0)));
    }
    std::vector<int32_t> position;
    for (int i = 0; i < 3000; ++i) position.push_back(i < 1000 ? i : (i - 1000) * 131);
    std::vector<float> cos_sin(position.size() * 2 * kHalf + 1, -7.0f);
    ThreadPool pool(2);
    RopeAnglesParams params;
    params.position = position.data();
    params.inv_freq = inv_freq.data();
    params.cos_sin = cos_sin.data();
    params.num_rows = static_cast<int>(position.size());
    params.head_dim = 2 * kHalf;
    params.scale = 1.25f;
    rope_angles_cpu({.pool = &pool}, params);
    CHECK_EQ(cos_sin.back(), -7.0f);
    for (size_t row = 0; row < position.size(); ++row) {
      for (size_t j = 0; j < kHalf; ++j) {
        const double angle = static_cast<double>(static_cast<float>(position[row]) * inv_freq[j]);
        CHECK_NEAR(static_cast<double>(cos_sin[row * 2 * kHalf + j]), 1.25 * std::cos(angle), 2e-7);
        CHECK_NEAR(static_cast<double>(cos_sin[row * 2 * kHalf + kHalf + j]),
                   1.25 * std::sin(angle), 2e-7);
      }
    }
  });
}

namespace {

struct RopeCase {
  Buffer q;
  Buffer kv;
};

// One row per (position, slot); pages of 8 tokens, as many as the slots need.
RopeCase run_rope(const Buffer& qkv_in, size_t first_row, size_t num_rows,
                  const std::vector<float>& cos_sin, const std::vector<int64_t>& slots,
                  const float* q_norm, const float* k_norm, int num_q_heads, int num_kv_heads,
                  int head_dim, int num_pages, int num_threads) {
  const size_t dim = static_cast<size_t>(head_dim);
  const size_t width = static_cast<size_t>(num_q_heads + 2 * num_kv_heads) * dim;
  Buffer qkv = qkv_in;
  RopeCase rope = {
      Buffer(num_rows * static_cast<size_t>(num_q_heads) * dim, qkv.dtype()),
      Buffer(static_cast<size_t>(num_pages * 2 * num_kv_heads * 8) * dim, qkv.dtype())};
  ThreadPool pool(num_threads);
  RopeAppendParams params;
  params.rows.num_rows = static_cast<int>(num_rows);
  params.rows.row_kv_slot = slots.data() + first_row;
  params.qkv = static_cast<char*>(qkv.data()) + first_row * width * dtype_bytes(qkv.dtype());
  params.cos_sin = cos_sin.data() + first_row * dim;
  params.q_norm = q_norm;
  params.k_norm = k_norm;
  params.q = rope.q.data();
  params.kv = {rope.kv.data(), num_kv_heads, head_dim, 8};
  params.num_q_heads = num_q_heads;
  params.dtype = qkv.dtype();
  rope_append_cpu({.pool = &pool}, params);
  CHECK(rope.q.guard_is_whole() && rope.kv.guard_is_whole());
  return rope;
}

}  // namespace

TEST(rope_append_matches_reference_and_is_invariant) {
  for_each_isa([] {
    Rng rng(5);
    for (const DType dtype : both_dtypes()) {
      for (const bool has_norm : {true, false}) {
        constexpr int kQ = 3, kKv = 2, kDim = 96, kRows = 70, kPages = 12;
        constexpr size_t kWidth = (kQ + 2 * kKv) * kDim;
        const Buffer qkv(rng.normals(kRows * kWidth, 2), dtype);
        const std::vector<float> q_norm = rng.normals(kDim), k_norm = rng.normals(kDim);
        std::vector<float> cos_sin;
        std::vector<int64_t> slots;
        for (int row = 0; row < kRows; ++row) {
          for (int j = 0; j < kDim / 2; ++j)
            cos_sin.push_back(std::cos(0.1f * static_cast<float>(row * (j + 1))));
          for (int j = 0; j < kDim / 2; ++j)
            cos_sin.push_back(std::sin(0.1f * static_cast<float>(row * (j + 1))));
          slots.push_back(row % 9 == 4 ? -1 : (row * 37) % (kPages * 8));
        }
        const float* q_weight = has_norm ? q_norm.data() : nullptr;
        const float* k_weight = has_norm ? k_norm.data() : nullptr;
        const RopeCase rope =
            run_rope(qkv, 0, kRows, cos_sin, slots, q_weight, k_weight, kQ, kKv, kDim, kPages, 3);
        const auto check_head = [&](size_t row, size_t head, const float* weight, const Buffer& out,
                                    size_t at) {
          std::vector<double> x;
          for (size_t i = 0; i < kDim; ++i) {
            x.push_back(static_cast<double>(qkv[row * kWidth + head * kDim + i]));
          }
          const double scale = inverse_rms_of(x);
          if (weight != nullptr) {
            for (size_t i = 0; i < kDim; ++i) {
              x[i] = rounded(rounded(x[i] * scale, dtype) * static_cast<double>(weight[i]), dtype);
            }
          }
          for (size_t i = 0; i < kDim; ++i) {
            const double c = static_cast<double>(cos_sin[row * kDim + i % (kDim / 2)]);
            const double s = static_cast<double>(cos_sin[row * kDim + kDim / 2 + i % (kDim / 2)]);
            const double pair = i < kDim / 2 ? -x[i + kDim / 2] : x[i - kDim / 2];
            const double expected = x[i] * c + pair * s;
            CHECK_NEAR(static_cast<double>(out[at + i]), expected,
                       tolerance(dtype, std::abs(x[i]) + std::abs(pair), 1e-5));
          }
        };
        std::vector<bool> is_written(kPages * 8, false);
        for (size_t row = 0; row < kRows; ++row) {
          for (size_t head = 0; head < kQ; ++head) {
            check_head(row, head, q_weight, rope.q, (row * kQ + head) * kDim);
          }
          if (slots[row] < 0) continue;
          const size_t slot = static_cast<size_t>(slots[row]);
          is_written[slot] = true;
          for (size_t head = 0; head < kKv; ++head) {
            const size_t line = (slot / 8 * 2 * kKv + head) * 8 + slot % 8;
            check_head(row, kQ + head, k_weight, rope.kv, line * kDim);
            CHECK(rope.kv.same((line + kKv * 8) * kDim, qkv,
                               row * kWidth + (kQ + kKv + head) * kDim, kDim));
          }
        }
        for (size_t slot = 0; slot < is_written.size(); ++slot) {
          const size_t line = slot / 8 * 2 * kKv * 8 + slot % 8;
          if (!is_written[slot]) CHECK(std::isnan(rope.kv[line * kDim]));
        }
        for (size_t row = 0; row < kRows; ++row) {
          const RopeCase one =
              run_rope(qkv, row, 1, cos_sin, slots, q_weight, k_weight, kQ, kKv, kDim, kPages, 1);
          CHECK(one.q.same(0, rope.q, row * kQ * kDim, kQ * kDim));
          if (slots[row] < 0) continue;
          const size_t slot = static_cast<size_t>(slots[row]);
          const size_t line = slot / 8 * 2 * kKv * 8 + slot % 8;
          CHECK(one.kv.same(line * kDim, rope.kv, line * kDim, kDim));
        }
      }
    }
  });
}

TEST(append_context_equals_the_layers_one_by_one) {
  for_each_isa([] {
    Rng rng(8);
    for (const DType dtype : both_dtypes()) {
      constexpr size_t kLayers = 3, kKv = 2, kDim = 64, kRows = 11, kPages = 2;
      constexpr size_t kWidth = 2 * kKv * kDim;
      const Buffer packed(rng.normals(kRows * kLayers * kWidth, 2), dtype);
      const std::vector<float> norm = rng.normals(kDim);
      const std::vector<float> cos_sin = rng.normals(kRows * kDim);
      std::vector<int64_t> slots;
      for (size_t row = 0; row < kRows; ++row) {
        slots.push_back(row == 4 ? -1 : static_cast<int64_t>(row * 3 % (kPages * 8)));
      }
      std::vector<Buffer> pools(kLayers, Buffer(kPages * 8 * kWidth, dtype));
      Buffer kv = packed;
      ThreadPool pool(2);
      AppendContextParams params;
      params.rows.num_rows = kRows;
      params.rows.row_kv_slot = slots.data();
      params.kv = kv.data();
      params.cos_sin = cos_sin.data();
      params.num_layers = kLayers;
      params.dtype = dtype;
      for (size_t i = 0; i < kLayers; ++i) {
        params.layers[i] = {i == 1 ? nullptr : norm.data(), {pools[i].data(), kKv, kDim, 8}};
      }
      append_context_cpu({.pool = &pool}, params);
      for (size_t i = 0; i < kLayers; ++i) {
        std::vector<float> own;
        for (size_t row = 0; row < kRows; ++row) {
          for (size_t j = 0; j < kWidth; ++j)
            own.push_back(packed[(row * kLayers + i) * kWidth + j]);
        }
        const RopeCase expected = run_rope(Buffer(own, dtype), 0, kRows, cos_sin, slots, nullptr,
                                           i == 1 ? nullptr : norm.data(), 0, kKv, kDim, kPages, 1);
        CHECK(pools[i].guard_is_whole());
        for (size_t at = 0; at < kPages * 8 * kWidth; at += kDim) {
          const bool is_written = !std::isnan(expected.kv[at]);
          CHECK_EQ(is_written, !std::isnan(pools[i][at]));
          if (is_written) CHECK(pools[i].same(at, expected.kv, at, kDim));
        }
      }
    }
  });
}
