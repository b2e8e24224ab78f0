#include <cuda_runtime.h>

#include "kernels/common/launch.cuh"
#include "kernels/drafts/draft_rows.h"
#include "kernels/drafts/draft_tree.h"

namespace openspec {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kAllLanes = 0xffffffffu;
// New nodes of a level.
constexpr int kMaxNew = kMaxTreeTopK * kMaxTreeTopK;
static_assert(kMaxNew <= kThreads, "a thread for each");

/// Trees of the sequences before this block's, and of all.
struct TreeCount {
  int before, total;
};

__device__ TreeCount count_trees(const int32_t* num_wanted, int num_seqs) {
  __shared__ int before, total;
  const int thread = threadIdx.x;
  if (thread == 0) before = total = 0;
  __syncthreads();
  int mine_before = 0, mine = 0;
  for (int i = thread; i < num_seqs; i += kThreads) {
    const int is_tree = num_wanted[i] > 0 ? 1 : 0;
    mine += is_tree;
    mine_before += i < static_cast<int>(blockIdx.x) ? is_tree : 0;
  }
  mine = __reduce_add_sync(kAllLanes, mine);
  mine_before = __reduce_add_sync(kAllLanes, mine_before);
  if (thread % 32 == 0 && mine > 0) {
    atomicAdd(&total, mine);
    atomicAdd(&before, mine_before);
  }
  __syncthreads();
  return {before, total};
}

/// How many of `count` nodes come before node `index`: better ones, and equal ones made earlier.
__device__ int rank_of(const float* scores, int count, int index) {
  const float score = scores[index];
  int rank = 0;
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    rank += scores[i] > score || (scores[i] == score && i < index) ? 1 : 0;
  }
  return rank;
}

/// A block for each sequence.
__global__ void __launch_bounds__(kThreads) grow_trees_kernel(GrowTreesParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  __shared__ float scores[kMaxNew];
  const TreeCount count = count_trees(params.num_wanted, params.num_seqs);
  const TreeShape shape = params.trees.shape;
  const int top_k = shape.top_k, level = params.level, thread = threadIdx.x;
  const DraftRows& out = params.out;
  const int num_rows = level * top_k;  // of a tree
  const bool has_rows = level < shape.depth;
  if (has_rows) {
    const int first = static_cast<int>(blockIdx.x) * kThreads + thread;
    const int stride = static_cast<int>(gridDim.x) * kThreads;
    pad_rows(out, count.total * num_rows, first, stride);
    pad_spans(out, count.total * num_rows, count.total, first, stride);
    for (int row = count.total * num_rows + first; row < out.num_rows; row += stride) {
      params.parent_row[row] = -1;
    }
    for (int i = count.total * top_k + first; i < params.num_seqs * top_k; i += stride) {
      params.frontier_row[i] = -1;
    }
  }
  if (params.num_wanted[blockIdx.x] <= 0) return;

  const int index = count.before;
  int32_t* token = params.trees.node_token + int64_t{index} * shape.num_nodes();
  int32_t* parent = params.trees.node_parent + int64_t{index} * shape.num_nodes();
  float* score = params.trees.node_score + int64_t{index} * shape.num_nodes();
  int32_t* row_node = params.trees.row_node + int64_t{index} * shape.num_rows();
  const int first_node = shape.first_node(level);
  const int num_new = level == 1 ? top_k : top_k * top_k;
  if (thread < num_new) {
    const int64_t from = int64_t{index} * num_new + thread;
    const int32_t above = level == 1 ? -1 : row_node[(level - 2) * top_k + thread / top_k];
    const float mine = (above < 0 ? 0.0f : score[above]) + params.scores[from];
    token[first_node + thread] = params.tokens[from];
    parent[first_node + thread] = above;
    score[first_node + thread] = mine;
    scores[thread] = mine;
  }
  if (!has_rows) return;
  __syncthreads();
  if (thread < num_new) {
    const int rank = rank_of(scores, num_new, thread);
    if (rank < top_k) row_node[num_rows - top_k + rank] = first_node + thread;
  }
  __syncthreads();

  const TableView& table = params.table;
  const int slot = params.seq[blockIdx.x];
  const int num_tokens = table.num_tokens[slot];
  const int first = index * num_rows, first_before = index * (num_rows - top_k);
  for (int i = thread; i < num_rows; i += kThreads) {
    const int row = first + i, row_level = i / top_k + 1, node = row_node[i];
    // Children stand in the order of the frontier that they are made of.
    const int above = row_level == 1
                          ? -1
                          : (row_level - 2) * top_k + (node - shape.first_node(row_level)) / top_k;
    out.row_token[row] = token[node];
    out.row_position[row] = num_tokens + row_level - 1;
    out.row_span[row] = index;
    out.row_parent[row] = above < 0 ? -1 : first + above;
    out.row_kv_slot[row] = kv_slot_of(table, slot, num_tokens + i, params.page_size);
    out.source[row] = above < 0 ? index : -1;
    params.parent_row[row] = above < 0 ? -1 : first_before + above;
  }
  if (thread == 0) {
    out.set_span(index, first, num_tokens, slot);
  }
  if (thread < top_k) {
    params.frontier_row[index * top_k + thread] = first + num_rows - top_k + thread;
  }
}

