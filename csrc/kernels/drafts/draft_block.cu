#include <cuda_runtime.h>

#include "kernels/common/block_sum.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/drafts/draft_block.h"
#include "kernels/drafts/draft_rows.h"
#include "kernels/steps/step_rows.h"

namespace openspec {
namespace {

constexpr int kThreads = kMaxStepSpans;  // a thread of the one block for each sequence
static_assert(kThreads == 1024, "as block_exclusive_sum has it");

/// Rows of a sequence's block.
__device__ int num_block_rows(const BlockRowsParams& params, int num_drafts) {
  return num_drafts > 0 ? num_drafts + params.first_draft_row : 0;
}

/// See common_depth in draft_block_cpu.cpp; every thread of the block calls it.
__device__ int common_depth(const BlockRowsParams& params, int num_wanted, int* warp_sums) {
  int low = 0, high = params.max_depth;
  while (low < high) {
    const int depth = (low + high + 1) / 2;
    int num_rows;
    cuda::block_exclusive_sum(num_block_rows(params, min(num_wanted, depth)), warp_sums, &num_rows);
    if (num_rows <= params.out.num_rows) {
      low = depth;
    } else {
      high = depth - 1;
    }
  }
  return low;
}

/// A sequence that gets a block.
struct Block {
  int slot, position, first_sample;
};

/// A thread for each sequence, then one for each row.
__global__ void __launch_bounds__(kThreads) block_rows_kernel(BlockRowsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  __shared__ int warp_sums[kThreads / 32];
  __shared__ int begin_of[kThreads + 1];  // by span
  __shared__ Block blocks[kThreads];
  const TableView& table = params.table;
  const DraftRows& out = params.out;
  const int i = threadIdx.x;
  const int num_wanted = i < params.num_seqs ? params.num_wanted[i] : 0;
  const int slot = i < params.num_seqs ? params.seq[i] : 0;
  const int position = table.num_tokens[slot] - 1;

  int count = min(num_wanted, max(params.max_depth, 1));
  int num_rows;
  int first = cuda::block_exclusive_sum(num_block_rows(params, count), warp_sums, &num_rows);
  if (num_rows > out.num_rows) {
    count = min(num_wanted, max(common_depth(params, num_wanted, warp_sums), 1));
    first = cuda::block_exclusive_sum(num_block_rows(params, count), warp_sums, &num_rows);
    if (num_rows > out.num_rows) {  // not even blocks of one draft: the first ones
      if (first + num_block_rows(params, count) > out.num_rows) count = 0;
      first = cuda::block_exclusive_sum(num_block_rows(params, count), warp_sums, &num_rows);
    }
  }
  int num_spans;
  const int span = cuda::block_exclusive_sum(count > 0 ? 1 : 0, warp_sums, &num_spans);
  const int first_sample = first - span * params.first_draft_row;
  const int num_samples = num_rows - num_spans * params.first_draft_row;
  if (i < params.num_seqs) {
    params.num_drafts[i] = count;
    params.first_sample[i] = first_sample;
  }
  if (count > 0) {
    begin_of[span] = first;
    blocks[span] = {slot, position, first_sample};
    out.set_span(span, first, position, slot);
  }
  if (i == 0) begin_of[num_spans] = num_rows;
  __syncthreads();

  for (int row = i; row < num_rows; row += kThreads) {
    int of = 0;
    for (int width = kThreads / 2; width > 0; width /= 2) {
      if (of + width < num_spans && begin_of[of + width] <= row) of += width;
    }
    const Block block = blocks[of];
    const int k = row - begin_of[of];
    const int64_t kv_slot = kv_slot_of(table, block.slot, block.position + k, params.page_size);
    out.row_token[row] = k == 0 ? table.tokens[block.slot * table.tokens_stride + block.position]
                                : params.mask_token;
    out.row_position[row] = block.position + k;
    out.row_span[row] = of;
    out.source[row] = k > 0 && params.mask_source >= 0 ? params.mask_source : block.slot;
    out.row_parent[row] = k == 0 ? -1 : row - 1;
    out.row_kv_slot[row] = kv_slot;
    if (row + params.first_draft_row < begin_of[of + 1]) {  // there is a draft for each but these
      params.head_row[block.first_sample + k] = row + params.first_draft_row;
      params.sample_row[block.first_sample + k] = row;
    }
  }
  pad_spans(out, num_rows, num_spans, i, kThreads);
  pad_rows(out, num_rows, i, kThreads);
  for (int s = num_samples + i; s < params.num_samples; s += kThreads) {
    params.head_row[s] = params.sample_row[s] = -1;
  }
}

__global__ void __launch_bounds__(kThreads) store_blocks_kernel(StoreBlocksParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int i = threadIdx.x;
  if (i >= params.num_seqs) return;
  const int first = params.first_sample[i], count = params.num_drafts[i];
  const int64_t to = int64_t{i} * params.max_drafts;
  float score = 0.0f;
  for (int d = 0; d < count; ++d) {
    params.drafts[to + d] = params.chosen[first + d];
    if (params.confidence == nullptr) continue;
    const float x = params.confidence[first + d];
    score += fminf(x, 0.0f) - log1pf(expf(-fabsf(x)));
    params.scores[to + d] = score;
  }
}

constexpr int kConfidenceWarps = 8;

/// The lane's part of a product; both begin at multiples of 16 bytes.
__device__ float dot(const uint16_t* values, const float* weight, int count) {
  constexpr int kAtOnce = 8;
  float sum = 0.0f;
#pragma unroll 4
  for (int k = threadIdx.x % 32 * kAtOnce; k < count; k += 32 * kAtOnce) {
    const auto x = cuda::to_floats(cuda::load_pack<cuda::Bf16Pack<kAtOnce>>(values + k));
    const auto w = cuda::load_pack<cuda::FloatPack<kAtOnce>>(weight + k);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum = fmaf(x.x[i], w.x[i], sum);
  }
  return sum;
}

/// A warp for each draft of a sequence; sequences along blockIdx.x.
__global__ void __launch_bounds__(32 * kConfidenceWarps)
    block_confidence_kernel(BlockConfidenceParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int i = blockIdx.x;
  const int first = params.first_sample[i], count = params.num_drafts[i];
  for (int d = blockIdx.y * kConfidenceWarps + threadIdx.x / 32; d < count;
       d += gridDim.y * kConfidenceWarps) {
    const auto* output =
        static_cast<const uint16_t*>(params.outputs) + int64_t{first + d} * params.width;
    float sum = dot(output, params.weight, params.width);
    if (params.states != nullptr) {
      const int32_t before =
          d > 0 ? params.chosen[first + d - 1] : last_token(params.table, params.seq[i]);
      const auto* state =
          static_cast<const uint16_t*>(params.states) + int64_t{before} * params.state_width;
      sum += dot(state, params.weight + params.width, params.state_width);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    if (threadIdx.x % 32 == 0) params.confidence[first + d] = sum + *params.bias;
  }
}

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kLanes = 32;

/// A node that may come next.
struct Candidate {
  float score;
  float above;  // the parent's score
  int16_t parent, depth;
  int16_t before;  // the parent's place among the tokens of its position
  int16_t rank;    // among its siblings
  int16_t token;   // its own place among the tokens of its position
  int16_t made;    // when it came up
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
  // Each node that is taken brings one more at most.
  __shared__ Candidate candidates[kMaxBlockTreeNodes + 1];
  const int seq = blockIdx.x, lane = threadIdx.x;
  const int num_depths = params.num_depths[seq];
  const int most = min(params.num_wanted[seq], params.max_drafts);
  const int64_t first = int64_t{params.first_sample[seq]} * params.top_k;
  const int64_t to = int64_t{seq} * params.max_drafts;
  const bool has_pairs = params.pair_scores != nullptr;
  const int num_children = params.num_children > 0 ? params.num_children : params.top_k;
  int num_candidates = 0, num_made = 0, count = 0;

  // All lanes decide alike; the first one writes.
  const auto add = [&](int at, float above, int parent, int depth, int before, int rank) {
    if (depth >= num_depths || rank == num_children) return false;
    const int64_t row = first + int64_t{depth} * params.top_k;
    const int64_t pair = (row + before) * params.top_k + rank;
    const float own = has_pairs ? params.pair_scores[pair] : params.scores[row + rank];
    const int token = has_pairs ? params.pair_ranks[pair] : rank;
    if (own == -INFINITY) return false;
    if (lane == 0) {
      const auto narrow = [](int x) { return static_cast<int16_t>(x); };
      candidates[at] = {above + own,    above,        narrow(parent), narrow(depth),
                        narrow(before), narrow(rank), narrow(token),  narrow(num_made)};
    }
    ++num_made;
    return true;
  };
  num_candidates = add(0, 0.0f, -1, 0, 0, 0) ? 1 : 0;
  for (; count < most && num_candidates > 0; ++count) {
    __syncwarp();
    unsigned best = 0;
    for (int i = lane; i < num_candidates; i += kLanes) {
      best = max(best, order_of(candidates[i].score));
    }
    best = __reduce_max_sync(kAllLanes, best);
    // Of equal ones the first that came up: its time above, its place below.
    unsigned found = ~0u;
    for (int i = lane; i < num_candidates; i += kLanes) {
      if (order_of(candidates[i].score) == best) {
        found = min(found, static_cast<unsigned>(candidates[i].made) << 16 | i);
      }
    }
    const int place = static_cast<int>(__reduce_min_sync(kAllLanes, found) & 0xffffu);
    const Candidate node = candidates[place];
    __syncwarp();
    if (lane == 0) {
      params.drafts[to + count] =
          params.tokens[first + int64_t{node.depth} * params.top_k + node.token];
      params.parents[to + count] = node.parent;
      params.path_scores[to + count] = node.score;
    }
    // The sibling takes the node's place, the child one at the end; or what is at the end fills it.
    const bool has_sibling =
        add(place, node.above, node.parent, node.depth, node.before, node.rank + 1);
    const bool has_child =
        add(has_sibling ? num_candidates : place, node.score, count, node.depth + 1, node.token, 0);
    num_candidates += (has_sibling ? 1 : 0) + (has_child ? 1 : 0) - 1;
    if (!has_sibling && !has_child && place < num_candidates && lane == 0) {
      candidates[place] = candidates[num_candidates];
    }
  }
  if (lane == 0) params.num_drafts[seq] = count;
}

}  // namespace

int block_rows_cuda(const BlockRowsParams& params, void* stream) {
  if (params.num_seqs > kThreads) return cudaErrorInvalidValue;
  return cuda::launch(block_rows_kernel, dim3(1), dim3(kThreads), 0, stream, params);
}

int store_blocks_cuda(const StoreBlocksParams& params, void* stream) {
  if (params.num_seqs > kThreads) return cudaErrorInvalidValue;
  return cuda::launch(store_blocks_kernel, dim3(1), dim3(kThreads), 0, stream, params);
}

int block_confidence_cuda(const BlockConfidenceParams& params, void* stream) {
  constexpr int kMostAtOnce = 16;  // drafts of a sequence
  if (params.dtype != DType::kBF16 || params.width % 8 != 0 || params.state_width % 8 != 0 ||
      !cuda::are_aligned(params.outputs, params.states, params.weight)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_seqs == 0) return cudaSuccess;
  const dim3 grid(params.num_seqs, kMostAtOnce / kConfidenceWarps);
  return cuda::launch(block_confidence_kernel, grid, 32 * kConfidenceWarps, 0, stream, params);
}

int block_trees_cuda(const BlockTreesParams& params, void* stream) {
  if (params.max_drafts > kMaxBlockTreeNodes) return cudaErrorInvalidValue;
  if (params.num_seqs == 0) return cudaSuccess;
  return cuda::launch(block_trees_kernel, params.num_seqs, kLanes, 0, stream, params);
}

}  // namespace openspec
