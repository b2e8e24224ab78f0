#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/prefill_wgmma.cuh"
#include "kernels/common/hopper.h"
#include "kernels/common/launch.cuh"

namespace openspec::span_attention {
namespace {

/// A layer's K and V as lines of kMaxHeadDim elements. How many there are is not known here: nobody
/// asks for lines that do not exist.
bool map_lines(const void* kv, int box_lines, CUtensorMap* map) {
  const cuuint64_t sizes[] = {kMaxHeadDim, uint64_t{1} << 31};
  const cuuint64_t strides[] = {kMaxHeadDim * 2};
  const cuuint32_t box[] = {kMaxHeadDim / 2, static_cast<cuuint32_t>(box_lines)};
  const cuuint32_t every[] = {1, 1};
  return cuda::encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(kv),
                              sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool has_wgmma() {
  static const bool has = cuda::has_hopper_kernel(prefill_wgmma_kernel);
  return has;
}

int launch_prefill_wgmma(const AttentionArgs& args, void* stream) {
  static const int allowed = cuda::allow_shared_bytes(prefill_wgmma_kernel, kWgmmaSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  WgmmaArgs wgmma_args = {args, kBlockTokens};
  while (args.page_size % wgmma_args.box_lines != 0) wgmma_args.box_lines /= 2;
  CUtensorMap map;
  if (!map_lines(args.kv, wgmma_args.box_lines, &map)) return cudaErrorInvalidValue;
  return cuda::launch(prefill_wgmma_kernel, cuda::num_sms(), kWgmmaThreads, kWgmmaSharedBytes,
                      stream, map, wgmma_args);
}

}  // namespace openspec::span_attention
