#include "kernels/common/row_ops_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/common/stripes_cpu.h"
#include "kernels/delta_net/delta_net.h"
#include "kernels/delta_net/head_cpu.h"
#include "kernels/delta_net/workspace_cpu.h"
#include "kernels/isa_cpu.h"

namespace openspec::OPENSPEC_ISA {

namespace {

// Convolution and gates of rows, and what rows leave in the rings.
template <typename T>
class Rows {
 public:
  Rows(const DeltaNetParams& params, float* convolved, float* gates)
      : params_(params), width_(params.shape.conv_width()), convolved_(convolved), gates_(gates) {}

  void convolve(int64_t row) const {
    const int span = params_.rows.row_span[row];
    if (span < 0) return;
    const Stored* taps[kDeltaTaps];
    for (int tap = 0; tap < kDeltaTaps; ++tap) taps[tap] = input(row - kDeltaTaps + 1 + tap, span);
    float* out = convolved_ + row * width_;
    for (int64_t column = 0; column < width_; column += kLanes) {
      Vf sum{};
      for (int tap = 0; tap < kDeltaTaps; ++tap) {
        if (taps[tap] == nullptr) continue;
        const Vf x = load_floats(params_.dtype, taps[tap], column);
        sum = fma(load(params_.conv_weight + tap * width_ + column), x, sum);
      }
      store(out + column, T::round(silu(sum)));
    }
    const int num_heads = params_.shape.num_v_heads;
    float* gates = gates_ + row * 2 * num_heads;
    const Stored* b = static_cast<const Stored*>(params_.b) + row * params_.b_stride;
    const Stored* a = static_cast<const Stored*>(params_.a) + row * params_.a_stride;
    for (int head = 0; head < num_heads; ++head) {
      gates[head] = 1.0f / (1.0f + __builtin_expf(-T::load(b[head])));
      const float x = T::load(a[head]) + params_.dt_bias[head];
      const float softplus = x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x));
      gates[num_heads + head] = -__builtin_expf(params_.a_log[head]) * softplus;
    }
  }

  // After all heads: a ring may have lost by it what they read.
  void keep(int64_t row) const {
    const int span = params_.rows.row_span[row];
    if (span < 0) return;
    const int slot = params_.rows.span_seq[span];
    const int64_t num_after = params_.rows.span_begin[span + 1] - row;
    const int position = position_of(row, span);
    if (num_after <= params_.records.ring_size) {
      auto* k =
          reinterpret_cast<Stored*>(params_.records.at(slot, position) + params_.record_offset);
      const float* from = convolved_ + row * width_ + params_.shape.k_width();
      for (int i = 0; i < params_.shape.k_width(); ++i) k[i] = T::store(from[i]);
    }
    if (num_after <= params_.conv_rows.ring_size) {
      std::memcpy(params_.conv_rows.at(slot, position) + params_.conv_offset,
                  static_cast<const Stored*>(params_.qkv) + row * params_.qkv_stride,
                  static_cast<size_t>(width_) * sizeof(Stored));
    }
  }

 private:
  using Stored = typename T::Stored;

  int position_of(int64_t row, int span) const {
    return params_.rows.span_kv_len[span] + static_cast<int>(row - params_.rows.span_begin[span]);
  }
  // Before the convolution, of a row of the step or of a position before its span; null: zero.
  const Stored* input(int64_t row, int span) const {
    if (row >= params_.rows.span_begin[span]) {
      return static_cast<const Stored*>(params_.qkv) + row * params_.qkv_stride;
    }
    const int position = position_of(row, span);
    if (position < 0) return nullptr;
    return reinterpret_cast<const Stored*>(
        params_.conv_rows.at(params_.rows.span_seq[span], position) + params_.conv_offset);
  }

  const DeltaNetParams& params_;
  const int64_t width_;
  float* convolved_;
  float* gates_;
};

template <typename T>
void run(const ExecContext& exec, const DeltaNetParams& params) {
  const int64_t num_rows = params.rows.num_rows, num_heads = params.shape.num_v_heads;
  const int64_t width = params.shape.conv_width();
  auto* convolved = reinterpret_cast<float*>(align_workspace(params.workspace));
  float* gates = convolved + num_rows * width;
  auto* scratch = reinterpret_cast<gated_delta::HeadScratch*>(
      convolved + gated_delta::row_floats(params.shape, params.rows.num_rows));
  const Rows<T> rows(params, convolved, gates);
  for_each_row(exec, num_rows, kDeltaTaps * width, [&](int64_t row) { rows.convolve(row); });
  const int64_t num_items = params.rows.num_spans * num_heads;
  for_each_stripe(exec, num_items, [&](int64_t stripe, const auto& claim) {
    for (int64_t item = claim(); item < num_items; item = claim()) {
      const int span = static_cast<int>(item / num_heads);
      if (params.rows.span_begin[span] == params.rows.span_begin[span + 1]) continue;
      gated_delta::Head<T>(params, convolved, gates, span, static_cast<int>(item % num_heads),
                           scratch[stripe])
          .run();
    }
  });
  for_each_row(exec, num_rows, width, [&](int64_t row) { rows.keep(row); });
}

}  // namespace

void delta_net(const ExecContext& exec, const DeltaNetParams& params) {
  if (params.dtype == DType::kF32) {
    run<F32>(exec, params);
  } else {
    run<Bf16>(exec, params);
  }
}

}  // namespace openspec::OPENSPEC_ISA
