#include "kernels/common/row_ops_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/isa_cpu.h"
#include "kernels/norm/rms_norm.h"

namespace openspec::OPENSPEC_ISA {

namespace {

// Element `at` of delta that comes as partials, before rounding.
OPENSPEC_INLINE float sum_partials(const RmsNormParams& params, int64_t at) {
  const int64_t stride = static_cast<int64_t>(params.num_rows) * params.width;
  float sum = params.delta_partials[at];
  for (int64_t i = 1; i < params.num_partials; ++i) sum += params.delta_partials[i * stride + at];
  return sum;
}

int64_t out_stride(const RmsNormParams& params) {
  return params.out_stride == 0 ? params.width : params.out_stride;
}

int64_t residual_stride(const RmsNormParams& params) {
  return params.residual_stride == 0 ? params.width : params.residual_stride;
}

template <typename T>
void norm_row(const RmsNormParams& params, int64_t row) {
  using Stored = typename T::Stored;
  constexpr int64_t kBlock = 512;
  const int64_t width = params.width;
  Stored* residual = static_cast<Stored*>(params.residual) + row * residual_stride(params);
  Stored* out = static_cast<Stored*>(params.out) + row * out_stride(params);
  const auto add = [&](int64_t i, float delta) {
    residual[i] = T::store((params.starts_residual ? -0.0f : T::load(residual[i])) + delta);
  };
  if (params.delta != nullptr) {
    const Stored* delta = static_cast<const Stored*>(params.delta) + row * width;
    for (int64_t i = 0; i < width; ++i) add(i, T::load(delta[i]));
  } else if (params.delta_partials != nullptr) {
    for (int64_t i = 0; i < width; ++i) add(i, T::round(sum_partials(params, row * width + i)));
  }
  SquareSum sum;
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    float values[kBlock];
    const int64_t count = min_of(kBlock, width - begin);
    for (int64_t i = 0; i < count; ++i) values[i] = T::load(residual[begin + i]);
    sum.add(values, count);
  }
  const float scale = sum.inverse_rms(width, params.eps);
  if (params.rounds_once) {
    for (int64_t i = 0; i < width; ++i) {
      out[i] = T::store(T::load(residual[i]) * scale * params.weight[i]);
    }
    return;
  }
  for (int64_t i = 0; i < width; ++i) {
    out[i] = T::store(T::round(T::load(residual[i]) * scale) * params.weight[i]);
  }
}

}  // namespace

void rms_norm(const ExecContext& exec, const RmsNormParams& params) {
  for_each_row(exec, params.num_rows, params.width, [&](int64_t row) {
    if (params.dtype == DType::kF32) {
      norm_row<F32>(params, row);
    } else {
      norm_row<Bf16>(params, row);
    }
  });
}

}  // namespace openspec::OPENSPEC_ISA
