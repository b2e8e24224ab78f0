#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/drafts/pair_states.h"

namespace openspec {
namespace {

constexpr int kWarps = 8;
constexpr int kAtOnce = 8;  // terms of a lane

using Pack = cuda::Bf16Pack<kAtOnce>;

__device__ __forceinline__ float product(const Pack& weights, const cuda::FloatPack<kAtOnce>& x,
                                         float sum) {
  const auto w = cuda::to_floats(weights);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) sum = fmaf(w.x[i], x.x[i], sum);
  return sum;
}

/// The lane's part of a product; weights and values begin at multiples of 16 bytes.
__device__ float dot(const uint16_t* weights, const uint16_t* values, int count, float sum) {
#pragma unroll 4
  for (int k = threadIdx.x % 32 * kAtOnce; k < count; k += 32 * kAtOnce) {
    sum = product(cuda::load_pack<Pack>(weights + k),
                  cuda::to_floats(cuda::load_pack<Pack>(values + k)), sum);
  }
  return sum;
}
__device__ float dot(const uint16_t* weights, const float* values, int count, float sum) {
  for (int k = threadIdx.x % 32 * kAtOnce; k < count; k += 32 * kAtOnce) {
    sum = product(cuda::load_pack<Pack>(weights + k),
                  cuda::load_pack<cuda::FloatPack<kAtOnce>>(values + k), sum);
  }
  return sum;
}

__device__ __forceinline__ float warp_sum(float sum) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return sum;
}

__device__ __forceinline__ float sigma(float x) { return 1.0f / (1.0f + expf(-x)); }

/// A warp for each entry of a state; sequences along blockIdx.y.
__global__ void __launch_bounds__(32 * kWarps) pair_states_kernel(PairStatesParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int i = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % 32;
  const int r = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int rank = params.pairs.rank, width = params.width;
  if (r >= rank || params.depth >= params.num_drafts[i]) return;
  const int64_t sample = int64_t{params.first_sample[i]} + params.depth;
  const int32_t before =
      params.depth > 0 ? params.chosen[sample - 1] : last_token(params.table, params.seq[i]);
  const uint16_t* token = row_of(params.pairs.first, before, rank);
  const auto* output = static_cast<const uint16_t*>(params.outputs) + sample * width;
  const auto* weight = static_cast<const uint16_t*>(params.weight);
  float state;
  if (params.is_recurrent) {
    const int64_t own = int64_t{i} * rank, half = int64_t{params.num_seqs} * rank;
    const float* memory = params.memory + (params.depth % 2) * half + own;
    float sums[3];
    for (int part = 0; part < 3; ++part) {
      const int row = part * rank + r;
      const uint16_t* weights = weight + static_cast<int64_t>(row) * (2 * rank + width);
      float sum = params.depth > 0 ? dot(weights, memory, rank, 0.0f) : 0.0f;
      sum = dot(weights + rank, token, rank, sum);
      sum = dot(weights + 2 * rank, output, width, sum);
      sums[part] = warp_sum(sum) + params.bias[row];
    }
    const float gate = sigma(sums[0]);
    const float old = params.depth > 0 ? memory[r] : 0.0f;
    if (lane == 0) {
      params.memory[(1 - params.depth % 2) * half + own + r] =
          gate * old + (1.0f - gate) * tanhf(sums[1]);
    }
    state = tanhf(sums[2]);
  } else {
    const uint16_t* weights = weight + static_cast<int64_t>(r) * (width + rank);
    float sum = dot(weights, output, width, 0.0f);
    sum = dot(weights + width, token, rank, sum);
    state = sigma(warp_sum(sum) + params.bias[r]) * __uint_as_float(uint32_t{token[r]} << 16);
  }
  if (lane != 0) return;
  static_cast<__nv_bfloat16*>(params.states)[int64_t{i} * rank + r] = __float2bfloat16_rn(state);
}

}  // namespace

int pair_states_cuda(const PairStatesParams& params, void* stream) {
  const int rank = params.pairs.rank;
  if (params.dtype != DType::kBF16 || params.width % kAtOnce != 0 || rank % kAtOnce != 0 ||
      rank > kMaxPairRank ||
      !cuda::are_aligned(params.outputs, params.weight, params.pairs.first, params.memory)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_seqs == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((rank + kWarps - 1) / kWarps),
                  static_cast<unsigned>(params.num_seqs));
  return cuda::launch(pair_states_kernel, grid, dim3(32 * kWarps), 0, stream, params);
}

}  // namespace openspec
