#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/prefill_wgmma.cuh"
#include "kernels/common/hopper.h"
#include "kernels/common/launch.cuh"
#include "kernels/common/per_device.h"

namespace openspec::span_attention {
namespace {

/// A layer's K and V as lines of `head_dim` elements. How many there are is not known here: nobody
/// asks for lines that do not exist.
bool map_lines(const void* kv, int head_dim, int box_lines, CUtensorMap* map) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(head_dim), uint64_t{1} << 31};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(head_dim) * 2};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_lines)};
  const cuuint32_t every[] = {1, 1};
  return cuda::encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(kv),
                              sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool has_wgmma() {
  static const bool has = cuda::has_hopper_kernel(prefill_wgmma_kernel<kMidHeadDim>);
  return has;
}

template <int kHeadDim>
int launch_prefill_wgmma(const AttentionArgs& args, void* stream) {
  constexpr auto kKernel = prefill_wgmma_kernel<kHeadDim>;
  constexpr int kBytes = WgmmaLayout<kHeadDim>::kBytes;
  const int allowed = cuda::per_device([] { return cuda::allow_shared_bytes(kKernel, kBytes); });
  if (allowed != cudaSuccess) return allowed;
  WgmmaArgs wgmma_args = {args, kBlockTokens};
  while (args.page_size % wgmma_args.box_lines != 0) wgmma_args.box_lines /= 2;
  CUtensorMap map;
  if (!map_lines(args.kv, kHeadDim, wgmma_args.box_lines, &map)) return cudaErrorInvalidValue;
  return cuda::launch(kKernel, cuda::num_sms(), kWgmmaThreads, kBytes, stream, map, wgmma_args);
}
template int launch_prefill_wgmma<kMidHeadDim>(const AttentionArgs&, void*);
template int launch_prefill_wgmma<kMinHeadDim>(const AttentionArgs&, void*);

}  // namespace openspec::span_attention
