#pragma once

/// What is done row by row: convolution and gates before the recurrence, and after it the norm of
/// prompts' outputs and what prompts leave in the rings.

#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/delta_net/math.cuh"

namespace openspec::gated_delta {

inline constexpr int kConvColumns = 8;  // of a thread
inline constexpr int kConvThreads = 128;
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

/// Rows along blockIdx.y, a thread for eight channels; the last block of a row makes its gates.
/// Spans of steps leave k and the rows before the convolution in the rings: what this and the
/// kernels after it read lies at other places.
static __global__ void __launch_bounds__(kConvThreads)
    convolve(const __grid_constant__ DeltaNetParams params, const Workspace workspace,
             int step_rows) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.y), width = params.shape.conv_width();
  const RowPlace place(params.rows, row);
  if (place.span < 0) return;
  if (blockIdx.x + 1 == gridDim.x) {
    for (int head = static_cast<int>(threadIdx.x); head < params.shape.num_v_heads;
         head += kConvThreads) {
      make_gates(params, workspace.gates, row, head);
    }
    return;
  }
  const int column = static_cast<int>(blockIdx.x * kConvThreads + threadIdx.x) * kConvColumns;
  if (column >= width) return;
  Values sum = {};
  Stored own;
#pragma unroll
  for (int tap = 0; tap < kDeltaTaps; ++tap) {
    const int back = kDeltaTaps - 1 - tap, position = place.position - back;
    if (position < 0) continue;
    const bool is_here = place.num_rows - place.num_after >= back;
    const void* from =
        is_here ? static_cast<const void*>(static_cast<const uint16_t*>(params.qkv) +
                                           (row - back) * params.qkv_stride + column)
                : params.conv_rows.at(place.slot, position) + params.conv_offset + column * 2;
    own = cuda::load_pack<Stored>(from);
    const Values x = cuda::to_floats(own);
    const Values weight = cuda::load_pack<Values>(params.conv_weight + tap * width + column);
#pragma unroll
    for (int i = 0; i < kConvColumns; ++i) sum.x[i] = __fmaf_rn(weight.x[i], x.x[i], sum.x[i]);
  }
#pragma unroll
  for (float& x : sum.x) x = __fdiv_rn(x, __fadd_rn(1.0f, expf(-x)));
  const Stored out = cuda::to_bf16(sum);
  cuda::store_pack(workspace.x + static_cast<int64_t>(row) * width + column, out);
  if (place.num_rows > step_rows) return;
  cuda::store_pack(
      params.conv_rows.at(place.slot, place.position) + params.conv_offset + column * 2, own);
  const int in_k = column - params.shape.k_width();
  if (in_k < 0 || in_k >= params.shape.k_width()) return;
  cuda::store_pack(params.records.at(place.slot, place.position) + params.record_offset + in_k * 2,
                   out);
}

inline constexpr int kFinishWarps = 8;  // a head each

/// Of spans that ran as prompts. Rows along blockIdx.x, kFinishWarps heads a block.
static __global__ void __launch_bounds__(kFinishWarps * 32)
    finish(const __grid_constant__ DeltaNetParams params, const Workspace workspace,
           int step_rows) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x);
  const RowPlace place(params.rows, row);
  if (place.span < 0 || place.num_rows <= step_rows) return;
  const DeltaShape& shape = params.shape;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(blockIdx.y * kFinishWarps + threadIdx.x / 32);
  if (head < shape.num_v_heads) {
    const int column = head * kDim + lane * 4;
    uint16_t* out =
        static_cast<uint16_t*>(params.out) + static_cast<int64_t>(row) * shape.v_width() + column;
    const uint16_t* z = static_cast<const uint16_t*>(params.z) + row * params.z_stride + column;
    uint2* o = reinterpret_cast<uint2*>(out);
    *o = gated_norm(params.norm_weight, params.eps, *o, *reinterpret_cast<const uint2*>(z), lane);
  }
  const int first = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  const int step = static_cast<int>(gridDim.y * blockDim.x);
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

}  // namespace openspec::gated_delta
