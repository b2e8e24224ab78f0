#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/launch.cuh"
#include "kernels/packs.cuh"
#include "kernels/span_attention.h"
#include "kernels/span_attention_lean.cuh"
#include "kernels/span_attention_lean_plan.cuh"
#include "kernels/span_attention_plan.cuh"
#include "kernels/span_attention_split.cuh"
#include "kernels/span_attention_tails.cuh"
#include "kernels/span_attention_tile.cuh"
#include "kernels/span_attention_wgmma.h"

namespace openspec {
namespace {

using namespace span_attention;

/// Starts copying an item to shared memory.
__device__ __forceinline__ void fetch(WorkItem& to, const WorkItem* from) {
  constexpr int kChunks = sizeof(WorkItem) / 16;
  const int chunk = threadIdx.x;
  if (chunk < kChunks) {
    copy_async(shared_address(&to) + chunk * 16, reinterpret_cast<const uint4*>(from) + chunk,
               true);
  }
  commit_copies();
}
__device__ __forceinline__ void wait_for_fetch() {
  wait_for_copies<0>();
  __syncthreads();
}

/// Hands item indices to a CTA: its own first, then tickets.
class ItemQueue {
 public:
  __device__ ItemQueue(Tickets& tickets, int num_items)
      : tickets_(tickets),
        num_items_(num_items),
        has_tickets_(num_items > static_cast<int>(gridDim.x)) {}

  /// Draws the item after the present one; the answer is on its way while that is computed.
  __device__ void prefetch() {
    if (has_tickets_ && threadIdx.x == 0) ticket_ = atomicAdd(&tickets_.next, 1);
  }
  /// The next item, num_items if there is none. A barrier for the CTA.
  __device__ int next(int* shared) {
    if (!has_tickets_) return num_items_;
    __syncthreads();
    if (threadIdx.x == 0) *shared = static_cast<int>(gridDim.x) + ticket_;
    __syncthreads();
    return *shared;
  }
  __device__ void close() {
    if (!has_tickets_ || threadIdx.x != 0) return;
    if (atomicAdd(&tickets_.num_done, 1) != static_cast<int>(gridDim.x) - 1) return;
    tickets_.next = 0;
    tickets_.num_done = 0;
  }

