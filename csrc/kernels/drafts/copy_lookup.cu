#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/drafts/copy_lookup.h"

namespace openspec {
namespace {

constexpr int kThreads = 1024;
constexpr int kLoadsInFlight = 8;  // per thread: 8192 tokens are one round of a block
constexpr unsigned kAllLanes = 0xffffffffu;

/// A candidate as one number that orders like the rule: length first, then the preferred end. 0:
/// none.
__device__ uint64_t candidate_key(int length, int end, int num_window, bool earliest) {
  const uint32_t preference = earliest ? num_window - end : end;
  return (static_cast<uint64_t>(length) << 32) | preference;
}

__device__ uint64_t warp_max(uint64_t key) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, key, offset);
    key = other > key ? other : key;
  }
  return key;
}

/// The greatest key of the block, known to every thread.
__device__ uint64_t block_max(uint64_t key) {
  __shared__ uint64_t warp_keys[kThreads / 32];
  key = warp_max(key);
  if (threadIdx.x % 32 == 0) warp_keys[threadIdx.x / 32] = key;
  __syncthreads();
  return warp_max(warp_keys[threadIdx.x % 32]);
}

/// Each thread tests every kThreads-th position as the last token of an earlier occurrence. Unlike
/// the prefix function of the reference this does O(max_match_len) work where much matches, but all
/// positions at once; max_match_len is small.
__global__ void __launch_bounds__(kThreads) copy_lookup_kernel(CopyLookupParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int item = blockIdx.x;
  const int slot = params.seq[item];
  const int num_tokens = params.num_tokens[slot];
  const int num_wanted = min(params.num_wanted[item], params.max_drafts);
  const int num_window = min(num_tokens, params.max_lookback);
  const int32_t* window = params.tokens + slot * params.tokens_stride + (num_tokens - num_window);

  uint64_t best = 0;
  if (num_wanted > 0 && num_window > 1) {
    const int32_t last_token = window[num_window - 1];
    for (int begin = threadIdx.x; begin < num_window - 1; begin += kThreads * kLoadsInFlight) {
      int32_t token[kLoadsInFlight];
      // All loads before the first comparison: their latencies overlap.
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        const int position = begin + i * kThreads;
        token[i] = window[min(position, num_window - 1)];
      }
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        const int position = begin + i * kThreads;
        if (position >= num_window - 1 || token[i] != last_token) continue;
        int length = 1;
        while (length < params.max_match_len && length <= position &&
               window[position - length] == window[num_window - 1 - length]) {
          ++length;
        }
        if (length < params.min_match_len) continue;
        const uint64_t key = candidate_key(length, position + 1, num_window, params.earliest);
        best = key > best ? key : best;
      }
    }
  }
  best = block_max(best);

  const int match_len = static_cast<int>(best >> 32);
  const int preference = static_cast<int>(best & 0xffffffffu);
  const int end = params.earliest ? num_window - preference : preference;
  const int num_drafts = match_len > 0 ? num_wanted : 0;
  int32_t* drafts = params.drafts + static_cast<int64_t>(item) * params.max_drafts;
  for (int i = threadIdx.x; i < params.max_drafts; i += kThreads) {
    // Past the end of the history the copy goes on through the draft itself: period num_window -
    // end.
    drafts[i] = i < num_drafts ? window[end + i % (num_window - end)] : -1;
  }
  if (threadIdx.x == 0) {
    params.num_drafts[item] = num_drafts;
    params.match_len[item] = match_len;
  }
}

}  // namespace

int copy_lookup_cuda(const CopyLookupParams& params, void* stream) {
  if (params.num_seqs == 0) return cudaSuccess;
  return cuda::launch(copy_lookup_kernel, params.num_seqs, kThreads, 0, stream, params);
}

}  // namespace openspec
