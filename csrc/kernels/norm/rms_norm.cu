#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/exchange/exchange.cuh"
#include "kernels/norm/rms_norm.h"
#include "kernels/norm/row_order.cuh"
#include "kernels/norm/take_norm.h"

namespace openspec {
namespace {

using cuda::add;
using cuda::Bf16Pack;
using cuda::FloatPack;
using cuda::kMaxWidth;
using cuda::max_warps;

// One block per row, kColumns neighbouring columns a thread. How a width is dealt to threads
// depends on the width alone, and with it the order of a row's sum.

// A decode step runs this beside two linears: a norm that does not fit next to them delays the
// second. Two blocks of 8 warps with 96 registers a thread leave 4096 registers in each quarter of
// an SM: three of ten warps with 40 (width 2560), two of eight with 64 (width 4096).
// Sums that are waited for stay in registers together.
constexpr int max_registers(int columns, bool takes) {
  return takes ? (columns < 16 ? 64 : 96) : columns < 16 ? 40 : 64;
}

// What is added to the residual: nothing, a bf16 delta, or partials, so many of them loaded at
// once.
constexpr int kNoDelta = 0;
constexpr int kRowDelta = -1;

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

/// Of a norm whose partials come through an inbox.
struct ExchangeNormParams : RmsNormParams {
  cuda::Inbox from;
  RoundForm form;
};

/// And whose results are sent to all ranks: block b has row b of the rank.
struct OwnedNormParams : ExchangeNormParams {
  int rank, num_ranks;
  OwnedRows everywhere;
  ExchangeState* states[kMaxRanks] = {};
};

template <typename Params>
inline constexpr bool kTakes = std::is_base_of_v<ExchangeNormParams, Params>;
template <typename Params>
inline constexpr bool kOwns = std::is_same_v<Params, OwnedNormParams>;

/// The partials of the thread's columns, taken from an inbox as they come and added in order.
template <int kColumns, int kAtOnce>
__device__ __forceinline__ FloatPack<kColumns> take_partials(const cuda::Inbox& inbox, float* first,
                                                             int64_t stride, int num_partials) {
  FloatPack<kColumns> sum;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sum.x[c] = -0.0f;  // which leaves the first one as it is
#pragma unroll 1
  for (int at = 0; at < num_partials; at += kAtOnce) {
    FloatPack<kColumns> partial[kAtOnce];
    cuda::wait_until(inbox, [&] {
      bool is_whole = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int c = 0; c < kColumns; c += 4) {
          const uint4 words = cuda::load_words(first + (at + i) * stride + c);
          memcpy(&partial[i].x[c], &words, sizeof words);
          is_whole = is_whole && cuda::is_whole(words);
        }
      }
      return is_whole;
    });
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; c += 4) cuda::empty_words(first + (at + i) * stride + c);
      add(sum, partial[i]);
    }
  }
  return sum;
}

/// Stores a pack at the same place of every rank's rows.
template <typename Pack>
__device__ __forceinline__ void store_everywhere(void* const (&rows)[kMaxRanks], int num_ranks,
                                                 int64_t at, const Pack& pack) {
#pragma unroll
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if (rank < num_ranks) cuda::store_pack(static_cast<uint16_t*>(rows[rank]) + at, pack);
  }
}

/// Params: RmsNormParams, ExchangeNormParams or OwnedNormParams.
template <int kColumns, int kDelta, bool kStarts, typename Params>
__global__ void __maxnreg__(max_registers(kColumns, kTakes<Params>))
    rms_norm_kernel(Params params, float inverse_width) {
  cuda::allow_next_kernel();
  const int width = params.width;
  const int wanted = threadIdx.x * kColumns;
  const bool is_inside = wanted < width;
  const int column = min(wanted, width - kColumns);  // so that no load waits for a branch
  // The weights are on their way to L2 while the kernel before this one finishes; they are read
  // after the partials, whose registers they take over, and arrive while the block sums.
  cuda::fetch_to_cache(params.weight + column);
  cuda::wait_for_previous_kernel();

  int64_t row = blockIdx.x;
  if constexpr (kOwns<Params>) row = params.form.owners.row_of(params.rank, blockIdx.x);
  [[maybe_unused]] uint64_t round = 0;
  const int64_t at = row * width + column;
  uint16_t* residual = static_cast<uint16_t*>(params.residual) + at;
  Bf16Pack<kColumns> bits = negative_zeros<kColumns>();
  if constexpr (!kStarts) bits = cuda::load_pack<Bf16Pack<kColumns>>(residual);
  if constexpr (kDelta != kNoDelta) {
    FloatPack<kColumns> delta{};
    if constexpr (kDelta == kRowDelta) {
      const uint16_t* from = static_cast<const uint16_t*>(params.delta) + at;
      delta = cuda::to_floats(cuda::load_pack<Bf16Pack<kColumns>>(from));
    } else if constexpr (kTakes<Params>) {
      const cuda::Inbox& inbox = params.from;
      round = cuda::begin_taking(inbox);
      float* first = inbox.words + cuda::slot_begin(inbox, round) +
                     static_cast<int64_t>(blockIdx.x) * width + column;
      const int64_t stride = static_cast<int64_t>(params.form.inbox_rows) * width;
      // A thread outside would take what belongs to another one.
      if (is_inside) {
        delta = cuda::round_to_bf16(
            take_partials<kColumns, kDelta>(inbox, first, stride, params.num_partials));
      }
    } else {
      const int64_t stride = static_cast<int64_t>(params.num_rows) * width;
      delta = cuda::round_to_bf16(
          sum_partials<kColumns, kDelta>(params.delta_partials + at, stride, params.num_partials));
    }
    FloatPack<kColumns> sum = cuda::to_floats(bits);
    add(sum, delta);
    bits = cuda::to_bf16(sum);
    if (is_inside) cuda::store_pack(residual, bits);
    if constexpr (kOwns<Params>) {
      if (is_inside && params.everywhere.residual[0] != nullptr) {
        store_everywhere(params.everywhere.residual, params.num_ranks, at, bits);
      }
    }
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
  const int64_t out_at = row * params.out_stride + column;
  if constexpr (kOwns<Params>) {
    if (is_inside) {
      store_everywhere(params.everywhere.out, params.num_ranks, out_at, cuda::to_bf16(x));
    }
    __syncthreads();
#pragma unroll
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      const bool is_told = rank < params.num_ranks && rank != params.rank;
      if (is_told && threadIdx.x == rank) {
        cuda::give_sign(&params.states[rank]->owned_rows[row], round + 1);
      }
    }
  } else {
    if (is_inside) cuda::store_pack(static_cast<uint16_t*>(params.out) + out_at, cuda::to_bf16(x));
  }
}

