#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/common/per_device.h"
#include "kernels/experts/choice.cuh"
#include "kernels/experts/experts.h"
#include "kernels/experts/route_cluster.cuh"
#include "kernels/linear/linear.h"
#include "kernels/linear/stream_launch.cuh"

namespace openspec {
namespace {

constexpr int kWarps = 4;  // of a block, a row each

/// A warp for each row.
template <int kPerLane>
__global__ void __launch_bounds__(32 * kWarps)
    choose_kernel(const uint16_t* logits, RouteParams params) {
  cuda::allow_next_kernel();
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  cuda::wait_for_previous_kernel();
  if (row >= params.num_rows) return;
  const bool goes_nowhere = cuda::is_padding(params, row);
  uint32_t bits[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int index = i * 32 + lane;
    const int64_t at = int64_t{row} * params.router.num_outputs + index;
    bits[i] = index < params.num_experts ? __ldcg(logits + at) : cuda::kMinusInfinity;
  }
  cuda::choose_row(bits, params, row, goes_nowhere, lane);
}

template <int kPerLane>
int launch_choose(const RouteParams& params, void* stream) {
  return cuda::launch(choose_kernel<kPerLane>, dim3((params.num_rows + kWarps - 1) / kWarps),
                      dim3(32 * kWarps), 0, stream, static_cast<const uint16_t*>(params.workspace),
                      params);
}

template <int kPerLane>
int launch_route(const RouteParams& params, int chain_steps, int bytes, void* stream) {
  constexpr auto kKernel = cuda::route_kernel<kPerLane>;
  const int error = cuda::per_device(
      [] { return cuda::prepare_shared(kKernel, cuda::device_limits().shared_per_block); });
  if (error != cudaSuccess) return error;
  const int num_clusters = cuda::ceil_div(params.num_rows, cuda::kRouteRows);
  return cuda::launch_clusters(cuda::kRouteRows, kKernel, dim3(num_clusters * cuda::kRouteRows),
                               dim3(cuda::kStreamThreads), bytes, stream, params, chain_steps);
}

template <int kPerLane>
int route(const RouteParams& params, void* stream) {
  constexpr int kClusterRows = 256;  // beyond, the logits are a linear's
  const int chain_steps =
      std::max(1, cuda::ceil_div(cuda::longest_split(params.router), kLinearChains));
  const int bytes = cuda::RouteShared(params.router.num_outputs, chain_steps).total;
  if (cuda::overlaps_kernels() && params.num_rows <= kClusterRows &&
      params.router.format == MatrixFormat::kBF16 && bytes <= cuda::shared_limit()) {
    return launch_route<kPerLane>(params, chain_steps, bytes, stream);
  }
  const int error = linear_cuda({.weight = params.router,
                                 .x = params.x,
                                 .out = params.workspace,
                                 .num_rows = params.num_rows,
                                 .dtype = DType::kBF16,
                                 .out_dtype = DType::kBF16},
                                stream);
  return error != cudaSuccess ? error : launch_choose<kPerLane>(params, stream);
}

bool is_legal(const RouteParams& params) {
  const PackedLinear& router = params.router;
  return params.dtype == DType::kBF16 && router.layout == LinearLayout::kTiles &&
         router.num_splits == 1 && router.epilogue == LinearEpilogue::kNone &&
         router.bias == nullptr && router.num_outputs % kLinearUnit == 0 &&
         router.num_inputs % cuda::kLinearStep == 0 && router.num_outputs <= kMaxExperts &&
         params.num_experts <= router.num_outputs && params.top_k >= 1 &&
         params.top_k <= std::min(kMaxTopExperts, params.num_experts) &&
         cuda::are_aligned(params.x, params.workspace);
}

}  // namespace

size_t route_experts_workspace_bytes_cuda(int max_num_rows, int num_experts) {
  const int num_outputs = cuda::ceil_div(num_experts, kLinearUnit) * kLinearUnit;
  return sizeof(uint16_t) * static_cast<size_t>(max_num_rows) * static_cast<size_t>(num_outputs);
}

int route_experts_cuda(const RouteParams& given, void* stream) {
  RouteParams params = given;
  if (params.num_experts == 0) params.num_experts = params.router.num_outputs;
  if (!is_legal(params)) return cudaErrorInvalidValue;
  if (params.num_rows == 0) return cudaSuccess;
  const int num_experts = params.num_experts;
  return num_experts <= 128   ? route<4>(params, stream)
         : num_experts <= 256 ? route<8>(params, stream)
                              : route<16>(params, stream);
}

}  // namespace openspec
