#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/norm/rms_norm.h"

namespace openspec {
namespace {

using cuda::Bf16Pack;
using cuda::FloatPack;

// One block per row, kColumns neighbouring columns a thread. How a width is dealt to threads
// depends on the width alone, and with it the order of a row's sum.
constexpr int kMaxWidth = 8192;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int max_warps(int columns) { return columns < 16 ? 10 : kMaxWidth / 16 / 32; }

// A decode step runs this beside two linears: a norm that does not fit next to them delays the
// second. Two blocks of 8 warps with 96 registers a thread leave 4096 registers in each quarter of
// an SM: three of ten warps with 40 (width 2560), two of eight with 64 (width 4096).
constexpr int max_registers(int columns) { return columns < 16 ? 40 : 64; }

// What is added to the residual: nothing, a bf16 delta, or partials, so many of them loaded at
// once.
constexpr int kNoDelta = 0;
constexpr int kRowDelta = -1;

template <int kColumns>
__device__ __forceinline__ void add(FloatPack<kColumns>& sum, const FloatPack<kColumns>& term) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sum.x[c] += term.x[c];
}

/// What leaves every number as it is that is added to it, zeros of both signs included.
template <int kColumns>
__device__ __forceinline__ Bf16Pack<kColumns> negative_zeros() {
  FloatPack<kColumns> zeros;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) zeros.x[c] = -0.0f;
  return cuda::to_bf16(zeros);
}

/// The block's sum, known to every thread: lanes by halves, then warps in order.
template <int kMaxWarps>
__device__ __forceinline__ float block_sum(float sum) {
  __shared__ float warp_sums[kMaxWarps];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  const int num_warps = blockDim.x / 32;
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kMaxWarps; ++warp) {
    total += warp < num_warps ? warp_sums[warp] : 0.0f;
  }
  return total;
}

/// partial[i] = the partials at first + i * stride.
template <int kColumns, int kAtOnce>
__device__ __forceinline__ void load_partials(const float* first, int64_t stride,
                                              FloatPack<kColumns> (&partial)[kAtOnce]) {
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    partial[i] = cuda::load_pack<FloatPack<kColumns>>(first + i * stride);
  }
}

/// The partials of the thread's columns, added in order.
template <int kColumns, int kAtOnce>
__device__ __forceinline__ FloatPack<kColumns> sum_partials(const float* first, int64_t stride,
                                                            int num_partials) {
  FloatPack<kColumns> partial[kAtOnce];
  load_partials(first, stride, partial);
  FloatPack<kColumns> sum = partial[0];
#pragma unroll
  for (int i = 1; i < kAtOnce; ++i) add(sum, partial[i]);
#pragma unroll 1
  for (int at = kAtOnce; at < num_partials; at += kAtOnce) {
    load_partials(first + at * stride, stride, partial);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) add(sum, partial[i]);
  }
  return sum;
}

template <int kColumns, int kDelta, bool kStarts>
__global__ void __maxnreg__(max_registers(kColumns))
    rms_norm_kernel(RmsNormParams params, float inverse_width) {
  cuda::allow_next_kernel();
  const int width = params.width;
  const int wanted = threadIdx.x * kColumns;
  const bool is_inside = wanted < width;
  const int column = min(wanted, width - kColumns);  // so that no load waits for a branch
  // The weights are on their way to L2 while the kernel before this one finishes; they are read
  // after the partials, whose registers they take over, and arrive while the block sums.
  cuda::fetch_to_cache(params.weight + column);
  cuda::wait_for_previous_kernel();

  const int64_t at = static_cast<int64_t>(blockIdx.x) * width + column;
  uint16_t* residual = static_cast<uint16_t*>(params.residual) + at;
  Bf16Pack<kColumns> bits = negative_zeros<kColumns>();
  if constexpr (!kStarts) bits = cuda::load_pack<Bf16Pack<kColumns>>(residual);
  if constexpr (kDelta != kNoDelta) {
    FloatPack<kColumns> delta;
    if constexpr (kDelta == kRowDelta) {
      const uint16_t* from = static_cast<const uint16_t*>(params.delta) + at;
      delta = cuda::to_floats(cuda::load_pack<Bf16Pack<kColumns>>(from));
    } else {
      const int64_t stride = static_cast<int64_t>(params.num_rows) * width;
      delta = cuda::round_to_bf16(
          sum_partials<kColumns, kDelta>(params.delta_partials + at, stride, params.num_partials));
    }
    FloatPack<kColumns> sum = cuda::to_floats(bits);
    add(sum, delta);
    bits = cuda::to_bf16(sum);
    if (is_inside) cuda::store_pack(residual, bits);
  }

  const auto weight = cuda::load_pack<FloatPack<kColumns>>(params.weight + column);
  FloatPack<kColumns> x = cuda::to_floats(bits);
  float square_sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) square_sum = fmaf(x.x[c], x.x[c], square_sum);
  square_sum = block_sum<max_warps(kColumns)>(is_inside ? square_sum : 0.0f);
  const float scale = rsqrtf(fmaf(square_sum, inverse_width, params.eps));

