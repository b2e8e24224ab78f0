#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/drafts/block_conv.h"

namespace openspec {
namespace {

constexpr int kColumns = 8;  // of a thread, all in one group
constexpr int kThreads = 128;
using Values = cuda::FloatPack<kColumns>;
using Stored = cuda::Bf16Pack<kColumns>;

__device__ __forceinline__ float bf16_at(const void* values, int64_t at) {
  return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(values)[at]) << 16);
}

/// The thread's columns of a row of the input, from element `at` on.
template <bool kHasPartials>
__device__ __forceinline__ Values load_input(const BlockConvParams& params, int64_t at) {
  if constexpr (!kHasPartials) {
    return cuda::to_floats(cuda::load_pack<Stored>(static_cast<const uint16_t*>(params.x) + at));
  } else {
    const int64_t stride = static_cast<int64_t>(params.num_rows) * params.width;
    Values sum = cuda::load_pack<Values>(params.partials + at);
    for (int i = 1; i < params.num_partials; ++i) {
      const Values term = cuda::load_pack<Values>(params.partials + i * stride + at);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum.x[c] += term.x[c];
    }
    return cuda::round_to_bf16(sum);
  }
}

/// x * (base + own), the coefficient and the product rounded; so no multiply-add can be fused.
__device__ __forceinline__ Values times(const Values& x, const float* base, float own) {
  Values coefficient = cuda::load_pack<Values>(base);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) coefficient.x[c] += own;
  coefficient = cuda::round_to_bf16(coefficient);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) coefficient.x[c] *= x.x[c];
  return cuda::round_to_bf16(coefficient);
}

/// Rows along blockIdx.y, a thread for eight columns.
template <bool kHasPartials>
__global__ void __launch_bounds__(kThreads)
    block_conv_kernel(const __grid_constant__ BlockConvParams params) {
  cuda::allow_next_kernel();
  const int column =
      (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) * kColumns;
  cuda::wait_for_previous_kernel();
  if (column >= params.width) return;
  const int64_t row = blockIdx.y;
  const int parent = params.row_parent[row];
  const int64_t own = row * params.own_stride + column / params.group;
  Values sum = times(load_input<kHasPartials>(params, row * params.width + column),
                     params.base + column, bf16_at(params.own, own));
  if (parent >= 0) {
    const Values before =
        times(load_input<kHasPartials>(params, int64_t{parent} * params.width + column),
              params.base + params.width + column,
              bf16_at(params.own, own + params.width / params.group));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum.x[c] += before.x[c];
  }
  cuda::store_pack(static_cast<uint16_t*>(params.out) + row * params.width + column,
                   cuda::to_bf16(sum));
}

}  // namespace

int block_conv_cuda(const BlockConvParams& params, void* stream) {
  const bool has_partials = params.partials != nullptr;
  if (params.dtype != DType::kBF16 || params.width <= 0 || params.group <= 0 ||
      params.group % kColumns != 0 || params.width % params.group != 0 ||
      has_partials == (params.x != nullptr) || (has_partials && params.num_partials < 1) ||
      !cuda::are_aligned(params.x, params.partials, params.base, params.out)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  constexpr int kBlock = kThreads * kColumns;
  const dim3 grid(static_cast<unsigned>((params.width + kBlock - 1) / kBlock),
                  static_cast<unsigned>(params.num_rows));
  auto* kernel = has_partials ? block_conv_kernel<true> : block_conv_kernel<false>;
  return cuda::launch(kernel, grid, dim3(kThreads), 0, stream, params);
}

}  // namespace openspec
