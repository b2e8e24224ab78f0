#pragma once

/// What is done row by row: convolution and gates before the recurrence, and after it the norm of
/// prompts' outputs and what prompts leave in the rings.

#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/delta_net/math.cuh"

namespace openspec::gated_delta {

inline constexpr int kConvColumns = 8;  // of a thread
inline constexpr int kConvThreads = 128;
inline constexpr int kConvRows = 8;  // of a thread, where there are prompts
using Stored = cuda::Bf16Pack<kConvColumns>;
using Values = cuda::FloatPack<kConvColumns>;

struct RowPlace {
  int span, position, num_after;  // num_after: rows of the span from this one on
  int num_rows, slot;             // of the span

  __device__ __forceinline__ RowPlace(const RowBatch& rows, int row)
      : span(rows.row_span[row]), position(0), num_after(0), num_rows(0), slot(0) {
    if (span < 0) return;
    const int begin = rows.span_begin[span], end = rows.span_begin[span + 1];
    position = rows.span_kv_len[span] + row - begin;
    num_after = end - row;
    num_rows = end - begin;
    slot = rows.span_seq[span];
  }
};

/// beta and g of a row's head.
__device__ __forceinline__ void make_gates(const DeltaNetParams& params, float* gates, int row,
                                           int head) {
  const auto read = [](const void* from, int64_t at) {
    return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(from)[at]) << 16);
  };
  const float b = read(params.b, row * params.b_stride + head);
  const float x = __fadd_rn(read(params.a, row * params.a_stride + head), params.dt_bias[head]);
  const float softplus = x > 20.0f ? x : log1pf(expf(x));
  float* to = gates + static_cast<int64_t>(row) * 2 * params.shape.num_v_heads + head;
  to[0] = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-b)));
  to[params.shape.num_v_heads] = __fmul_rn(-expf(params.a_log[head]), softplus);
}

/// `kRows` rows along blockIdx.y, a thread for eight channels; the last block of them makes their
/// gates. Spans of steps leave k and the rows before the convolution in the rings: what this and
/// the kernels after it read lies at other places. Of prompts' rows a thread takes several, or it
/// would read each of them four times.
template <int kRows>
__global__ void __launch_bounds__(kConvThreads)
    convolve(const __grid_constant__ DeltaNetParams params, const Workspace workspace,
             int step_rows) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int first_row = static_cast<int>(blockIdx.y) * kRows, width = params.shape.conv_width();
  const int num_rows = min(kRows, params.rows.num_rows - first_row);
  if (blockIdx.x + 1 == gridDim.x) {
    for (int i = static_cast<int>(threadIdx.x); i < num_rows * params.shape.num_v_heads;
         i += kConvThreads) {
      const int row = first_row + i / params.shape.num_v_heads;
      if (params.rows.row_span[row] < 0) continue;
      make_gates(params, workspace.gates, row, i % params.shape.num_v_heads);
    }
    return;
  }
  const int column = static_cast<int>(blockIdx.x * kConvThreads + threadIdx.x) * kConvColumns;
  if (column >= width) return;
  const auto load = [&](int row) {
    return cuda::load_pack<Stored>(static_cast<const uint16_t*>(params.qkv) +
                                   row * params.qkv_stride + column);
  };
  Stored near[kRows + kDeltaTaps - 1] = {};  // rows from first_row - (kDeltaTaps - 1) on
  if constexpr (kRows > 1) {
#pragma unroll
    for (int i = 0; i < kRows + kDeltaTaps - 1; ++i) {
      const int row = first_row + i - (kDeltaTaps - 1);
      if (row >= 0 && row < params.rows.num_rows) near[i] = load(row);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= num_rows) return;
    const int row = first_row + r;
    const RowPlace place(params.rows, row);
    if (place.span < 0) continue;
    Values sum = {};
    Stored own;
#pragma unroll
    for (int tap = 0; tap < kDeltaTaps; ++tap) {
      const int back = kDeltaTaps - 1 - tap, position = place.position - back;
      if (position < 0) continue;
      if (place.num_rows - place.num_after < back) {
        own = cuda::load_pack<Stored>(params.conv_rows.at(place.slot, position) +
                                      params.conv_offset + column * 2);
      } else {
        own = kRows > 1 ? near[r + tap] : load(row - back);
      }
      const Values x = cuda::to_floats(own);
      const Values weight = cuda::load_pack<Values>(params.conv_weight + tap * width + column);
#pragma unroll
      for (int i = 0; i < kConvColumns; ++i) {
        sum.x[i] = __fmaf_rn(weight.x[i], x.x[i], sum.x[i]);
      }
    }
#pragma unroll
    for (float& x : sum.x) x = __fdiv_rn(x, __fadd_rn(1.0f, expf(-x)));
    const Stored out = cuda::to_bf16(sum);
    cuda::store_pack(workspace.x + static_cast<int64_t>(row) * width + column, out);
    if (place.num_rows > step_rows) continue;
    cuda::store_pack(
        params.conv_rows.at(place.slot, place.position) + params.conv_offset + column * 2, own);
    const int in_k = column - params.shape.k_width();
    if (in_k < 0 || in_k >= params.shape.k_width()) continue;
    cuda::store_pack(
        params.records.at(place.slot, place.position) + params.record_offset + in_k * 2, out);
  }
}

