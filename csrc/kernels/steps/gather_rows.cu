#include <algorithm>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/steps/gather_rows.h"

namespace openspec {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kLoadsInFlight = 2;  // per thread
constexpr int kMaxStripes = 65535;

/// One row per blockIdx.x; blockIdx.y cuts wide rows into stripes.
__global__ void __launch_bounds__(kMaxThreads) gather_rows_kernel(GatherRowsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int64_t to_row = blockIdx.x;
  int64_t from_row = params.row != nullptr ? params.row[to_row] : to_row;
  const void* from = params.in;
  if (from_row < 0 && params.other_row != nullptr) {
    from_row = params.other_row[to_row];
    from = params.other_in;
  }
  if (from_row < 0) return;
  const int64_t num_chunks = params.width_bytes / sizeof(uint4);
  const char* in = static_cast<const char*>(from) + from_row * params.width_bytes;
  char* out = static_cast<char*>(params.out) + to_row * params.out_stride;
  const int64_t first =
      static_cast<int64_t>(blockIdx.y) * blockDim.x * kLoadsInFlight + threadIdx.x;
  uint4 chunk[kLoadsInFlight];
#pragma unroll
  for (int i = 0; i < kLoadsInFlight; ++i) {
    const int64_t at = first + i * static_cast<int64_t>(blockDim.x);
    if (at < num_chunks) chunk[i] = reinterpret_cast<const uint4*>(in)[at];
  }
#pragma unroll
  for (int i = 0; i < kLoadsInFlight; ++i) {
    const int64_t at = first + i * static_cast<int64_t>(blockDim.x);
    if (at < num_chunks) reinterpret_cast<uint4*>(out)[at] = chunk[i];
  }
}

}  // namespace

int gather_rows_cuda(const GatherRowsParams& params, void* stream) {
  constexpr int64_t kChunk = sizeof(uint4);
  const int64_t num_chunks = params.width_bytes / kChunk;
  const int64_t num_warps = (num_chunks + 32 * kLoadsInFlight - 1) / (32 * kLoadsInFlight);
  const int num_threads = static_cast<int>(std::min<int64_t>(kMaxThreads, 32 * num_warps));
  if (params.width_bytes <= 0 || params.width_bytes % kChunk != 0 ||
      params.out_stride < params.width_bytes || params.out_stride % kChunk != 0 ||
      !cuda::are_aligned(params.in, params.other_in, params.out)) {
    return cudaErrorInvalidValue;
  }
  const int64_t chunks_per_stripe = static_cast<int64_t>(num_threads) * kLoadsInFlight;
  const int64_t num_stripes = (num_chunks + chunks_per_stripe - 1) / chunks_per_stripe;
  if (num_stripes > kMaxStripes) return cudaErrorInvalidValue;
  if (params.num_rows == 0) return cudaSuccess;
  return cuda::launch(gather_rows_kernel, dim3(params.num_rows, static_cast<unsigned>(num_stripes)),
                      num_threads, 0, stream, params);
}

}  // namespace openspec
