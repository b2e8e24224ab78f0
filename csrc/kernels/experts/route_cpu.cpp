#include "kernels/common/row_ops_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/common/stripes_cpu.h"
#include "kernels/experts/experts.h"
#include "kernels/experts/layout_cpu.h"
#include "kernels/isa_cpu.h"
#include "kernels/linear/linear.h"

namespace openspec::OPENSPEC_ISA {

namespace {

// One row's logits, and its experts.
class RowRoute {
 public:
  RowRoute(const RouteParams& params, const void* logits, int64_t row)
      : params_(params), num_experts_(params.router.num_outputs), row_(row) {
    for (int i = 0; i < num_experts_; ++i) {
      const int64_t at = row * num_experts_ + i;
      logit_[i] = params.dtype == DType::kF32
                      ? static_cast<const float*>(logits)[at]
                      : bf16_to_float(static_cast<const uint16_t*>(logits)[at]);
    }
  }

  void run() {
    const int top_k = params_.top_k;
    int best[kMaxTopExperts];
    float weight[kMaxTopExperts];
    choose(best);
    weigh(best, weight);
    // By insertion: an expert's place is after all lower ones.
    int32_t* to = params_.expert + row_ * top_k;
    float* to_weight = params_.weight + row_ * top_k;
    for (int s = 0; s < top_k; ++s) {
      int at = s;
      for (; at > 0 && to[at - 1] > best[s]; --at) {
        to[at] = to[at - 1];
        to_weight[at] = to_weight[at - 1];
      }
      to[at] = best[s];
      to_weight[at] = weight[s];
    }
  }

 private:
  // Even of NaN it chooses experts that there are, each once.
  void choose(int* best) {
    bool is_taken[kMaxExperts] = {};
    for (int s = 0; s < params_.top_k; ++s) {
      int found = -1;
      for (int i = 0; i < num_experts_; ++i) {
        if (!is_taken[i] && (found < 0 || logit_[i] > logit_[found])) found = i;
      }
      is_taken[found] = true;
      best[s] = found;
    }
  }

  void weigh(const int* best, float* weight) {
    const float most = logit_[best[0]];
    Vf sums{};
    for (int i = num_experts_; i % kLanes != 0; ++i) logit_[i] = -__builtin_inff();
    for (int i = 0; i < num_experts_; i += kLanes) {
      const Vf e = exp_nonpositive(load(logit_ + i) - most);
      store(exp_ + i, e);
      sums = sums + e;
    }
    const float total = sum_lanes(sums);
    float chosen = 0.0f;
    for (int s = 0; s < params_.top_k; ++s) {
      weight[s] = exp_[best[s]] / total;
      chosen += weight[s];
    }
    if (!params_.norm_top_k) return;
    for (int s = 0; s < params_.top_k; ++s) weight[s] /= chosen;
  }

  const RouteParams& params_;
  const int num_experts_;
  const int64_t row_;
  float logit_[kMaxExperts + kLanes], exp_[kMaxExperts + kLanes];
};

}  // namespace

void route_experts(const ExecContext& exec, const RouteParams& params) {
  const int num_experts = params.router.num_outputs;
  char* logits = align_workspace(params.workspace);
  linear_cpu(exec, {.weight = params.router,
                    .x = params.x,
                    .out = logits,
                    .num_rows = params.num_rows,
                    .dtype = params.dtype,
                    .out_dtype = params.dtype,
                    .workspace = reinterpret_cast<float*>(
                        logits + experts::logits_bytes(static_cast<size_t>(params.num_rows),
                                                       static_cast<size_t>(num_experts)))});
  for_each_row(exec, params.num_rows, int64_t{8} * num_experts,
               [&](int64_t row) { RowRoute(params, logits, row).run(); });
}

}  // namespace openspec::OPENSPEC_ISA