/// Waits for the rows of all other ranks. A thread to a row.
__global__ void __launch_bounds__(kMaxRowsToOwners)
    await_rows_kernel(cuda::Inbox inbox, RowOwners owners, int rank, int num_rows) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int row = static_cast<int>(threadIdx.x);
  if (row >= num_rows || owners.rank_of(row) == rank) return;
  const uint64_t value = inbox.state->taking + 1;
  const uint64_t* sign = &inbox.state->owned_rows[row];
  cuda::wait_until(inbox, [&] { return cuda::load_sign(sign) == value; });
}

template <int kColumns, bool kStarts>
auto kernel_with_delta(const RmsNormParams& params) {
  using Params = RmsNormParams;
  if (params.delta != nullptr) return rms_norm_kernel<kColumns, kRowDelta, kStarts, Params>;
  if (params.num_partials % 4 == 0) return rms_norm_kernel<kColumns, 4, kStarts, Params>;
  if (params.num_partials % 2 == 0) return rms_norm_kernel<kColumns, 2, kStarts, Params>;
  return rms_norm_kernel<kColumns, 1, kStarts, Params>;
}

template <int kColumns, typename Params>
int launch_taking(const Params& params, int num_rows, int num_threads, float inverse_width,
                  void* stream) {
  constexpr int kMost = kColumns < 16 ? 4 : 2;
  auto* kernel = params.num_partials % kMost == 0 ? rms_norm_kernel<kColumns, kMost, false, Params>
                                                  : rms_norm_kernel<kColumns, 2, false, Params>;
  return cuda::launch(kernel, num_rows, num_threads, 0, stream, params, inverse_width);
}

/// The norm of sums that come through an inbox.
template <int kColumns>
int launch_exchange_norm(const RmsNormParams& params, int num_threads, float inverse_width,
                         void* stream) {
  const Exchange& exchange = *params.exchange;
  const int num_ranks = exchange.num_ranks, rank = exchange.rank;
  const ExchangeNormParams taking = {params, cuda::own_inbox(exchange),
                                     round_form(exchange, params.num_partials, params.num_rows)};
  if (!taking.form.owners.exist()) {
    return launch_taking<kColumns>(taking, params.num_rows, num_threads, inverse_width, stream);
  }
  OwnedNormParams owned = {taking, rank, num_ranks, *params.owned};
  for (int i = 0; i < num_ranks; ++i) owned.states[i] = cuda::state_of(exchange, i);
  const int num_own = taking.form.owners.rows_of(rank, params.num_rows);
  const int error = launch_taking<kColumns>(owned, num_own, num_threads, inverse_width, stream);
  if (error != cudaSuccess) return error;
  return cuda::launch(await_rows_kernel, 1, kMaxRowsToOwners, 0, stream, taking.from,
                      taking.form.owners, rank, params.num_rows);
}

template <int kColumns>
int launch_rms_norm(const RmsNormParams& params, void* stream) {
  const int num_warps = cuda::num_row_warps(params.width);
  const float inverse_width = 1.0f / static_cast<float>(params.width);
  if (params.exchange != nullptr) {
    return launch_exchange_norm<kColumns>(params, num_warps * 32, inverse_width, stream);
  }
  auto* kernel = rms_norm_kernel<kColumns, kNoDelta, false, RmsNormParams>;
  if (params.delta != nullptr || params.delta_partials != nullptr) {
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
  const RoundForm form = round_form(exchange, params.num_partials, params.num_rows);
  if (exchange.plan.norm_blocks == 0 && form.first_sum > 0) return false;
  if (!form.owners.exist()) return true;
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
  const int num_deltas =
      (params.delta != nullptr) + (params.delta_partials != nullptr) + (params.exchange != nullptr);
  const bool has_delta = num_deltas > 0;
  const bool is_wide = params.width > kMaxWidth || params.residual_stride != params.width;
  if (params.dtype != DType::kBF16 || params.width <= 0 || params.width % 16 != 0 ||
      (is_wide && has_delta) || num_deltas > 1 || params.out_stride < params.width ||
      params.out_stride % 8 != 0 || params.residual_stride < params.width ||
      params.residual_stride % 8 != 0 || (params.starts_residual && !has_delta) ||
      (params.delta_partials != nullptr && params.num_partials < 1) ||
      !has_legal_exchange(params) ||
      !cuda::are_aligned(params.residual, params.delta, params.delta_partials, params.weight,
                         params.out)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  if (is_wide) return launch_wide_rms_norm(params, stream);
  if (params.exchange != nullptr && params.exchange->plan.norm_blocks > 0) {
    return take_norm_cuda(params, stream);
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
