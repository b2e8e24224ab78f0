#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/experts/experts.h"
#include "kernels/linear/linear.h"

namespace openspec {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarps = 4;  // of a block, a row each
constexpr uint32_t kMinusInfinity = 0xff80;

__device__ __forceinline__ float from_bits(uint32_t bits) { return __uint_as_float(bits << 16); }

/// Of a logit in bf16: greater for a greater logit, and of equal ones for the lower index; never 0.
__device__ __forceinline__ uint32_t key_of(uint32_t bits, int index) {
  if (bits == 0x8000) bits = 0;  // zeros are equal
  const uint32_t rising = bits & 0x8000 ? ~bits & 0xffff : bits | 0x8000;
  return rising << 16 | static_cast<uint32_t>(kMaxExperts - index);
}
__device__ __forceinline__ int index_of(uint32_t key) {
  return kMaxExperts - static_cast<int>(key & 0xffff);
}
__device__ __forceinline__ float logit_of(uint32_t key) {
  const uint32_t rising = key >> 16;
  return from_bits(rising & 0x8000 ? rising & 0x7fff : ~rising & 0xffff);
}

/// A warp for each row; lane l has the logits of experts l, l + 32, ...
template <int kPerLane>
__global__ void __launch_bounds__(32 * kWarps)
    choose_kernel(const uint16_t* logits, int num_experts, RouteParams params) {
  cuda::allow_next_kernel();
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  cuda::wait_for_previous_kernel();
  if (row >= params.num_rows) return;
  int32_t* const expert = params.expert + int64_t{row} * params.top_k;
  float* const weight = params.weight + int64_t{row} * params.top_k;
  if (params.row_span != nullptr && params.row_span[row] < 0) {
    if (lane < params.top_k) {
      expert[lane] = -1;
      weight[lane] = 0.0f;
    }
    return;
  }
  uint32_t keys[kPerLane];
  float logit[kPerLane], most = from_bits(kMinusInfinity);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int index = i * 32 + lane;
    const bool is_there = index < num_experts;
    const uint32_t bits = is_there ? logits[int64_t{row} * num_experts + index] : kMinusInfinity;
    logit[i] = from_bits(bits);
    keys[i] = is_there ? key_of(bits, index) : 0;
    most = fmaxf(most, logit[i]);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, d));
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) total = __fadd_rn(total, expf(__fadd_rn(logit[i], -most)));
#pragma unroll
  for (int d = 16; d > 0; d /= 2) total = __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, d));

  uint32_t own = 0;  // lane s: the s-th best
  for (int s = 0; s < params.top_k; ++s) {
    uint32_t best = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) best = max(best, keys[i]);
    best = __reduce_max_sync(kAllLanes, best);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) keys[i] = keys[i] == best ? 0 : keys[i];
    if (lane == s) own = best;
  }
  const int index = index_of(own);
  float share = __fdiv_rn(expf(__fadd_rn(logit_of(own), -most)), total), chosen = 0.0f;
  int place = 0;
  for (int s = 0; s < params.top_k; ++s) {
    chosen = __fadd_rn(chosen, __shfl_sync(kAllLanes, share, s));
    place += __shfl_sync(kAllLanes, index, s) < index;
  }
  if (params.norm_top_k) share = __fdiv_rn(share, chosen);
  if (lane < params.top_k) {
    expert[place] = index;
    weight[place] = share;
  }
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