#pragma unroll
  for (int c = 0; c < kColumns; ++c) x.x[c] *= scale;
  x = cuda::round_to_bf16(x);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) x.x[c] *= weight.x[c];
  const int64_t out_at = blockIdx.x * params.out_stride + column;
  if (is_inside) cuda::store_pack(static_cast<uint16_t*>(params.out) + out_at, cuda::to_bf16(x));
}

template <int kColumns, bool kStarts>
auto kernel_with_delta(const RmsNormParams& params) {
  if (params.delta != nullptr) return rms_norm_kernel<kColumns, kRowDelta, kStarts>;
  if (params.num_partials % 4 == 0) return rms_norm_kernel<kColumns, 4, kStarts>;
  if (params.num_partials % 2 == 0) return rms_norm_kernel<kColumns, 2, kStarts>;
  return rms_norm_kernel<kColumns, 1, kStarts>;
}

template <int kColumns>
int launch_rms_norm(const RmsNormParams& params, void* stream) {
  auto* kernel = rms_norm_kernel<kColumns, kNoDelta, false>;
  if (params.delta != nullptr || params.delta_partials != nullptr) {
    kernel = params.starts_residual ? kernel_with_delta<kColumns, true>(params)
                                    : kernel_with_delta<kColumns, false>(params);
  }
  const int num_warps = (params.width + kColumns * 32 - 1) / (kColumns * 32);
  return cuda::launch(kernel, params.num_rows, num_warps * 32, 0, stream, params,
                      1.0f / static_cast<float>(params.width));
}

constexpr int kWideColumns = 8;
constexpr int kMostWideThreads = 512;

/// The norm of rows that may be wider, or further apart, than those above: a block for each row,
/// which reads it twice. A thread's columns, and with them the order of the sum, depend on the
/// width alone.
__global__ void __launch_bounds__(kMostWideThreads)
    wide_rms_norm_kernel(RmsNormParams params, float inverse_width) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const uint16_t* row =
      static_cast<const uint16_t*>(params.residual) + blockIdx.x * params.residual_stride;
  uint16_t* out = static_cast<uint16_t*>(params.out) + blockIdx.x * params.out_stride;
  const int first = static_cast<int>(threadIdx.x) * kWideColumns;
  const int step = static_cast<int>(blockDim.x) * kWideColumns;
  float square_sum = 0.0f;
  for (int column = first; column < params.width; column += step) {
    const auto x = cuda::to_floats(cuda::load_pack<Bf16Pack<kWideColumns>>(row + column));
#pragma unroll
    for (int c = 0; c < kWideColumns; ++c) square_sum = fmaf(x.x[c], x.x[c], square_sum);
  }
  square_sum = block_sum<kMostWideThreads / 32>(square_sum);
  const float scale = rsqrtf(fmaf(square_sum, inverse_width, params.eps));
  // Nobody else reads these columns again: out may be the row itself.
  for (int column = first; column < params.width; column += step) {
    auto x = cuda::to_floats(cuda::load_pack<Bf16Pack<kWideColumns>>(row + column));
    const auto weight = cuda::load_pack<FloatPack<kWideColumns>>(params.weight + column);
#pragma unroll
    for (int c = 0; c < kWideColumns; ++c) x.x[c] *= scale;
    x = cuda::round_to_bf16(x);
#pragma unroll
    for (int c = 0; c < kWideColumns; ++c) x.x[c] *= weight.x[c];
    cuda::store_pack(out + column, cuda::to_bf16(x));
  }
}

int launch_wide_rms_norm(const RmsNormParams& params, void* stream) {
  const int warp_columns = kWideColumns * 32;
  const int num_warps = (params.width + warp_columns - 1) / warp_columns;
  const int num_threads =
      32 * (num_warps < kMostWideThreads / 32 ? num_warps : kMostWideThreads / 32);
  return cuda::launch(wide_rms_norm_kernel, params.num_rows, num_threads, 0, stream, params,
                      1.0f / static_cast<float>(params.width));
}

}  // namespace

int rms_norm_cuda(const RmsNormParams& given, void* stream) {
  RmsNormParams params = given;
  if (params.out_stride == 0) params.out_stride = params.width;
  if (params.residual_stride == 0) params.residual_stride = params.width;
  const bool has_both = params.delta != nullptr && params.delta_partials != nullptr;
  const bool has_delta = params.delta != nullptr || params.delta_partials != nullptr;
  const bool is_wide = params.width > kMaxWidth || params.residual_stride != params.width;
  if (params.dtype != DType::kBF16 || params.width <= 0 || params.width % 16 != 0 ||
      (is_wide && has_delta) || has_both || params.out_stride < params.width ||
      params.out_stride % 8 != 0 || params.residual_stride < params.width ||
      params.residual_stride % 8 != 0 || (params.starts_residual && !has_delta) ||
      (params.delta_partials != nullptr && params.num_partials < 1) ||
      !cuda::are_aligned(params.residual, params.delta, params.delta_partials, params.weight,
                         params.out)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  if (is_wide) return launch_wide_rms_norm(params, stream);
  if (params.width <= 4 * 32 * max_warps(4)) return launch_rms_norm<4>(params, stream);
  if (params.width <= 8 * 32 * max_warps(8)) return launch_rms_norm<8>(params, stream);
  return launch_rms_norm<16>(params, stream);
}

}  // namespace openspec
