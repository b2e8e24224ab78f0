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

void norm_row_f32(const RmsNormParams& params, int64_t row) {
  const int64_t width = params.width;
  const auto start = [&](float before) { return params.starts_residual ? -0.0f : before; };
  float* residual = static_cast<float*>(params.residual) + row * residual_stride(params);
  float* out = static_cast<float*>(params.out) + row * out_stride(params);
  if (params.delta != nullptr) {
    const float* delta = static_cast<const float*>(params.delta) + row * width;
    for (int64_t i = 0; i < width; ++i) residual[i] = start(residual[i]) + delta[i];
  } else if (params.delta_partials != nullptr) {
    for (int64_t i = 0; i < width; ++i) {
      residual[i] = start(residual[i]) + sum_partials(params, row * width + i);
    }
  }
  const float scale = inverse_rms(residual, width, params.eps);
  for (int64_t i = 0; i < width; ++i) out[i] = residual[i] * scale * params.weight[i];
}

void norm_row_bf16(const RmsNormParams& params, int64_t row) {
  constexpr int64_t kBlock = 512;
  const int64_t width = params.width;
  const auto start = [&](float before) { return params.starts_residual ? -0.0f : before; };
  uint16_t* residual = static_cast<uint16_t*>(params.residual) + row * residual_stride(params);
  uint16_t* out = static_cast<uint16_t*>(params.out) + row * out_stride(params);
  if (params.delta != nullptr) {
    const uint16_t* delta = static_cast<const uint16_t*>(params.delta) + row * width;
    for (int64_t i = 0; i < width; ++i) {
      residual[i] = float_to_bf16(start(bf16_to_float(residual[i])) + bf16_to_float(delta[i]));
    }
  } else if (params.delta_partials != nullptr) {
    for (int64_t i = 0; i < width; ++i) {
      const float delta = round_to_bf16(sum_partials(params, row * width + i));
      residual[i] = float_to_bf16(start(bf16_to_float(residual[i])) + delta);
    }
  }
  SquareSum sum;
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    float values[kBlock];
    const int64_t count = min_of(kBlock, width - begin);
    bf16_to_float(residual + begin, values, count);
    sum.add(values, count);
  }
  const float scale = sum.inverse_rms(width, params.eps);
  for (int64_t i = 0; i < width; ++i) {
    out[i] = float_to_bf16(round_to_bf16(bf16_to_float(residual[i]) * scale) * params.weight[i]);
  }
}

}  // namespace

void rms_norm(const ExecContext& exec, const RmsNormParams& params) {
  for_each_row(exec, params.num_rows, params.width, [&](int64_t row) {
    if (params.dtype == DType::kF32) {
      norm_row_f32(params, row);
    } else {
      norm_row_bf16(params, row);
    }
  });
}

}  // namespace openspec::OPENSPEC_ISA
