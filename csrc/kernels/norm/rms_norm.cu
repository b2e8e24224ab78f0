#include <cstdint>
#include <cstring>

#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/exchange/exchange.h"
#include "kernels/norm/cluster_norm.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/norm/row_order.cuh"

namespace openspec {
namespace {

using cuda::add;
using cuda::Bf16Pack;
using cuda::FloatPack;
using cuda::kMaxWidth;
using cuda::max_warps;

// One block per row, kColumns neighbouring columns a thread. How a width is dealt to threads
// depends on the width alone, and with it the order of a row's sum.

// What is added to the residual: nothing, a bf16 delta, weighted terms, or partials, so many of
// them loaded at once.
constexpr int kNoDelta = 0;
constexpr int kRowDelta = -1;
constexpr int kTermDelta = -2;

// A decode step runs this beside two linears: a norm that does not fit next to them delays the
// second. Two blocks of 8 warps with 96 registers a thread leave 4096 registers in each quarter of
// an SM: three of ten warps with 40 (width 2560), two of eight with 64 (width 4096). Beside the
// blocks of experts none fits, and one of terms has what its loads take. `delta`: as above.
constexpr int max_registers(int columns, int delta) {
  return delta == kTermDelta ? 80 : columns < 16 ? 40 : 64;
}

/// Terms of a row whose loads are under way together.
template <int kColumns>
inline constexpr int kTermsAtOnce = kColumns < 16 ? 8 : 4;

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
  sum = cuda::lane_sum(sum);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  return cuda::ordered_sum(warp_sums, blockDim.x / 32);
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

/// Some terms of a row, from `first` on: where they lie; -1: there is none.
template <int kAtOnce>
struct SomeTerms {
  int place[kAtOnce];
  float weight[kAtOnce];

