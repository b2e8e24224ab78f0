#pragma once

/// What the kernels of linear_cuda share: the packed layout, the order of summation and the
/// rounding at the end. The contract is linear_cuda's (linear.h); whatever decides bits is here, so
/// that the kernels agree.

#include <cstdint>

#include "kernels/linear/linear.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#endif

namespace openspec::cuda {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

inline constexpr int kLinearStep = 16;  // inputs of a step: the k of one matrix instruction
inline constexpr int kLinearGateRows = kLinearUnit / 2;  // of a SwiGLU unit; then as many up rows

/// Steps [begin, end) of those that are here.
struct StepRange {
  int begin, end;

  OPENSPEC_HD constexpr int size() const { return end - begin; }
};

/// Steps of a split that is here.
OPENSPEC_HD constexpr StepRange split_steps(const PackedLinear& weight, int split) {
  static_assert(kSplitUnit % kLinearStep == 0);
  const InputRange inputs = weight.inputs_of(split);
  return {inputs.begin / kLinearStep, inputs.end / kLinearStep};
}

/// First step of chain `chain` of the split that covers steps [begin, end); chain kLinearChains is
/// the end of the last. A chain may be empty: its sum is zero.
OPENSPEC_HD constexpr int chain_begin(int begin, int end, int chain) {
  return begin + (end - begin) * chain / kLinearChains;
}

/// Element of the packed matrix that holds input `k` of packed row `row`. A step of a unit is four
/// 8 x 8 core matrices of 128 contiguous bytes: rows 0-7 and 8-15 of k 0-7, then of k 8-15.
OPENSPEC_HD constexpr int64_t packed_index(int num_inputs, int row, int k) {
  const int64_t octet = static_cast<int64_t>(row / kLinearUnit) * (num_inputs / 8) + k / 8;
  return (octet * kLinearUnit + row % kLinearUnit) * 8 + k % 8;
}

/// Element of `partials` for a split, a row of x and an output.
OPENSPEC_HD constexpr int64_t partial_index(int num_rows, int num_outputs, int split, int row,
                                            int output) {
  return (static_cast<int64_t>(split) * num_rows + row) * num_outputs + output;
}

#ifdef __CUDACC__
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

/// Whether linear_stream keeps these activations in registers, as for up to 32 rows with most of
/// the Qwen3 models' matrices. Up to 24 nothing is faster.
bool linear_stream_has_registers(const LinearParams& params);

/// linear_cuda by wgmma: the shapes and numbers of rows that linear_wgmma_takes. The same bits.
int linear_wgmma(const LinearParams& params, void* stream);

/// Whether the current device has wgmma and linear_wgmma is the faster kernel for this matrix at so
/// many rows where linear_stream has no registers for them. Host arithmetic only.
bool linear_wgmma_takes(const PackedLinear& shape, int num_rows);

}  // namespace openspec::cuda
