#pragma once

/// How a warp chooses a row's experts by its logits.

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/experts/experts.h"

namespace openspec::cuda {

inline constexpr uint32_t kMinusInfinity = 0xff80;  // of bf16

/// Of a logit in bf16: greater for a greater logit, and of equal ones for the lower index; never 0.
__device__ __forceinline__ uint32_t logit_key(uint32_t bits, int index) {
  if (bits == 0x8000) bits = 0;  // zeros are equal
  const uint32_t rising = bits & 0x8000 ? ~bits & 0xffff : bits | 0x8000;
  return rising << 16 | static_cast<uint32_t>(kMaxExperts - index);
}
__device__ __forceinline__ int index_of_key(uint32_t key) {
  return kMaxExperts - static_cast<int>(key & 0xffff);
}
__device__ __forceinline__ float logit_of_key(uint32_t key) {
  const uint32_t rising = key >> 16;
  return __uint_as_float((rising & 0x8000 ? rising & 0x7fff : ~rising & 0xffff) << 16);
}

/// Whether a row goes to no expert.
__device__ __forceinline__ bool is_padding(const RouteParams& params, int row) {
  return params.row_span != nullptr && __ldcg(params.row_span + row) < 0;
}

/// A warp's row: lane l has the bits of the logits of experts l, l + 32, ...; kMinusInfinity where
/// there are no more.
template <int kPerLane>
__device__ __forceinline__ void choose_row(const uint32_t (&bits)[kPerLane],
                                           const RouteParams& params, int64_t row,
                                           bool goes_nowhere, int lane) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int num_experts = params.num_experts, top_k = params.top_k;
  int32_t* const expert = params.expert + row * top_k;
  float* const weight = params.weight + row * top_k;
  uint32_t keys[kPerLane], most_key = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int index = i * 32 + lane;
    keys[i] = index < num_experts ? logit_key(bits[i], index) : 0;
    most_key = max(most_key, keys[i]);
  }
  const float most = logit_of_key(__reduce_max_sync(kAllLanes, most_key));
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    total = __fadd_rn(total, expf(__fadd_rn(__uint_as_float(bits[i] << 16), -most)));
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) total = __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, d));

  uint32_t own = 0;  // lane s: the s-th best
  for (int s = 0; s < top_k; ++s) {
    uint32_t best = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) best = max(best, keys[i]);
    best = __reduce_max_sync(kAllLanes, best);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) keys[i] = keys[i] == best ? 0 : keys[i];
    if (lane == s) own = best;
  }
  const int index = index_of_key(own);
  float share = __fdiv_rn(expf(__fadd_rn(logit_of_key(own), -most)), total), chosen = 0.0f;
  int place = 0;
  for (int s = 0; s < top_k; ++s) {
    chosen = __fadd_rn(chosen, __shfl_sync(kAllLanes, share, s));
    place += __shfl_sync(kAllLanes, index, s) < index;
  }
  if (params.norm_top_k) share = __fdiv_rn(share, chosen);
  if (lane < top_k) {
    expert[place] = goes_nowhere ? -1 : index;
    weight[place] = goes_nowhere ? 0.0f : share;
  }
}

}  // namespace openspec::cuda