  __device__ __forceinline__ void load(const RowTerms& of, int row, int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int term = row * of.num_terms + min(first + i, of.num_terms - 1);
      const int at = of.place == nullptr ? term : __ldcg(of.place + term);
      place[i] = first + i < of.num_terms && __ldcg(of.owner + term) >= 0 ? at : -1;
      weight[i] = __ldcg(of.weight + term);
    }
  }
};

/// Those of the thread's columns, added up in order. `some` are the first.
template <int kColumns, int kAtOnce>
__device__ __forceinline__ FloatPack<kColumns> sum_terms(const RowTerms& of, int row,
                                                         SomeTerms<kAtOnce> some, int64_t width,
                                                         int column) {
  FloatPack<kColumns> sum{};
  const auto* const rows = static_cast<const uint16_t*>(of.rows) + column;
#pragma unroll 1
  for (int first = 0;;) {
    Bf16Pack<kColumns> term[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {  // what is not there is read, too, so that nothing waits
      term[i] = cuda::load_pack<Bf16Pack<kColumns>>(rows + max(some.place[i], 0) * width);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (some.place[i] < 0) continue;
      const FloatPack<kColumns> x = cuda::to_floats(term[i]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum.x[c] = fmaf(some.weight[i], x.x[c], sum.x[c]);
    }
    first += kAtOnce;
    if (first >= of.num_terms) return sum;
    some.load(of, row, first);
  }
}

template <int kColumns, int kDelta, bool kStarts>
__global__ void __maxnreg__(max_registers(kColumns, kDelta))
    rms_norm_kernel(RmsNormParams params, float inverse_width) {
  cuda::allow_next_kernel();
  const int width = params.width;
  const int wanted = threadIdx.x * kColumns;
  const bool is_inside = wanted < width;
  const int column = min(wanted, width - kColumns);  // so that no load waits for a branch
  // The weights are on their way to L2 while the kernel before this one finishes; they are read
  // after the partials, whose registers they take over, and arrive while the block sums.
  cuda::fetch_to_cache(params.weight + column);
  const int row = blockIdx.x;
  [[maybe_unused]] SomeTerms<kTermsAtOnce<kColumns>> terms;
  if constexpr (kDelta == kTermDelta) terms.load(params.terms, row, 0);
  cuda::wait_for_previous_kernel();

  const int64_t at = int64_t{row} * width + column;
  uint16_t* residual = static_cast<uint16_t*>(params.residual) + at;
  Bf16Pack<kColumns> bits = negative_zeros<kColumns>();
  if constexpr (!kStarts) bits = cuda::load_pack<Bf16Pack<kColumns>>(residual);
  if constexpr (kDelta != kNoDelta) {
    FloatPack<kColumns> delta{};
    if constexpr (kDelta == kRowDelta) {
      const uint16_t* from = static_cast<const uint16_t*>(params.delta) + at;
      delta = cuda::to_floats(cuda::load_pack<Bf16Pack<kColumns>>(from));
    } else if constexpr (kDelta == kTermDelta) {
      delta = cuda::round_to_bf16(sum_terms<kColumns>(params.terms, row, terms, width, column));
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
  if (!params.rounds_once) x = cuda::round_to_bf16(x);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) x.x[c] *= weight.x[c];
  const int64_t out_at = int64_t{row} * params.out_stride + column;
  if (is_inside) cuda::store_pack(static_cast<uint16_t*>(params.out) + out_at, cuda::to_bf16(x));
}

template <int kColumns, bool kStarts>
auto kernel_with_delta(const RmsNormParams& params) {
  if (params.delta != nullptr) return rms_norm_kernel<kColumns, kRowDelta, kStarts>;
  if (params.terms.rows != nullptr) return rms_norm_kernel<kColumns, kTermDelta, kStarts>;
  if (params.num_partials % 4 == 0) return rms_norm_kernel<kColumns, 4, kStarts>;
  if (params.num_partials % 2 == 0) return rms_norm_kernel<kColumns, 2, kStarts>;
  return rms_norm_kernel<kColumns, 1, kStarts>;
}

template <int kColumns>
int launch_rms_norm(const RmsNormParams& params, void* stream) {
  const int num_warps = cuda::num_row_warps(params.width);
  const float inverse_width = 1.0f / static_cast<float>(params.width);
  auto* kernel = rms_norm_kernel<kColumns, kNoDelta, false>;
  if (params.delta != nullptr || params.delta_partials != nullptr || params.terms.rows != nullptr) {
    kernel = params.starts_residual ? kernel_with_delta<kColumns, true>(params)
                                    : kernel_with_delta<kColumns, false>(params);
  }
  return cuda::launch(kernel, params.num_rows, num_warps * 32, 0, stream, params, inverse_width);
}

/// Whether the sums fit a slot and are as many as are taken at once, and all owners' buffers are
/// there where rows have owners.
bool has_legal_exchange(const RmsNormParams& params) {
  if (params.exchange == nullptr) return true;
  const Exchange& exchange = *params.exchange;
  if (params.num_partials < 2 || params.num_partials % 2 != 0 || params.num_partials > kMostSums ||
      params.starts_residual ||
      !is_legal_round(exchange, params.num_partials, params.num_rows, params.width)) {
    return false;
  }
  if (!have_owners(params.num_rows, params.width)) return true;
  if (params.owned == nullptr) return false;
  const OwnedRows& owned = *params.owned;
  const void* const* residuals = owned.residual;
  for (int rank = 0; rank < exchange.num_ranks; ++rank) {
    const void* out = owned.out[rank];
    if (out == nullptr || !cuda::are_aligned(out, residuals[rank]) ||
        (residuals[rank] == nullptr) != (residuals[0] == nullptr)) {
      return false;
    }
  }
  const int own = exchange.rank;
  return owned.out[own] == params.out &&
         (residuals[own] == nullptr || residuals[own] == params.residual);
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
    if (!params.rounds_once) x = cuda::round_to_bf16(x);
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
  const int num_deltas = (params.delta != nullptr) + (params.delta_partials != nullptr) +
                         (params.exchange != nullptr) + (params.terms.rows != nullptr);
  const bool has_delta = num_deltas > 0;
  const bool is_wide = params.width > kMaxWidth || params.residual_stride != params.width;
  if (params.dtype != DType::kBF16 || params.width <= 0 || params.width % 16 != 0 ||
      (is_wide && has_delta) || num_deltas > 1 || params.out_stride < params.width ||
      params.out_stride % 8 != 0 || params.residual_stride < params.width ||
      params.residual_stride % 8 != 0 || (params.starts_residual && !has_delta) ||
      (params.delta_partials != nullptr && params.num_partials < 1) ||
      (params.terms.rows != nullptr && params.terms.num_terms < 1) || !has_legal_exchange(params) ||
      !cuda::are_aligned(params.residual, params.delta, params.delta_partials, params.terms.rows,
                         params.weight, params.out)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  if (is_wide) return launch_wide_rms_norm(params, stream);
  if (params.exchange != nullptr || suits_cluster_norm(params)) {
    return cluster_norm_cuda(params, stream);
  }
  switch (cuda::chain_columns(params.width)) {
    case 4:
      return launch_rms_norm<4>(params, stream);
    case 8:
      return launch_rms_norm<8>(params, stream);
    default:
      return launch_rms_norm<16>(params, stream);
  }
}

}  // namespace openspec
