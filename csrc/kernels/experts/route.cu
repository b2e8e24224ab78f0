#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/experts/choice.cuh"
#include "kernels/experts/experts.h"
#include "kernels/linear/linear.h"

namespace openspec {
namespace {

constexpr int kWarps = 4;  // of a block, a row each
constexpr uint32_t kMinusInfinity = 0xff80;

/// A warp for each row.
template <int kPerLane>
__global__ void __launch_bounds__(32 * kWarps) choose_kernel(const uint16_t* logits, int num_experts,
                                                             RouteParams params) {
  cuda::allow_next_kernel();
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  cuda::wait_for_previous_kernel();
  if (row >= params.num_rows) return;
  int32_t* const expert = params.expert + int64_t{row} * params.top_k;
  float* const weight = params.weight + int64_t{row} * params.top_k;
  if (params.row_span != nullptr && __ldcg(params.row_span + row) < 0) {
    if (lane < params.top_k) {
      expert[lane] = -1;
      weight[lane] = 0.0f;
    }
    return;
  }
  uint32_t bits[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int index = i * 32 + lane;
    bits[i] = index < num_experts ? __ldcg(logits + int64_t{row} * num_experts + index)
                                  : kMinusInfinity;
  }
  cuda::choose_experts(bits, num_experts, params.top_k, params.norm_top_k, expert, weight, lane);
}

}  // namespace

size_t route_experts_workspace_bytes_cuda(int max_num_rows, int num_experts) {
  return sizeof(uint16_t) * static_cast<size_t>(max_num_rows) * static_cast<size_t>(num_experts);
}

int route_experts_cuda(const RouteParams& params, void* stream) {
  const int num_experts = params.router.num_outputs;
  if (params.dtype != DType::kBF16 || num_experts > kMaxExperts || params.top_k < 1 ||
      params.top_k > kMaxTopExperts || params.top_k > num_experts) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  const int error = linear_cuda({.weight = params.router,
                                 .x = params.x,
                                 .out = params.workspace,
                                 .num_rows = params.num_rows,
                                 .dtype = DType::kBF16,
                                 .out_dtype = DType::kBF16},
                                stream);
  if (error != cudaSuccess) return error;
  const auto kernel = num_experts <= 128   ? choose_kernel<4>
                      : num_experts <= 256 ? choose_kernel<8>
                                           : choose_kernel<16>;
  return cuda::launch(kernel, dim3((params.num_rows + kWarps - 1) / kWarps), dim3(32 * kWarps), 0,
                      stream, static_cast<const uint16_t*>(params.workspace), num_experts, params);
}

}  // namespace openspec
