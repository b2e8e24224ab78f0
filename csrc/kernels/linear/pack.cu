#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/linear/linear.h"
#include "kernels/linear/tiles.cuh"

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
  const int to_row =
      cuda::packed_row(shape.num_outputs, shape.epilogue, first_output + static_cast<int>(row));
  const uint4 inputs =
      *reinterpret_cast<const uint4*>(rows + row * shape.num_inputs + octet * kOctet);
  *reinterpret_cast<uint4*>(packed + cuda::packed_index(shape.num_inputs, to_row, octet * kOctet)) =
      inputs;
}

}  // namespace

size_t linear_packed_bytes_cuda(int num_outputs, int num_inputs) {
  return format_bytes(MatrixFormat::kBF16, num_outputs, num_inputs);
}

int linear_pack_cuda(const PackedLinear& shape, const void* rows, int first_output, int num_rows,
                     void* packed, void* stream) {
  if (shape.format != MatrixFormat::kBF16 || shape.layout != LinearLayout::kTiles ||
      shape.num_outputs % kLinearUnit != 0 || shape.num_inputs % cuda::kLinearStep != 0) {
    return cudaErrorInvalidValue;
  }
  if (num_rows == 0) return cudaSuccess;
  const int64_t num_threads = static_cast<int64_t>((num_rows + kLinearUnit - 1) / kLinearUnit) *
                              kLinearUnit * (shape.num_inputs / kOctet);
  const auto num_blocks = static_cast<unsigned>((num_threads + kThreads - 1) / kThreads);
  return cuda::launch(linear_pack_kernel, dim3(num_blocks), dim3(kThreads), 0, stream, shape,
                      static_cast<const __nv_bfloat16*>(rows), first_output, num_rows,
                      static_cast<__nv_bfloat16*>(packed));
}

}  // namespace openspec