inline constexpr int kFinishWarps = 8;  // a head each
inline constexpr int kFinishRows = 4;

/// What a row of a prompt leaves in the rings, by threads `first`, `first` + `step`, ...
__device__ __forceinline__ void keep_row(const DeltaNetParams& params, const Workspace& workspace,
                                         const RowPlace& place, int row, int first, int step) {
  const DeltaShape& shape = params.shape;
  if (place.num_after <= params.records.ring_size) {
    std::byte* record = params.records.at(place.slot, place.position) + params.record_offset;
    const uint16_t* k =
        workspace.x + static_cast<int64_t>(row) * shape.conv_width() + shape.k_width();
    for (int i = first * 8; i < shape.k_width(); i += step * 8) {
      cuda::store_pack(record + i * 2, cuda::load_pack<Stored>(k + i));
    }
    auto* sums = reinterpret_cast<float2*>(record + shape.sums_offset(DType::kBF16));
    for (int i = first; i < shape.num_v_heads; i += step) {
      sums[i] = workspace.sums[static_cast<int64_t>(row) * shape.num_v_heads + i];
    }
  }
  if (place.num_after > params.conv_rows.ring_size) return;
  std::byte* kept = params.conv_rows.at(place.slot, place.position) + params.conv_offset;
  const uint16_t* qkv = static_cast<const uint16_t*>(params.qkv) + row * params.qkv_stride;
  for (int i = first * 8; i < shape.conv_width(); i += step * 8) {
    cuda::store_pack(kept + i * 2, cuda::load_pack<Stored>(qkv + i));
  }
}

/// Of spans that ran as prompts. kFinishRows rows along blockIdx.x, kFinishWarps heads a block.
static __global__ void __launch_bounds__(kFinishWarps * 32)
    finish(const __grid_constant__ DeltaNetParams params, const Workspace workspace,
           int step_rows) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int first_row = static_cast<int>(blockIdx.x) * kFinishRows;
  const int num_rows = min(kFinishRows, params.rows.num_rows - first_row);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(blockIdx.y * kFinishWarps + threadIdx.x / 32);
  const bool has_head = head < params.shape.num_v_heads;
  const int column = head * kDim + lane * 4;
  uint2 o[kFinishRows], z[kFinishRows];  // all asked for before any is used
#pragma unroll
  for (int r = 0; r < kFinishRows; ++r) {
    if (!has_head || r >= num_rows) break;
    const int64_t row = first_row + r;
    o[r] = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(params.out) +
                                           row * params.shape.v_width() + column);
    z[r] = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(params.z) +
                                           row * params.z_stride + column);
  }
#pragma unroll
  for (int r = 0; r < kFinishRows; ++r) {
    if (r >= num_rows) return;
    const int row = first_row + r;
    const RowPlace place(params.rows, row);
    if (place.span < 0 || place.num_rows <= step_rows) continue;
    if (has_head) {
      uint16_t* out = static_cast<uint16_t*>(params.out) +
                      static_cast<int64_t>(row) * params.shape.v_width() + column;
      *reinterpret_cast<uint2*>(out) = gated_norm(params.norm_weight, params.eps, o[r], z[r], lane);
    }
    keep_row(params, workspace, place, row, static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x),
             static_cast<int>(gridDim.y * blockDim.x));
  }
}

}  // namespace openspec::gated_delta
