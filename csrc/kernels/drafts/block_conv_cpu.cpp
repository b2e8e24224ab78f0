#include "kernels/common/row_ops_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/drafts/block_conv.h"
#include "kernels/isa_cpu.h"

namespace openspec::OPENSPEC_ISA {

namespace {

template <typename T>
class RowConv {
 public:
  RowConv(const BlockConvParams& params, int64_t row) : params_(params), row_(row) {}

  void run() const {
    const int64_t group = params_.group, num_groups = params_.width / group;
    const int64_t parent = params_.row_parent[row_];
    const auto* own = static_cast<const Stored*>(params_.own) + row_ * params_.own_stride;
    auto* out = static_cast<Stored*>(params_.out) + row_ * params_.width;
    for (int64_t g = 0; g < num_groups; ++g) {
      const float here = T::load(own[g]), before = T::load(own[num_groups + g]);
      for (int64_t c = g * group; c < (g + 1) * group; ++c) {
        float sum = T::round(input(row_, c) * T::round(params_.base[c] + here));
        if (parent >= 0) {
          const float coefficient = T::round(params_.base[params_.width + c] + before);
          sum += T::round(input(parent, c) * coefficient);
        }
        out[c] = T::store(sum);
      }
    }
  }

 private:
  using Stored = typename T::Stored;

  OPENSPEC_INLINE float input(int64_t row, int64_t column) const {
    const int64_t at = row * params_.width + column;
    if (params_.x != nullptr) return T::load(static_cast<const Stored*>(params_.x)[at]);
    const int64_t stride = int64_t{params_.num_rows} * params_.width;
    float sum = params_.partials[at];
    for (int64_t i = 1; i < params_.num_partials; ++i) sum += params_.partials[i * stride + at];
    return T::round(sum);
  }

  const BlockConvParams& params_;
  const int64_t row_;
};

}  // namespace

void block_conv(const ExecContext& exec, const BlockConvParams& params) {
  for_each_row(exec, params.num_rows, 2 * int64_t{params.width}, [&](int64_t row) {
    if (params.dtype == DType::kF32) {
      RowConv<F32>(params, row).run();
    } else {
      RowConv<Bf16>(params, row).run();
    }
  });
}

}  // namespace openspec::OPENSPEC_ISA
