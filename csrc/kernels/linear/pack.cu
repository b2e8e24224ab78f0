#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/linear/linear.h"
#include "kernels/linear/tiles.cuh"
#include "kernels/linear/weight_form.cuh"

namespace openspec {
namespace {

constexpr int kThreads = 256;
constexpr int kOctet = 8;  // inputs that stay together: 16 bytes

/// A thread moves one octet of one row. Threads go through 16 rows before the next octet, so that a
/// warp reads whole sectors of 16 rows and writes 512 bytes on end.
__global__ void __launch_bounds__(kThreads)
    linear_pack_kernel(PackedLinear shape, const __nv_bfloat16* rows, int first_output,
                       int num_rows, __nv_bfloat16* packed) {
  // No allow_next_kernel(): a linear reads its weights before it waits for the kernel before it, so
  // it must not start until this one is through.
  cuda::wait_for_previous_kernel();
  const int num_octets = shape.num_inputs / kOctet;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row_group = at / kLinearUnit / num_octets;
  const int octet = static_cast<int>(at / kLinearUnit % num_octets);
  const int64_t row = row_group * kLinearUnit + at % kLinearUnit;
  if (row >= num_rows) return;
  const int to_row = shape.packed_output(first_output + static_cast<int>(row));
  const uint4 inputs =
      *reinterpret_cast<const uint4*>(rows + row * shape.num_inputs + octet * kOctet);
  *reinterpret_cast<uint4*>(packed + cuda::packed_index(shape.num_inputs, to_row, octet * kOctet)) =
      inputs;
}

/// A thread moves one octet of one output, 16 outputs of a unit before its next octet: a warp
/// writes 512 bytes on end.
__global__ void __launch_bounds__(kThreads)
    linear_select_kernel(PackedLinear from, const int32_t* output, PackedLinear to,
                         __nv_bfloat16* packed) {
  cuda::wait_for_previous_kernel();  // and no allow_next_kernel(), as above
  const int num_octets = to.num_inputs / kOctet;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const auto row = static_cast<int>(at / kLinearUnit / num_octets * kLinearUnit + at % kLinearUnit);
  if (row >= to.num_outputs) return;
  const int k = static_cast<int>(at / kLinearUnit % num_octets) * kOctet;
  const auto* source = static_cast<const __nv_bfloat16*>(from.data);
  *reinterpret_cast<uint4*>(packed + cuda::packed_index(to.num_inputs, row, k)) =
      *reinterpret_cast<const uint4*>(source + cuda::packed_index(to.num_inputs, output[row], k));
}

/// Output of the (fused) matrix that is row `row` of unit `unit`.
__device__ __forceinline__ int output_of(const PackedLinear& shape, int unit, int row) {
  if (shape.epilogue != LinearEpilogue::kSwiGlu) return unit * kLinearUnit + row;
  constexpr int kHalf = cuda::kLinearGateRows;
  return (row < kHalf ? 0 : shape.num_outputs / 2) + unit * kHalf + row % kHalf;
}

/// A thread makes a word: four codes of rows g and g + 8 of a unit, or of the one that is among
/// `rows` while what is there of the other stays. Units without a row are left alone.
__global__ void __launch_bounds__(kThreads)
    linear_pack_e4m3_kernel(PackedLinear shape, const uint8_t* rows, int first_output, int num_rows,
                            uint32_t* packed) {
  cuda::wait_for_previous_kernel();  // and no allow_next_kernel(), as above
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int pair = static_cast<int>(at % 2), lane = static_cast<int>(at / 2 % 32);
  const int num_steps = shape.num_inputs / cuda::kLinearStep;
  const int64_t unit_step = at / 64;
  const auto unit = static_cast<int>(unit_step / num_steps);
  if (unit >= shape.num_outputs / kLinearUnit) return;
  const auto step = static_cast<int>(unit_step % num_steps);
  const int k = step * cuda::kLinearStep + pair * 8 + lane % 4 * 2;
  uint32_t bits = 0, is_here = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = output_of(shape, unit, lane / 4 + half * 8) - first_output;
    if (row < 0 || row >= num_rows) continue;
    const auto codes = *reinterpret_cast<const uchar2*>(rows + int64_t{row} * shape.num_inputs + k);
    bits |= half == 0 ? cuda::e4m3_upper_bits(codes.x) | cuda::e4m3_upper_bits(codes.y) << 16
                      : cuda::e4m3_lower_bits(codes.x) | cuda::e4m3_lower_bits(codes.y) << 16;
    is_here |= half == 0 ? cuda::kUpperRowBits : ~cuda::kUpperRowBits;
  }
  if (is_here == 0) return;
  if (is_here != ~0u) bits |= packed[at] & ~is_here;
  packed[at] = bits;
}

unsigned num_blocks(int64_t num_threads) {
  return static_cast<unsigned>((num_threads + kThreads - 1) / kThreads);
}

}  // namespace

size_t linear_packed_bytes_cuda(int num_outputs, int num_inputs) {
  return format_bytes(MatrixFormat::kBF16, num_outputs, num_inputs);
}

int linear_select_cuda(const LinearSelectParams& params, void* stream) {
  const PackedLinear& to = params.to;
  if (!are_legal_to_select(params) || to.layout != LinearLayout::kTiles ||
      to.num_outputs % kLinearUnit != 0 || to.num_inputs % cuda::kLinearStep != 0) {
    return cudaErrorInvalidValue;
  }
  const int64_t num_threads = int64_t{to.num_outputs} * (to.num_inputs / kOctet);
  return cuda::launch(linear_select_kernel, dim3(num_blocks(num_threads)), dim3(kThreads), 0,
                      stream, params.from, params.output, to,
                      static_cast<__nv_bfloat16*>(params.packed));
}

int linear_pack_cuda(const PackedLinear& shape, const void* rows, int first_output, int num_rows,
                     void* packed, void* stream) {
  if (shape.layout != LinearLayout::kTiles || shape.num_outputs % kLinearUnit != 0 ||
      shape.num_inputs % cuda::kLinearStep != 0) {
    return cudaErrorInvalidValue;
  }
  if (num_rows == 0) return cudaSuccess;
  switch (shape.format) {
    case MatrixFormat::kBF16: {
      const int64_t num_groups = (num_rows + kLinearUnit - 1) / kLinearUnit;
      const int64_t num_threads = num_groups * kLinearUnit * (shape.num_inputs / kOctet);
      return cuda::launch(linear_pack_kernel, dim3(num_blocks(num_threads)), dim3(kThreads), 0,
                          stream, shape, static_cast<const __nv_bfloat16*>(rows), first_output,
                          num_rows, static_cast<__nv_bfloat16*>(packed));
    }
    case MatrixFormat::kE4M3: {
      const int64_t num_threads = int64_t{shape.num_outputs} * shape.num_inputs / 4;
      return cuda::launch(linear_pack_e4m3_kernel, dim3(num_blocks(num_threads)), dim3(kThreads), 0,
                          stream, shape, static_cast<const uint8_t*>(rows), first_output, num_rows,
                          static_cast<uint32_t*>(packed));
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace openspec
