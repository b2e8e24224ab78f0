#include <cstdint>

#include "kernels/attention/head_gate.h"
#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"

namespace openspec {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 8;  // of a thread

using Bits = cuda::Bf16Pack<kColumns>;
using Floats = cuda::FloatPack<kColumns>;

/// The arithmetic of simd_cpu.h's exp_nonpositive and sigmoid, for the same bits.
__device__ __forceinline__ float sigmoid(float x) {
  const float below = x < 0.0f ? x : -x;
  const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float t = __fmaf_rn(below, 1.44269504f, shifter);
  const float n = __fsub_rn(t, shifter);
  float r = __fmaf_rn(n, -0.693359375f, below);
  r = __fmaf_rn(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = __fmaf_rn(p, r, 1.3981999507e-3f);
  p = __fmaf_rn(p, r, 8.3334519073e-3f);
  p = __fmaf_rn(p, r, 4.1665795894e-2f);
  p = __fmaf_rn(p, r, 1.6666665459e-1f);
  p = __fmaf_rn(p, r, 5.0000001201e-1f);
  p = __fadd_rn(__fmaf_rn(p, __fmul_rn(r, r), r), 1.0f);
  const float scale = __uint_as_float((__float_as_uint(t) << 23) + 0x3f800000u);
  const float e = below > -87.0f ? __fmul_rn(p, scale) : 0.0f;  // also of NaN
  return __fdiv_rn(x < 0.0f ? e : 1.0f, __fadd_rn(e, 1.0f));
}

/// A row along blockIdx.x.
__global__ void __launch_bounds__(kThreads) head_gate_kernel(HeadGateParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int dim = params.head_dim, width = params.num_heads * dim;
  const int column = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * kColumns;
  if (column >= width) return;
  const int head = column / dim;
  const int64_t row = blockIdx.x;
  const uint16_t* gates = static_cast<const uint16_t*>(params.gates) + row * params.row_stride +
                          (2 * head + 1) * dim + (column - head * dim);
  uint16_t* at = static_cast<uint16_t*>(params.x) + row * width + column;
  const Floats gate = cuda::to_floats(cuda::load_pack<Bits>(gates));
  Floats x = cuda::to_floats(cuda::load_pack<Bits>(at));
#pragma unroll
  for (int i = 0; i < kColumns; ++i) x.x[i] = __fmul_rn(x.x[i], sigmoid(gate.x[i]));
  cuda::store_pack(at, cuda::to_bf16(x));
}

}  // namespace

int head_gate_cuda(const HeadGateParams& params, void* stream) {
  if (params.dtype != DType::kBF16 || params.num_heads < 1 || params.head_dim < kColumns ||
      params.head_dim % kColumns != 0 || params.row_stride % kColumns != 0 ||
      !cuda::are_aligned(params.x, params.gates)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0) return cudaSuccess;
  constexpr int kBlock = kThreads * kColumns;
  const int num_blocks = (params.num_heads * params.head_dim + kBlock - 1) / kBlock;
  return cuda::launch(
      head_gate_kernel,
      dim3(static_cast<unsigned>(params.num_rows), static_cast<unsigned>(num_blocks)), kThreads, 0,
      stream, params);
}

}  // namespace openspec