/// A block for each sequence; the scores of its tree and the nodes' ranks in shared memory.
__global__ void __launch_bounds__(kThreads) pick_drafts_kernel(PickDraftsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  extern __shared__ int table[];
  __shared__ int num_drafts;
  const TreeCount count = count_trees(params.num_wanted, params.num_seqs);
  const int seq = static_cast<int>(blockIdx.x), thread = threadIdx.x;
  const int wanted = params.num_wanted[seq];
  if (wanted <= 0) {
    if (thread == 0) params.num_drafts[seq] = 0;
    return;
  }
  const int num_nodes = params.trees.shape.num_nodes();
  const int most = min(min(wanted, params.max_drafts), num_nodes);
  const int64_t first_node = int64_t{count.before} * num_nodes;
  float* scores = reinterpret_cast<float*>(table);
  int* ranks = table + num_nodes;
  for (int i = thread; i < num_nodes; i += kThreads) {
    scores[i] = params.trees.node_score[first_node + i];
  }
  if (thread == 0) num_drafts = 0;
  __syncthreads();
  for (int i = thread; i < num_nodes; i += kThreads) ranks[i] = rank_of(scores, num_nodes, i);
  __syncthreads();
  for (int i = thread; i < num_nodes; i += kThreads) {
    const int rank = ranks[i];
    if (rank >= most || !(scores[i] > -INFINITY)) continue;
    const int64_t to = int64_t{seq} * params.max_drafts + rank;
    const int32_t above = params.trees.node_parent[first_node + i];
    params.drafts[to] = params.trees.node_token[first_node + i];
    params.parents[to] = above < 0 ? -1 : ranks[above];
    params.scores[to] = scores[i];
    atomicAdd(&num_drafts, 1);
  }
  __syncthreads();
  if (thread == 0) params.num_drafts[seq] = num_drafts;
}

}  // namespace

int grow_trees_cuda(const GrowTreesParams& params, void* stream) {
  if (params.trees.shape.top_k > kMaxTreeTopK) return cudaErrorInvalidValue;
  if (params.num_seqs == 0) return cudaSuccess;
  return cuda::launch(grow_trees_kernel, params.num_seqs, kThreads, 0, stream, params);
}

int pick_drafts_cuda(const PickDraftsParams& params, void* stream) {
  if (params.num_seqs == 0) return cudaSuccess;
  const size_t bytes = static_cast<size_t>(params.trees.shape.num_nodes()) * 2 * sizeof(int);
  return cuda::launch(pick_drafts_kernel, params.num_seqs, kThreads, bytes, stream, params);
}

}  // namespace openspec
