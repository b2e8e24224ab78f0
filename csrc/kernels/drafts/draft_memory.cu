#include <cuda_runtime.h>

#include "kernels/common/launch.cuh"
#include "kernels/drafts/draft_memory.h"

namespace openspec {
namespace {

constexpr int kThreads = 128;
constexpr unsigned kAllLanes = 0xffffffffu;

/// A thread for each token, and for the end.
__global__ void __launch_bounds__(kThreads) remember_kernel(RememberParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const DraftMemory& memory = params.memory;
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i > params.num_tokens) return;
  const uint32_t place = params.begin + static_cast<uint32_t>(i);
  memory.tokens[place % memory.capacity] =
      i < params.num_tokens ? params.tokens[i] : DraftMemory::kEnd;
  memory.owners[place % memory.capacity] = params.owner;
  if (i == params.num_tokens) return;
  for (int number = 0; number < DraftMemory::kNumLengths; ++number) {
    if (i < DraftMemory::length(number)) continue;
    const auto token = [&](int back) { return params.tokens[i - 1 - back]; };
    // Places only rise: of equal tokens the last ones stay.
    atomicMax(memory.place_of(number, params.owner, token), place);
  }
}

/// A warp for each sequence, a lane for each length.
__global__ void __launch_bounds__(kThreads) recall_kernel(RecallParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const DraftMemory& memory = params.memory;
  const int s = (blockIdx.x * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (s >= params.num_seqs) return;
  const int slot = params.seq[s];
  const int most = min(params.num_wanted[s], params.max_drafts);
  if (most <= 0) return;
  Recalled found;
  if (lane < DraftMemory::kNumLengths) {
    found = recall(memory, lane, params.owners[s], params.history + slot * params.history_stride,
                   params.num_tokens[slot]);
  }
  const unsigned has = __ballot_sync(kAllLanes, found.match_len > 0);
  if (has == 0) return;
  const int best = __ffs(has) - 1;
  const int match_len = __shfl_sync(kAllLanes, found.match_len, best);
  const uint32_t end = __shfl_sync(kAllLanes, found.end, best);
  if (match_len <= params.match_len[s]) return;
  int32_t* drafts = params.drafts + static_cast<int64_t>(s) * params.max_drafts;
  int count = 0;
  for (int base = 0; base < most; base += 32) {
    const int i = base + lane;
    const int32_t token = i < most
                              ? memory.tokens[(end + static_cast<uint32_t>(i)) % memory.capacity]
                              : DraftMemory::kEnd;
    const unsigned ends = __ballot_sync(kAllLanes, token == DraftMemory::kEnd);
    const int num_here = ends == 0 ? 32 : __ffs(ends) - 1;
    if (lane < num_here) drafts[i] = token;
    count += num_here;
    if (ends != 0) break;
  }
  if (count == 0) return;
  for (int i = count + lane; i < params.max_drafts; i += 32) drafts[i] = -1;
  __syncwarp();
  if (lane == 0) {
    params.num_drafts[s] = count;
    params.match_len[s] = match_len;
  }
}

}  // namespace

int remember_cuda(const RememberParams& params, void* stream) {
  const int num_blocks = params.num_tokens / kThreads + 1;
  return cuda::launch(remember_kernel, num_blocks, kThreads, 0, stream, params);
}

int recall_cuda(const RecallParams& params, void* stream) {
  if (params.num_seqs == 0) return cudaSuccess;
  const int num_blocks = (params.num_seqs * 32 + kThreads - 1) / kThreads;
  return cuda::launch(recall_kernel, num_blocks, kThreads, 0, stream, params);
}

}  // namespace openspec
