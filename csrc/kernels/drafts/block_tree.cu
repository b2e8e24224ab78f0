#include <cuda_runtime.h>

#include "kernels/common/launch.cuh"
#include "kernels/drafts/block_tree.h"

namespace openspec {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kLanes = 32;

/// Nodes that may come next; each node that is taken brings one more at most.
struct Candidates {
  float score[kMaxBlockTreeNodes + 1];
  float above[kMaxBlockTreeNodes + 1];  // the parent's score
  int16_t parent[kMaxBlockTreeNodes + 1];
  int16_t depth[kMaxBlockTreeNodes + 1];
  int16_t before[kMaxBlockTreeNodes + 1];  // the parent's place among the tokens of its position
  int16_t rank[kMaxBlockTreeNodes + 1];    // among its siblings
  int16_t token[kMaxBlockTreeNodes + 1];   // its own place among the tokens of its position
  int16_t made[kMaxBlockTreeNodes + 1];    // when it came up
};

/// Rises with the value; no score is -0.
__device__ unsigned order_of(float value) {
  const unsigned bits = __float_as_uint(value);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

/// A warp for each tree.
__global__ void __launch_bounds__(kLanes) block_trees_kernel(BlockTreesParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  __shared__ Candidates candidates;
  const int seq = blockIdx.x, lane = threadIdx.x;
  const int num_depths = params.num_depths[seq];
  const int most = min(params.num_wanted[seq], params.max_drafts);
  const int64_t first = int64_t{params.first_sample[seq]} * params.top_k;
  const int64_t to = int64_t{seq} * params.max_drafts;
  const bool has_pairs = params.pair_scores != nullptr;
  int num_candidates = 0, num_made = 0, count = 0;

  // All lanes decide alike; the first one writes.
  const auto add = [&](int at, float above, int parent, int depth, int before, int rank) {
    if (depth >= num_depths || rank == params.top_k) return false;
    const int64_t row = first + int64_t{depth} * params.top_k;
    const int64_t pair = (row + before) * params.top_k + rank;
    const float own = has_pairs ? params.pair_scores[pair] : params.scores[row + rank];
    const int token = has_pairs ? params.pair_ranks[pair] : rank;
    if (own == -INFINITY) return false;
    if (lane == 0) {
      candidates.score[at] = above + own;
      candidates.above[at] = above;
      candidates.parent[at] = static_cast<int16_t>(parent);
      candidates.depth[at] = static_cast<int16_t>(depth);
      candidates.before[at] = static_cast<int16_t>(before);
      candidates.rank[at] = static_cast<int16_t>(rank);
      candidates.token[at] = static_cast<int16_t>(token);
      candidates.made[at] = static_cast<int16_t>(num_made);
    }
    ++num_made;
    return true;
  };
  num_candidates = add(0, 0.0f, -1, 0, 0, 0) ? 1 : 0;
  for (; count < most && num_candidates > 0; ++count) {
    __syncwarp();
    unsigned best = 0;
    for (int i = lane; i < num_candidates; i += kLanes) {
      best = max(best, order_of(candidates.score[i]));
    }
    best = __reduce_max_sync(kAllLanes, best);
    // Of equal ones the first that came up: its time above, its place below.
    unsigned found = ~0u;
    for (int i = lane; i < num_candidates; i += kLanes) {
      if (order_of(candidates.score[i]) == best) {
        found = min(found, static_cast<unsigned>(candidates.made[i]) << 16 | i);
      }
    }
    const int place = static_cast<int>(__reduce_min_sync(kAllLanes, found) & 0xffffu);
    const float score = candidates.score[place], above = candidates.above[place];
    const int parent = candidates.parent[place], depth = candidates.depth[place];
    const int before = candidates.before[place], rank = candidates.rank[place];
    const int token = candidates.token[place];
    __syncwarp();
    if (lane == 0) {
      params.drafts[to + count] = params.tokens[first + int64_t{depth} * params.top_k + token];
      params.parents[to + count] = parent;
      params.path_scores[to + count] = score;
    }
    // The sibling takes the node's place, the child one at the end; or what is at the end fills it.
    const bool has_sibling = add(place, above, parent, depth, before, rank + 1);
    const bool has_child =
        add(has_sibling ? num_candidates : place, score, count, depth + 1, token, 0);
    num_candidates += (has_sibling ? 1 : 0) + (has_child ? 1 : 0) - 1;
    if (!has_sibling && !has_child && place < num_candidates && lane == 0) {
      candidates.score[place] = candidates.score[num_candidates];
      candidates.above[place] = candidates.above[num_candidates];
      candidates.parent[place] = candidates.parent[num_candidates];
      candidates.depth[place] = candidates.depth[num_candidates];
      candidates.before[place] = candidates.before[num_candidates];
      candidates.rank[place] = candidates.rank[num_candidates];
      candidates.token[place] = candidates.token[num_candidates];
      candidates.made[place] = candidates.made[num_candidates];
    }
  }
  if (lane == 0) params.num_drafts[seq] = count;
}

}  // namespace

int block_trees_cuda(const BlockTreesParams& params, void* stream) {
  if (params.max_drafts > kMaxBlockTreeNodes) return cudaErrorInvalidValue;
  if (params.num_seqs == 0) return cudaSuccess;
  return cuda::launch(block_trees_kernel, dim3(params.num_seqs), dim3(kLanes), 0, stream, params);
}

}  // namespace openspec
