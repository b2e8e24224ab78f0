#pragma once

/// What the kernels behind linear_cuda share: the packed layout, the order of summation and the
/// rounding at the end. The contract is linear_cuda's (linear.h); whatever decides bits is here, so
/// that the kernels agree.

#include <cstdint>

#include "kernels/linear/linear.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#define OPENSPEC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define OPENSPEC_HOST_DEVICE inline
#endif

namespace openspec::cuda {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

inline constexpr int kLinearStepElements = kLinearUnit * kLinearStep;  // of a unit, contiguous
inline constexpr int kLinearStepBytes = 2 * kLinearStepElements;
inline constexpr int kLinearGateRows = kLinearUnit / 2;  // of a SwiGLU unit; then as many up rows

/// First step of split `split` of `num_splits`; split_begin(.., num_splits) is the end of the last.
OPENSPEC_HOST_DEVICE constexpr int split_begin(int num_steps, int num_splits, int split) {
  return num_steps * split / num_splits;
}

/// First step of chain `chain`, kLinearChains to a split; the one after the last begins at
/// num_steps. A chain may be empty: its sum is zero.
OPENSPEC_HOST_DEVICE constexpr int chain_begin(int num_steps, int num_splits, int chain) {
  const int at = chain * linear_split_leaves(num_splits);  // in eighths of a leaf
  const int begin = linear_leaf_begin(num_steps, num_splits, at / kLinearChains);
  const int end = linear_leaf_begin(num_steps, num_splits, at / kLinearChains + 1);
  return begin + (end - begin) * (at % kLinearChains) / kLinearChains;
}

/// Where output `output` of the (fused) matrix lies: unit * kLinearUnit + row of the unit.
OPENSPEC_HOST_DEVICE constexpr int packed_row(int num_outputs, LinearEpilogue epilogue,
                                              int output) {
  if (epilogue != LinearEpilogue::kSwiGlu) return output;
  const int half = num_outputs / 2;
  const bool is_up = output >= half;
  const int column = is_up ? output - half : output;
  return column / kLinearGateRows * kLinearUnit + (is_up ? kLinearGateRows : 0) +
         column % kLinearGateRows;
}

/// Element of the packed matrix that holds input `k` of packed row `row`. A step of a unit is four
/// 8 x 8 core matrices of 128 contiguous bytes: rows 0-7 and 8-15 of k 0-7, then of k 8-15.
OPENSPEC_HOST_DEVICE constexpr int64_t packed_index(int num_inputs, int row, int k) {
  const int64_t octet = static_cast<int64_t>(row / kLinearUnit) * (num_inputs / 8) + k / 8;
  return (octet * kLinearUnit + row % kLinearUnit) * 8 + k % 8;
}

/// Element of `partials` for a split, a row of x and an output.
OPENSPEC_HOST_DEVICE constexpr int64_t partial_index(int num_rows, int num_outputs, int split,
                                                     int row, int output) {
  return (static_cast<int64_t>(split) * num_rows + row) * num_outputs + output;
}

#ifdef __CUDACC__
/// A split's sum from those of its chains.
__device__ __forceinline__ float add_chains(const float (&chains)[kLinearChains],
                                            bool has_two_leaves) {
  constexpr int kHalf = kLinearChains / 2;
  float left = chains[0];
#pragma unroll
  for (int c = 1; c < kHalf; ++c) left += chains[c];
  float sum = has_two_leaves ? chains[kHalf] : left + chains[kHalf];
#pragma unroll
  for (int c = kHalf + 1; c < kLinearChains; ++c) sum += chains[c];
  return has_two_leaves ? left + sum : sum;
}

/// silu(gate) * up, with every intermediate that the reference stores rounded to bf16. The
/// intrinsics keep the compiler from contracting multiplications and additions differently in two
/// kernels.
__device__ __forceinline__ __nv_bfloat16 swiglu(float gate_sum, float up_sum) {
  const float gate = __bfloat162float(__float2bfloat16_rn(gate_sum));
  const float up = __bfloat162float(__float2bfloat16_rn(up_sum));
  const float silu = __fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate)));
  return __float2bfloat16_rn(__fmul_rn(__bfloat162float(__float2bfloat16_rn(silu)), up));
}
#endif

/// How linear_stream occupies the device. It decides speed, never bits.
struct StreamPlan {
  int blocks_per_sm = 1;
  // Weights that a block has in flight or waiting, where the ring's size is not the kernel's; less
  // where they do not fit.
  int ring_kib = 84;
};

/// linear_cuda by streaming the weights through mma.sync: any shape, any number of rows, sm_80 and
/// newer. Made for up to 24 rows, without wgmma 32; beyond, it is there for what linear_wgmma does
/// not take.
int linear_stream(const LinearParams& params, void* stream, const StreamPlan& plan = {});

/// linear_cuda by wgmma: the shapes and numbers of rows that linear_wgmma_takes. The same bits.
int linear_wgmma(const LinearParams& params, void* stream);

/// Whether the current device has wgmma and linear_wgmma is the faster kernel for this matrix at so
/// many rows where linear_stream has no registers for them. Host arithmetic only.
bool linear_wgmma_takes(const PackedLinear& shape, int num_rows);

}  // namespace openspec::cuda
