#pragma once

/// What the ops that work row by row share.

#include "kernels/common/exec.h"
#include "kernels/common/simd_cpu.h"

namespace openspec::OPENSPEC_ISA {

/// Calls body(row) for every row; `row_elements` elements are worth one row's work. Small batches
/// stay on the calling thread.
template <typename Body>
OPENSPEC_INLINE void for_each_row(const ExecContext& exec, int64_t num_rows, int64_t row_elements,
                                  const Body& body) {
  constexpr int64_t kTaskElements = 16384;  // a few microseconds
  const int64_t rows_per_task =
      max_of<int64_t>(1, kTaskElements / max_of<int64_t>(1, row_elements));
  exec.pool->parallel_for(ceil_div(num_rows, rows_per_task), [&](int64_t task) {
    const int64_t end = min_of(num_rows, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end; ++row) body(row);
  });
}

/// How numbers of a type lie in memory, and what is left of a sum or product in it.
struct Bf16 {
  using Stored = uint16_t;
  static OPENSPEC_INLINE float load(uint16_t bits) { return bf16_to_float(bits); }
  static OPENSPEC_INLINE uint16_t store(float x) { return float_to_bf16(x); }
  static OPENSPEC_INLINE float round(float x) { return round_to_bf16(x); }
  static OPENSPEC_INLINE Vf round(Vf x) { return round_to_bf16(x); }
};
struct F32 {
  using Stored = float;
  static OPENSPEC_INLINE float load(float x) { return x; }
  static OPENSPEC_INLINE float store(float x) { return x; }
  static OPENSPEC_INLINE float round(float x) { return x; }
  static OPENSPEC_INLINE Vf round(Vf x) { return x; }
};

/// Elements [at, at + kLanes) of an array as fp32.
OPENSPEC_INLINE Vf load_floats(DType dtype, const void* x, int64_t at) {
  if (dtype == DType::kF32) return load(static_cast<const float*>(x) + at);
  float wide[kLanes];
  bf16_to_float(static_cast<const uint16_t*>(x) + at, wide, kLanes);
  return load(wide);
}

/// Sum of squares of a row that may come in blocks (multiples of 4 vectors, but the last): four
/// vectors of partial sums, then the tail, always in this order.
class SquareSum {
 public:
  OPENSPEC_INLINE void add(const float* x, int64_t count) {
    int64_t i = 0;
    for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
      for (int j = 0; j < 4; ++j) {
        const Vf v = load(x + i + j * kLanes);
        sums_[j] = fma(v, v, sums_[j]);
      }
    }
    for (; i < count; ++i) tail_ = fma(x[i], x[i], tail_);
  }
  OPENSPEC_INLINE float inverse_rms(int64_t width, float eps) const {
    const float sum = sum_lanes((sums_[0] + sums_[1]) + (sums_[2] + sums_[3])) + tail_;
    return 1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + eps);
  }

 private:
  Vf sums_[4] = {};
  float tail_ = 0.0f;
};

OPENSPEC_INLINE float inverse_rms(const float* x, int64_t width, float eps) {
  SquareSum sum;
  sum.add(x, width);
  return sum.inverse_rms(width, eps);
}

}  // namespace openspec::OPENSPEC_ISA
