#include "kernels/attention/layout.h"
#include "kernels/common/row_ops_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/isa_cpu.h"
#include "kernels/rope/rope.h"

namespace openspec::OPENSPEC_ISA {

namespace {

// cos and sin of an fp32 angle, rounded once: reduced by multiples of pi/2 and evaluated in double,
// without branches, so that the loop over a row's angles vectorises. The error before rounding is
// below 1e-9 for |angle| < 2^22.
OPENSPEC_INLINE void cos_sin_of(float angle, float& cosine, float& sine) {
  const double a = angle;
  const double shifter = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double shifted = a * 0.63661977236758134308 + shifter;
  const double n = shifted - shifter;
  int64_t quadrant;
  std::memcpy(&quadrant, &shifted, sizeof quadrant);
  const double r = (a - n * 1.57079632673412561417) - n * 6.07710050650619224932e-11;
  const double r2 = r * r;
  // Taylor coefficients: |r| <= pi/4.
  const double s =
      r + r * r2 *
              (-1.0 / 6 + r2 * (1.0 / 120 +
                                r2 * (-1.0 / 5040 + r2 * (1.0 / 362880 + r2 * (-1.0 / 39916800)))));
  const double c =
      1.0 +
      r2 * (-0.5 + r2 * (1.0 / 24 +
                         r2 * (-1.0 / 720 + r2 * (1.0 / 40320 + r2 * (-1.0 / 3628800 +
                                                                      r2 * (1.0 / 479001600))))));
  const bool is_swapped = (quadrant & 1) != 0;
  const double unsigned_cos = is_swapped ? s : c;
  const double unsigned_sin = is_swapped ? c : s;
  cosine = static_cast<float>(((quadrant + 1) & 2) != 0 ? -unsigned_cos : unsigned_cos);
  sine = static_cast<float>((quadrant & 2) != 0 ? -unsigned_sin : unsigned_sin);
}

// Half-rotation: pairs (x_j, x_{j + half}).
OPENSPEC_INLINE void rotate(float* x, const float* cos_sin, int half) {
  const float* cosine = cos_sin;
  const float* sine = cos_sin + half;
  for (int j = 0; j < half; ++j) {
    const float low = x[j];
    const float high = x[j + half];
    x[j] = low * cosine[j] - high * sine[j];
    x[j + half] = high * cosine[j] + low * sine[j];
  }
}

OPENSPEC_INLINE int rotary_dim(const RopeAppendParams& params) {
  return params.rotary_dim > 0 ? params.rotary_dim : params.kv.head_dim;
}

// Reads a head as fp32, norms it (with HF's rounding in bf16) and rotates it.
OPENSPEC_INLINE void norm_and_rotate(const RopeAppendParams& params, const void* head,
                                     const float* weight, const float* cos_sin, void* out) {
  const int dim = params.kv.head_dim, turning = rotary_dim(params);
  const bool is_f32 = params.dtype == DType::kF32;
  float x[attention::kMaxHeadDim];
  if (is_f32) {
    std::memcpy(x, head, dim * sizeof(float));
  } else {
    bf16_to_float(static_cast<const uint16_t*>(head), x, dim);
  }
  if (weight != nullptr) {
    const float scale = inverse_rms(x, dim, params.eps);
    if (is_f32) {
      for (int i = 0; i < dim; ++i) x[i] = x[i] * scale * weight[i];
    } else if (params.rounds_once) {
      for (int i = 0; i < dim; ++i) x[i] = round_to_bf16(x[i] * scale * weight[i]);
    } else {
      for (int i = 0; i < dim; ++i) x[i] = round_to_bf16(round_to_bf16(x[i] * scale) * weight[i]);
    }
  }
  rotate(x, cos_sin, turning / 2);
  if (is_f32) {
    std::memcpy(out, x, dim * sizeof(float));
  } else {
    float_to_bf16(x, static_cast<uint16_t*>(out), dim);
  }
}

}  // namespace

void rope_angles(const ExecContext& exec, const RopeAnglesParams& params) {
  const int half = params.head_dim / 2;
  for_each_row(exec, params.num_rows, 8 * params.head_dim, [&](int64_t row) {
    const float position = static_cast<float>(params.position[row]);
    float* cosine = params.cos_sin + row * params.head_dim;
    float* sine = cosine + half;
    for (int j = 0; j < half; ++j) {
      float c, s;
      cos_sin_of(position * params.inv_freq[j], c, s);
      cosine[j] = c * params.scale;
      sine[j] = s * params.scale;
    }
  });
}

void rope_append(const ExecContext& exec, const RopeAppendParams& params) {
  const int64_t dim = params.kv.head_dim;
  const int64_t head_bytes = dim * static_cast<int64_t>(dtype_bytes(params.dtype));
  const int num_kv_heads = params.kv.num_kv_heads;
  const int64_t q_heads_apart = params.has_gates ? 2 : 1;
  const int64_t num_heads = q_heads_apart * params.num_q_heads + 2 * num_kv_heads;
  const int64_t row_heads = params.row_heads > 0 ? params.row_heads : num_heads;
  const int64_t page_size = params.kv.page_size;
  for_each_row(exec, params.rows.num_rows, 2 * num_heads * dim, [&](int64_t row) {
    const char* in = static_cast<const char*>(params.qkv) + row * row_heads * head_bytes;
    const float* cos_sin = params.cos_sin + row * rotary_dim(params);
    char* q = static_cast<char*>(params.q) + row * params.num_q_heads * head_bytes;
    for (int head = 0; head < params.num_q_heads; ++head) {
      norm_and_rotate(params, in + head * q_heads_apart * head_bytes, params.q_norm, cos_sin,
                      q + head * head_bytes);
    }
    const int64_t slot = params.rows.row_kv_slot[row];
    if (slot < 0) return;
    const int64_t page = slot / page_size;
    const int64_t offset = slot % page_size;
    const char* k_in = in + q_heads_apart * params.num_q_heads * head_bytes;
    for (int head = 0; head < num_kv_heads; ++head) {
      const int64_t k_line = (page * 2 * num_kv_heads + head) * page_size + offset;
      const int64_t v_line = k_line + num_kv_heads * page_size;
      char* data = static_cast<char*>(params.kv.data);
      norm_and_rotate(params, k_in + head * head_bytes, params.k_norm, cos_sin,
                      data + k_line * head_bytes);
      std::memcpy(data + v_line * head_bytes, k_in + (num_kv_heads + head) * head_bytes,
                  head_bytes);
    }
  });
}

}  // namespace openspec::OPENSPEC_ISA
