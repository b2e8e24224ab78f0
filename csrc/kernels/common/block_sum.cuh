#pragma once

#include <cuda_runtime.h>

namespace openspec::cuda {

#ifdef __CUDACC__
/// Sum of the values of all threads of a block of 1024 before this one; `total` of all. Every
/// thread calls it, with the same 32 ints of shared memory.
inline __device__ int block_exclusive_sum(int value, int* warp_sums, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += before;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int of_warps = warp_sums[lane];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, of_warps, offset);
    if (lane >= offset) of_warps += before;
  }
  *total = __shfl_sync(0xffffffffu, of_warps, 31);
  const int before_warp = __shfl_sync(0xffffffffu, of_warps, warp == 0 ? 0 : warp - 1);
  __syncthreads();
  return inclusive - value + (warp == 0 ? 0 : before_warp);
}
#endif

}  // namespace openspec::cuda
