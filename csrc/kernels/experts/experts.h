#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/exec.h"
#include "kernels/common/expert_counts.h"
#include "kernels/common/row_terms.h"
#include "kernels/linear/linear_stack.h"

namespace openspec {

inline constexpr int kMaxExperts = 512;
inline constexpr int kMaxTopExperts = 16;  // of a row

/// Which experts a row goes to, and with which weights.
///
/// Logits are the router's linear of x, rounded to `dtype`. A row goes to the `top_k` experts of
/// the greatest logits, of equal ones to the lower index first. An expert's weight is its
/// probability: the softmax of all of the row's logits, in fp32. With `norm_top_k` it is divided by
/// the sum of the chosen ones', added from the greatest logit to the smallest.
///
/// Source: `Qwen3MoeTopKRouter` of transformers 5.23, which rounds weights to the activations' type
/// and leaves the order of equal logits open.
///
/// On CUDA: bf16, kTiles weights. Rows that are padding go to no expert there.
struct RouteParams {
  PackedLinear router;      // [num_experts, hidden_size], one split, no epilogue
  int num_experts = 0;      // 0: the router's outputs. On CUDA these may be more, to a whole unit.
  const void* x = nullptr;  // [num_rows, hidden_size] dtype
  // [num_rows] as in RowBatch, -1: padding; CUDA, null: there is none.
  const int32_t* row_span = nullptr;
  int32_t* expert = nullptr;  // [num_rows, top_k] rising along a row; -1: none
  float* weight = nullptr;    // [num_rows, top_k]
  int num_rows = 0;
  int top_k = 0;
  bool norm_top_k = false;
  DType dtype = DType::kF32;
  void* workspace = nullptr;  // route_experts_workspace_bytes_(cpu|cuda)
};

size_t route_experts_workspace_bytes_cuda(int max_num_rows, int num_experts);
/// Returns a cudaError_t.
int route_experts_cuda(const RouteParams& params, void* stream);

size_t route_experts_workspace_bytes_cpu(int max_num_rows, int hidden_size, int num_experts);
void route_experts_cpu(const ExecContext& exec, const RouteParams& params);

/// The experts of a layer, each a SwiGLU MLP, over the rows that go to them.
///
/// An expert's products are those of linear.h in one split; what comes out of `down` is rounded to
/// `dtype`. A row of out is the fp32 sum of weight times such a row over its experts, in rising
/// order of the experts, each a fused multiply-add from zero; it is rounded once. So it depends on
/// the row alone: not on which others went to the same experts.
///
/// The weights of an expert are read once for all its rows, those of an expert without rows are
/// not.
///
/// On CUDA: bf16, kTiles weights. Which experts have rows is found out on the device: launches
/// depend on the number of rows alone. Rows are left as their terms: in the workspace, in `expert`
/// and in `weight`, which stay as they are until these are added up. All but the terms' rows may be
/// read before the wait of the kernel after this op's.
struct ExpertsParams {
  LinearStack gate_up;              // [2 * intermediate_size, hidden_size] each, SwiGLU, one split
  LinearStack down;                 // [hidden_size, intermediate_size] each, one split
  const void* x = nullptr;          // [num_rows, hidden_size] dtype
  const int32_t* expert = nullptr;  // [num_rows, top_k] rising along a row; CUDA, -1: none
  const float* weight = nullptr;    // [num_rows, top_k]
  void* out = nullptr;              // CPU: [num_rows, hidden_size] dtype; aliases nothing
  RowTerms* terms = nullptr;  // CUDA, on the host: those of out's rows, as the launch leaves them
  int num_rows = 0;
  int top_k = 0;
  DType dtype = DType::kF32;
  ExpertCounts* counts = nullptr;  // what was done is added; null: nobody asks
  void* workspace = nullptr;       // experts_workspace_bytes_(cpu|cuda)
};

size_t experts_workspace_bytes_cuda(int max_num_rows, int hidden_size, int intermediate_size,
                                    int num_experts, int top_k);
/// Returns a cudaError_t.
int experts_cuda(const ExpertsParams& params, void* stream);

size_t experts_workspace_bytes_cpu(int max_num_rows, int hidden_size, int intermediate_size,
                                   int num_experts, int top_k, DType dtype);
void experts_cpu(const ExecContext& exec, const ExpertsParams& params);

}  // namespace openspec
