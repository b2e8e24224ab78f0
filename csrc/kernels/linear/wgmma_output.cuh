#pragma once

/// The end of linear_wgmma: from the accumulators of a warpgroup, outputs by rows, to memory, rows
/// by outputs.

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/common/wgmma.cuh"
#include "kernels/linear/tiles.cuh"

namespace openspec::cuda {

inline constexpr int kGroupThreads = 128;  // of a warpgroup
inline constexpr int kGroupUnits = 4;      // of 16 outputs, one per warp
inline constexpr int kTurnRows = 32;       // that pass through shared memory at a time

// A row of a turn of fp32 that is sent: as long as the lanes of a fragment need, to fall on all
// banks.
inline constexpr int kSendPitch = kGroupUnits * kLinearUnit + 4;
inline constexpr int kSendTurnBytes = kTurnRows * kSendPitch * 4;

__host__ __device__ constexpr int turn_bytes(bool is_swiglu) {
  return kTurnRows * kGroupUnits * (is_swiglu ? 16 : 32);
}

#ifdef OPENSPEC_HAS_WGMMA

/// Where the products of a warpgroup go.
struct GroupOutput {
  void* out;           // of element 0, 0
  int64_t row_stride;  // elements
  int first_row;
  int num_rows;  // of all x
  int first_unit;
  int num_units;  // of the group that are there to be written: none where <= 0
  int group;
  int thread;       // of the group
  uint32_t shared;  // bf16: address of turn_bytes() of the group's own
};

template <int kRows>
__device__ __forceinline__ void add_bias(const GroupOutput& to, const float* bias,
                                         float (&sums)[kRows / 2]) {
  const int warp = to.thread / 32;
  if (warp >= to.num_units) return;
  const float* from = bias + (to.first_unit + warp) * kLinearUnit + to.thread % 32 / 4;
  const float biases[2] = {__ldg(from), __ldg(from + kLinearUnit / 2)};
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) sums[i] = __fadd_rn(sums[i], biases[i / 2 % 2]);
}

/// fp32, straight from the registers: the eight lanes with the same row fill whole sectors of 32
/// bytes.
template <int kRows>
__device__ __forceinline__ void write_f32(const GroupOutput& to, const float (&sums)[kRows / 2]) {
  const int warp = to.thread / 32;
  const int lane = to.thread % 32;
  if (warp >= to.num_units) return;
  const int output = (to.first_unit + warp) * kLinearUnit + lane / 4;
  const int first_row = to.first_row + lane % 4 * 2;
  float* at = static_cast<float*>(to.out) + first_row * to.row_stride + output;
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const int row = i / 2 * 8 + i % 2;
    if (first_row + row >= to.num_rows) continue;
    at[row * to.row_stride] = sums[i / 2 * 4 + i % 2];
    at[row * to.row_stride + kLinearUnit / 2] = sums[i / 2 * 4 + i % 2 + 2];
  }
}

__device__ __forceinline__ uint32_t pack(__nv_bfloat16 low, __nv_bfloat16 high) {
  const __nv_bfloat162 both = __halves2bfloat162(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

/// a / b for b from 1 to 2^100 and a = 0 or of a magnitude from 2^-60 to 2^60: what __fdiv_rn
/// computes there, by the same instructions, without its branch for the rest.
__device__ __forceinline__ float divide_moderate(float a, float b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  inverse = __fmaf_rn(__fmaf_rn(-b, inverse, 1.0f), inverse, inverse);
  const float quotient = __fmul_rn(a, inverse);
  return __fmaf_rn(__fmaf_rn(-b, quotient, a), inverse, quotient);
}

/// swiglu() of kCount pairs, the same bits, one branch for all of them: a division that may branch
/// does not overlap with the next one.
template <int kCount>
__device__ __forceinline__ void swiglu_all(const float (&gate_sums)[kCount],
                                           const float (&up_sums)[kCount],
                                           __nv_bfloat16 (&out)[kCount]) {
  bool is_moderate = true;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float gate = __bfloat162float(__float2bfloat16_rn(gate_sums[i]));
    const bool is_in_range = gate > -64.0f && gate < 0x1p60f && fabsf(gate) > 0x1p-60f;
    is_moderate = is_moderate && (is_in_range || __float_as_uint(gate) == 0);
  }
  if (is_moderate) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float gate = __bfloat162float(__float2bfloat16_rn(gate_sums[i]));
      const float up = __bfloat162float(__float2bfloat16_rn(up_sums[i]));
      const float silu = divide_moderate(gate, __fadd_rn(1.0f, expf(-gate)));
      out[i] = __float2bfloat16_rn(__fmul_rn(__bfloat162float(__float2bfloat16_rn(silu)), up));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = swiglu(gate_sums[i], up_sums[i]);
  }
}

/// bf16, turned round in shared memory 32 rows at a time. A row has 8 places of 16 bytes, 4 with
/// SwiGLU, permuted so that neither side has bank conflicts.
template <int kRows, bool kIsSwiGlu>
__device__ __forceinline__ void write_bf16(const GroupOutput& to, const float (&sums)[kRows / 2]) {
  constexpr int kUnitPieces = kIsSwiGlu ? 1 : 2;  // of 8 outputs, 16 bytes
  constexpr int kRowPieces = kGroupUnits * kUnitPieces;
  const auto place = [&](int row, int piece) {
    const int swap = kIsSwiGlu ? row / 2 % 4 : row % 8;
    return to.shared + (row * kRowPieces + (piece ^ swap)) * 16;
  };
  const int warp = to.thread / 32;
  const int lane = to.thread % 32;
#pragma unroll
  for (int turn = 0; turn < kRows / kTurnRows; ++turn) {
    const float* turn_sums = &sums[turn * kTurnRows / 2];
    if (turn > 0) wgmma::sync_group(to.group);
    if constexpr (kIsSwiGlu) {
      float gates[8], ups[8];
      __nv_bfloat16 products[8];
      uint32_t values[4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        gates[i] = turn_sums[i / 2 * 4 + i % 2];
        ups[i] = turn_sums[i / 2 * 4 + i % 2 + 2];
      }
      swiglu_all(gates, ups, products);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = pack(products[2 * i], products[2 * i + 1]);
      wgmma::store_transposed(place(lane, warp), values);  // matrix i holds rows 8 i to 8 i + 7
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = turn_sums + 8 * half + 2 * i;
          values[i] = pack(__float2bfloat16_rn(pair[0]), __float2bfloat16_rn(pair[1]));
        }
        // Matrices 0 and 1 are the two halves of the unit for 8 rows, 2 and 3 for the next 8.
        wgmma::store_transposed(
            place(16 * half + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2), values);
      }
    }
    wgmma::sync_group(to.group);
#pragma unroll
    for (int i = 0; i < kTurnRows * kRowPieces / kGroupThreads; ++i) {
      const int turn_row = (to.thread + i * kGroupThreads) / kRowPieces;
      const int piece = to.thread % kRowPieces;
      const int row = to.first_row + turn * kTurnRows + turn_row;
      if (row >= to.num_rows || piece >= to.num_units * kUnitPieces) continue;
      const uint4 value = wgmma::load_16_bytes(place(turn_row, piece));
      __nv_bfloat16* at = static_cast<__nv_bfloat16*>(to.out) + row * to.row_stride +
                          to.first_unit * (kUnitPieces * 8) + piece * 8;
      *reinterpret_cast<uint4*>(at) = value;
    }
  }
}

#endif  // OPENSPEC_HAS_WGMMA

}  // namespace openspec::cuda