 private:
  Tickets& tickets_;
  int num_items_;
  bool has_tickets_;
  int ticket_ = 0;
};

/// A range of a tile's pairs.
struct PairRange {
  int begin, end;
};

/// Counts an item of a split tile as done. Returns what the CTA is to merge of the tile: its share,
/// once all items are done, where their CTAs run at the same time; else everything, for the last
/// one.
__device__ PairRange arrive(const AttentionArgs& args, const WorkItem& item, int kv_head,
                            bool merges_together, int* shared) {
  const int counter = item.tile_index * args.num_kv_heads + kv_head;
  int32_t* num_arrived = args.workspace.num_arrived + counter;
  const int num_pairs = item.tile_rows * args.group, num_arrivals = item.num_arrivals;
  __syncthreads();
  if (threadIdx.x == 0) {
    const int num_before = add_and_order(num_arrived);
    *shared = num_before;
    if (merges_together) {
      // Seconds: a fault in the plan must not hang the device.
      for (int tries = 1 << 24; load_and_order(num_arrived) < num_arrivals; --tries) {
        if (tries == 0) __trap();
        __nanosleep(20);
      }
      int32_t* num_merged = args.workspace.num_merged + counter;
      if (atomicAdd(num_merged, 1) == num_arrivals - 1) {
        *num_arrived = 0;
        *num_merged = 0;
      }
    } else if (num_before == num_arrivals - 1) {
      *num_arrived = 0;
    }
  }
  __syncthreads();
  if (merges_together) {
    return {item.arrival * num_pairs / num_arrivals, (item.arrival + 1) * num_pairs / num_arrivals};
  }
  return {0, *shared == num_arrivals - 1 ? num_pairs : 0};
}

/// Tiles of up to 16 kTiles pairs over ranges of blocks: few rows, or trees.
template <int kTiles>
__global__ void __launch_bounds__(kSplitThreads, SplitLayout<kTiles>::kMostCtasPerSm)
    split_kernel(const __grid_constant__ AttentionArgs args) {
  cuda::allow_next_kernel();
  extern __shared__ __align__(256) unsigned char shared[];
  __shared__ WorkItem item;
  __shared__ int message;
  int index = blockIdx.x;
  const WorkItem* first =
      args.workspace.items + min(index / args.num_kv_heads, args.workspace.max_items - 1);
  float4* scratch =
      args.workspace.scratch + static_cast<int64_t>(blockIdx.x) * kSplitScratch * kSplitThreads;
  WorkHeader& header = *args.workspace.header;
  cuda::wait_for_previous_kernel();

  fetch(item, first);  // while the header is on its way
  const int num_items = header.num_items * args.num_kv_heads;
  const bool merges_together = header.merges_together != 0;
  wait_for_fetch();
  if (index >= num_items) return;
  ItemQueue queue(header.tickets, num_items);
  for (;;) {
    queue.prefetch();
    const int kv_head = index % args.num_kv_heads;
    if (item.is_tile_tail) {
      attend_tails<kTiles>(args, item, kv_head, shared);
    } else if (item.block_begin < item.block_end) {
      attend_split<kTiles>(args, item, kv_head, shared, scratch);
    }
    if (item.num_slots > 0) {
      const PairRange pairs = arrive(args, item, kv_head, merges_together, &message);
      for (int pair = pairs.begin + threadIdx.x / 32; pair < pairs.end; pair += kSplitWarps) {
        merge_pair(args, item, kv_head, pair);
      }
    }
    index = queue.next(&message);
    if (index >= num_items) break;
    fetch(item, args.workspace.items + index / args.num_kv_heads);
    wait_for_fetch();
  }
  queue.close();
}

/// Tiles of 128 pairs over all their blocks: the rows of a long chain.
__global__ void __launch_bounds__(kThreads, kWideCtasPerSm)
    wide_kernel(const __grid_constant__ AttentionArgs args) {
  cuda::allow_next_kernel();
  extern __shared__ __align__(256) unsigned char shared[];
  __shared__ WorkItem item;
  __shared__ int message;
  cuda::wait_for_previous_kernel();

  WorkHeader& header = *args.workspace.header;
  const int num_items = header.num_wide_items * args.num_kv_heads;
  float4* scratch =
      args.workspace.scratch + static_cast<int64_t>(blockIdx.x) * kWideScratch * kThreads;
  ItemQueue queue(header.wide_tickets, num_items);
  for (int index = blockIdx.x; index < num_items; index = queue.next(&message)) {
    queue.prefetch();
    fetch(item, args.workspace.wide_items + index / args.num_kv_heads);
    wait_for_fetch();
    attend_wide(args, item, index % args.num_kv_heads, shared, scratch);
  }
  queue.close();
}

Workspace workspace_of(const SpanAttentionParams& params) {
  Workspace workspace;
  lay_out({params.rows.num_rows, params.rows.num_spans, params.num_q_heads, params.max_tokens,
           cuda::num_sms()},
          params.workspace, workspace);
  return workspace;
}

bool is_supported(const SpanAttentionParams& params) {
  const int num_kv_heads = params.kv.num_kv_heads;
  return params.dtype == DType::kBF16 && params.kv.head_dim == kHeadDim && num_kv_heads > 0 &&
         params.num_q_heads % num_kv_heads == 0 && params.num_q_heads / num_kv_heads <= kMaxGroup &&
         params.kv.page_size > 0 && params.kv.page_size % kLineRows == 0 &&
         params.rows.num_spans <= kMaxSpans &&
         cuda::are_aligned(params.q, params.out, params.kv.data, params.workspace);
}

int log2_of(int value) {
  if ((value & (value - 1)) != 0) return -1;
  int log2 = 0;
  while ((1 << log2) < value) ++log2;
  return log2;
}

/// How split tiles are computed.
struct SplitKernel {
  void (*kernel)(AttentionArgs);
  int num_tiles;  // of 16 pairs
  int ctas_per_sm;
  int shared_bytes, tree_shared_bytes;  // for chains, and for any spans
  bool is_available;                    // false: the device lacks shared memory

