#include "kernels/common/finite.h"
#include "kernels/common/launch.cuh"

namespace openspec {
namespace {

constexpr int kThreads = 256, kBlocksPerSm = 8;

__global__ void __launch_bounds__(kThreads)
    find_non_finite_kernel(const uint32_t* words, int64_t num_words, uint32_t low, int32_t* found) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t num_packs = num_words / 4;
  bool is_found = false;
  for (int64_t i = first; i < num_packs; i += stride) {
    const uint4 pack = reinterpret_cast<const uint4*>(words)[i];
    for (const uint32_t word : {pack.x, pack.y, pack.z, pack.w}) {
      is_found = is_found || detail::is_non_finite(word, low);
    }
  }
  for (int64_t i = 4 * num_packs + first; i < num_words; i += stride) {
    is_found = is_found || detail::is_non_finite(words[i], low);
  }
  if (__syncthreads_or(is_found) && threadIdx.x == 0) *found = 1;
}

}  // namespace

int find_non_finite_cuda(const NumberArea& area, int32_t* found, void* stream) {
  return cuda::launch(find_non_finite_kernel, kBlocksPerSm * cuda::num_sms(), kThreads, 0, stream,
                      static_cast<const uint32_t*>(area.data),
                      static_cast<int64_t>(area.bytes / sizeof(uint32_t)),
                      detail::low_exponent(area.dtype), found);
}

}  // namespace openspec
