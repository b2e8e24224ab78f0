#include <cstring>

#include "kernels/common/row_ops_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/common/stripes_cpu.h"
#include "kernels/experts/experts.h"
#include "kernels/experts/layout_cpu.h"
#include "kernels/isa_cpu.h"
#include "kernels/linear/linear.h"

// One expert after the other, in rising order, so that a row's sum may grow in memory. An expert's
// rows are put together, and its products are linears of them.

namespace openspec::OPENSPEC_ISA {

namespace {

class Experts {
 public:
  Experts(const ExecContext& exec, const ExpertsParams& params)
      : exec_(exec),
        params_(params),
        width_(params.down.first.num_outputs),
        element_(params.dtype == DType::kF32 ? 4 : 2),
        base_(align_workspace(params.workspace)),
        at_(static_cast<size_t>(params.num_rows), static_cast<size_t>(width_),
            static_cast<size_t>(params.down.first.num_inputs),
            static_cast<size_t>(params.down.count), static_cast<size_t>(params.top_k),
            static_cast<size_t>(element_)) {}

  void run() {
    sort();
    for_each_row(exec_, params_.num_rows, width_, [&](int64_t row) {
      std::memset(sums(row), 0, static_cast<size_t>(width_) * sizeof(float));
    });
    const int32_t* first = at<int32_t>(at_.first);
    uint64_t num_used = 0;
    for (int expert = 0; expert < params_.down.count; ++expert) {
      const int count = first[expert + 1] - first[expert];
      if (count > 0) add_expert(expert, at<int32_t>(at_.pair) + first[expert], count);
      num_used += count > 0;
    }
    if (params_.counts != nullptr) {
      const int num_pairs = params_.num_rows * params_.top_k;
      *params_.counts +=
          {.num_layers = 1, .num_experts = num_used, .num_rows = static_cast<uint64_t>(num_pairs)};
    }
    for_each_row(exec_, params_.num_rows, width_, [&](int64_t row) {
      const int64_t to = row * width_;
      if (params_.dtype == DType::kF32) {
        std::memcpy(static_cast<float*>(params_.out) + to, sums(row),
                    static_cast<size_t>(width_) * sizeof(float));
      } else {
        float_to_bf16(sums(row), static_cast<uint16_t*>(params_.out) + to, width_);
      }
    });
  }

 private:
  template <typename T>
  T* at(size_t place) const {
    return reinterpret_cast<T*>(base_ + place);
  }
  float* sums(int64_t row) const { return at<float>(at_.sums) + row * width_; }

  // Counts the pairs of each expert, then gives every pair its place.
  void sort() const {
    int32_t* first = at<int32_t>(at_.first);
    int32_t* pair = at<int32_t>(at_.pair);
    const int num_experts = params_.down.count;
    const int num_pairs = params_.num_rows * params_.top_k;
    for (int e = 0; e <= num_experts; ++e) first[e] = 0;
    for (int i = 0; i < num_pairs; ++i) ++first[params_.expert[i] + 1];
    for (int e = 0; e < num_experts; ++e) first[e + 1] += first[e];
    for (int i = 0; i < num_pairs; ++i) pair[first[params_.expert[i]]++] = i;
    // Each begin has moved to the next one's.
    for (int e = num_experts; e > 0; --e) first[e] = first[e - 1];
    first[0] = 0;
  }

  void add_expert(int expert, const int32_t* pair, int count) const {
    const int64_t row_bytes = width_ * element_;
    const int top_k = params_.top_k;
    for_each_row(exec_, count, width_, [&](int64_t i) {
      std::memcpy(at<char>(at_.x) + i * row_bytes,
                  static_cast<const char*>(params_.x) + pair[i] / top_k * row_bytes,
                  static_cast<size_t>(row_bytes));
    });
    multiply(params_.gate_up.at(expert), at_.x, at_.inner, count);
    multiply(params_.down.at(expert), at_.inner, at_.down, count);
    for_each_row(exec_, count, 2 * width_, [&](int64_t i) {
      const Vf weight = splat(params_.weight[pair[i]]);
      float* to = sums(pair[i] / top_k);
      const void* down = at<char>(at_.down);
      int64_t c = 0;
      for (; c + kLanes <= width_; c += kLanes) {
        store(to + c, fma(weight, load_floats(params_.dtype, down, i * width_ + c), load(to + c)));
      }
      for (; c < width_; ++c) {
        const int64_t from = i * width_ + c;
        const float value = params_.dtype == DType::kF32
                                ? static_cast<const float*>(down)[from]
                                : bf16_to_float(static_cast<const uint16_t*>(down)[from]);
        to[c] = fma(weight[0], value, to[c]);
      }
    });
  }

  void multiply(const PackedLinear& weight, size_t from, size_t to, int num_rows) const {
    linear_cpu(exec_, {.weight = weight,
                       .x = at<char>(from),
                       .out = at<char>(to),
                       .num_rows = num_rows,
                       .dtype = params_.dtype,
                       .out_dtype = params_.dtype,
                       .workspace = at<float>(at_.linear)});
  }

  const ExecContext& exec_;
  const ExpertsParams& params_;
  const int64_t width_;
  const int64_t element_;
  char* base_;
  const experts::Layout at_;
};

}  // namespace

void experts(const ExecContext& exec, const ExpertsParams& params) { Experts(exec, params).run(); }

}  // namespace openspec::OPENSPEC_ISA