  template <int kTiles>
  static SplitKernel of(int ctas_per_sm) {
    int device = 0, most_bytes = 0, sm_bytes = 0, fit = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    // Of two CTAs that fit on an SM together some would meet while other SMs have none. So where
    // one is meant to be alone it takes more than half of what an SM has.
    const int least_bytes = ctas_per_sm == 1 ? sm_bytes / 2 + 1024 : 0;
    const int bytes = std::max(SplitLayout<kTiles>::kUsedBytes, least_bytes);
    const int tree_bytes = std::max(bytes, TailLayout<kTiles>::kBytes);
    SplitKernel split = {split_kernel<kTiles>, kTiles, ctas_per_sm, bytes, tree_bytes, false};
    split.is_available = most_bytes >= tree_bytes &&
                         cuda::allow_shared_bytes(split.kernel, tree_bytes) == cudaSuccess &&
                         cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                             &fit, split.kernel, kSplitThreads, tree_bytes) == cudaSuccess &&
                         fit >= ctas_per_sm;
    return split;
  }
  int num_ctas() const { return ctas_per_sm * cuda::num_sms(); }
};

/// The first that the device has of those that suit the step: tiles by what a span has room for on
/// average, CTAs alone on their SMs unless there are more KV heads of spans than SMs.
const SplitKernel* split_kernel_of(const SpanAttentionParams& params) {
  // Of the same kernel the one with more shared memory last: its limit stays.
  static const SplitKernel kernels[] = {SplitKernel::of<4>(1), SplitKernel::of<2>(2),
                                        SplitKernel::of<2>(1), SplitKernel::of<1>(2),
                                        SplitKernel::of<1>(1)};
  const int num_spans = std::max(params.rows.num_spans, 1);
  const int group = params.num_q_heads / params.kv.num_kv_heads;
  int num_pairs = ceil_div(params.rows.num_rows, num_spans) * group;
  // Rows of small trees are shared out over the SMs: their tails take time.
  if (params.may_have_trees && params.rows.num_rows * group <= kMaxTreePairsForSmallTiles) {
    num_pairs /= 4;
  }
  const int most_ctas_per_sm = num_spans * params.kv.num_kv_heads <= cuda::num_sms() ? 1 : 2;
  const SplitKernel* smallest = nullptr;
  for (const SplitKernel& kernel : kernels) {
    if (!kernel.is_available) continue;
    smallest = &kernel;
    const bool is_large = kernel.num_tiles > 1 && num_pairs <= kernel.num_tiles * 8;
    if (!is_large && kernel.ctas_per_sm <= most_ctas_per_sm) return &kernel;
  }
  return smallest;
}

bool has_wide(const SpanAttentionParams& params) {
  return params.rows.num_rows >= (has_wgmma() ? kMinRowsForWgmma : kMinRowsForWide);
}

cudaLaunchAttribute cluster_attribute() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = kLeanCtas;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  return attribute;
}

/// How many lean clusters fit at once with so much shared memory per CTA; 0: the device has no
/// clusters, or not as much.
int num_lean_clusters(int shared_bytes) {
  if (!cuda::overlaps_kernels() ||
      cuda::allow_shared_bytes(lean_kernel, kLeanApartBytes) != cudaSuccess) {
    return 0;
  }
  cudaLaunchAttribute cluster = cluster_attribute();
  cudaLaunchConfig_t config = {};
  config.gridDim = kLeanCtas;
  config.blockDim = kLeanThreads;
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, lean_kernel, &config) != cudaSuccess) return 0;
  return count;
}

/// Lean CTAs on as many SMs as may be.
struct LeanLaunch {
  int shared_bytes, num_clusters;
};
LeanLaunch lean_launch_of(const SpanAttentionParams& params) {
  static const LeanLaunch apart = {kLeanApartBytes, num_lean_clusters(kLeanApartBytes)};
  static const LeanLaunch close = {kLeanSharedBytes, num_lean_clusters(kLeanSharedBytes)};
  return params.rows.num_rows * params.kv.num_kv_heads <= apart.num_clusters ? apart : close;
}

/// Whether the lean kernel alone attends to the step: known when a graph is captured.
bool is_lean(const SpanAttentionParams& params, const Workspace& workspace) {
  const int64_t num_segments = ceil_div(params.max_tokens, kSegmentBlocks * kBlockTokens);
  const bool is_short = params.rows.num_spans <= kFewSpans && params.rows.expected_kv_len > 0 &&
                        params.rows.expected_kv_len <= kShortKvLen;
  return !params.may_have_trees &&
         params.rows.num_rows <= (is_short ? kMaxLeanRows : kMaxLeanBatchRows) &&
         params.rows.num_rows * params.num_q_heads * num_segments <= workspace.num_pair_slots &&
         lean_launch_of(params).num_clusters > 0;
}

int launch_lean(const SpanAttentionParams& params, const Workspace& workspace, void* stream) {
  LeanArgs args;
  args.q = static_cast<const __nv_bfloat16*>(params.q);
  args.out = static_cast<__nv_bfloat16*>(params.out);
  args.kv = static_cast<const char*>(params.kv.data);
  args.num_q_heads = params.num_q_heads;
  args.num_kv_heads = params.kv.num_kv_heads;
  args.group = params.num_q_heads / params.kv.num_kv_heads;
  args.group_reciprocal = (1u << 16) / args.group + 1;
  args.num_kv_heads_reciprocal = (1u << 31) / args.num_kv_heads + 1;
  args.page_size = params.kv.page_size;
  args.scale = params.scale * static_cast<float>(M_LOG2E);
  args.first_token = params.first_token;
  args.header = workspace.header;
  args.items = workspace.lean_items;
  args.num_arrived = workspace.lean_arrived;
  args.partial_stats = workspace.partial_stats;
  args.partial_sums = workspace.partial_sums;
  const LeanLaunch lean = lean_launch_of(params);
  cudaLaunchAttribute attributes[2] = {cluster_attribute(), {}};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  // No more than fit at once: those left over would come last, with their full share of the work.
  config.gridDim =
      kLeanCtas * std::min(lean.num_clusters, workspace.max_lean_items * params.kv.num_kv_heads);
  config.blockDim = kLeanThreads;
  config.dynamicSmemBytes = lean.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, lean_kernel, args);
}

}  // namespace

size_t span_attention_workspace_bytes_cuda(int max_num_rows, int max_num_spans, int num_q_heads,
                                           int /*head_dim*/, int max_tokens) {
  Workspace workspace;
  return lay_out({max_num_rows, max_num_spans, num_q_heads, max_tokens, cuda::num_sms()}, nullptr,
                 workspace);
}

int span_attention_plan_cuda(const SpanAttentionParams& params, void* stream) {
  if (!is_supported(params)) return cudaErrorInvalidValue;
  PlanArgs args;
  args.rows = params.rows;
  args.pages = params.page_table.pages;
  args.max_pages_per_seq = params.page_table.max_pages_per_seq;
  args.page_size = params.kv.page_size;
  args.num_kv_heads = params.kv.num_kv_heads;
  args.group = params.num_q_heads / params.kv.num_kv_heads;
  const SplitKernel* split = split_kernel_of(params);
  if (split == nullptr) return cudaErrorInvalidConfiguration;
  args.num_split_ctas = split->num_ctas();
  args.num_sms = cuda::num_sms();
  args.tile_pairs = kMinTilePairs * split->num_tiles;
  args.has_wide = has_wide(params);
  args.has_wgmma = has_wgmma();
  args.is_causal = params.is_causal;
  args.workspace = workspace_of(params);
  const size_t shared_bytes = (params.rows.num_spans + 1) * SpanTable::kArrays * sizeof(int);
  if (is_lean(params, args.workspace)) {
    return cuda::launch(lean_plan_kernel, 1, kPlanThreads, shared_bytes, stream, args);
  }
  return cuda::launch(plan_kernel, 1, kPlanThreads, shared_bytes, stream, args);
}

int span_attention_cuda(const SpanAttentionParams& params, void* stream) {
  if (!is_supported(params)) return cudaErrorInvalidValue;
  const Workspace workspace = workspace_of(params);
  if (is_lean(params, workspace)) return launch_lean(params, workspace, stream);
  const SplitKernel* split = split_kernel_of(params);
  if (split == nullptr) return cudaErrorInvalidConfiguration;
  static const int wide_status = cuda::allow_shared_bytes(wide_kernel, kWideSharedBytes);
  if (wide_status != cudaSuccess) return wide_status;
  AttentionArgs args;
  args.q = static_cast<const __nv_bfloat16*>(params.q);
  args.out = static_cast<__nv_bfloat16*>(params.out);
  args.kv = static_cast<const char*>(params.kv.data);
  args.pages = params.page_table.pages;
  args.max_pages_per_seq = params.page_table.max_pages_per_seq;
  args.num_q_heads = params.num_q_heads;
  args.num_kv_heads = params.kv.num_kv_heads;
  args.group = params.num_q_heads / params.kv.num_kv_heads;
  args.group_reciprocal = (1u << 16) / args.group + 1;
  args.page_size = params.kv.page_size;
  args.page_shift = log2_of(params.kv.page_size);
  args.page_reciprocal = static_cast<uint32_t>((uint64_t{1} << 34) / params.kv.page_size) + 1;
  args.scale = params.scale * static_cast<float>(M_LOG2E);
  args.first_token = params.first_token;
  args.workspace = workspace;
  const int split_bytes = params.may_have_trees ? split->tree_shared_bytes : split->shared_bytes;
  const int status =
      cuda::launch(split->kernel, split->num_ctas(), kSplitThreads, split_bytes, stream, args);
  if (status != cudaSuccess || !has_wide(params)) return status;
  if (has_wgmma()) return launch_wgmma(args, stream);
  return cuda::launch(wide_kernel, cuda::num_sms() * kWideCtasPerSm, kThreads, kWideSharedBytes,
                      stream, args);
}

}  // namespace openspec
