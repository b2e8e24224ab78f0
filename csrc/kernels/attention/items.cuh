#pragma once

/// The kernels that walk a step's work items: one for each kind of tile.

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/attention/decode_cta.cuh"
#include "kernels/attention/decode_warp.cuh"
#include "kernels/attention/math.cuh"
#include "kernels/attention/prefill_mma.cuh"
#include "kernels/attention/sums.cuh"
#include "kernels/attention/tree_tail.cuh"
#include "kernels/attention/work.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"

namespace openspec::span_attention {

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

/// Hands item indices to a CTA: its own first, `num_own` of them, then tickets.
class ItemQueue {
 public:
  __device__ ItemQueue(Tickets& tickets, int num_items, int num_own = 1)
      : tickets_(tickets),
        num_items_(num_items),
        first_ticket_(num_own * static_cast<int>(gridDim.x)),
        has_tickets_(num_items > first_ticket_) {}

  /// Draws the item after the present one; the answer is on its way while that is computed.
  __device__ void prefetch() {
    if (has_tickets_ && threadIdx.x == 0) ticket_ = atomicAdd(&tickets_.next, 1);
  }
  /// The next item, num_items if there is none. A barrier for the CTA.
  __device__ int next(int* shared) {
    if (!has_tickets_) return num_items_;
    __syncthreads();
    if (threadIdx.x == 0) *shared = first_ticket_ + ticket_;
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
  int num_items_, first_ticket_;
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
  if (item.num_arrivals == 1) {
    __syncthreads();
    return {0, item.tile_rows * args.group};
  }
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

/// Goes from an item's blocks to the tail behind them. A barrier for the CTA.
__device__ __forceinline__ void go_to_tail(WorkItem& item) {
  __syncthreads();
  if (threadIdx.x == 0) {
    item.end = item.tail_end;
    item.block_begin = item.num_shared_blocks;
    item.block_end = ceil_div(item.end, kBlockTokens);
    item.first_slot = num_slots_of(item.num_shared_blocks, item.range_blocks);
  }
  __syncthreads();
}

__device__ __forceinline__ float4* scratch_of(const AttentionArgs& args) {
  return args.workspace.scratch + static_cast<int64_t>(blockIdx.x) * kSplitScratch * kSplitThreads;
}

/// Tiles of up to 16 kTiles pairs over ranges of blocks: many rows, or trees.
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
  WorkHeader& header = *args.workspace.header;
  bool is_early = args.is_early;
  if (!is_early) cuda::wait_for_previous_kernel();

  fetch(item, first);  // while the header is on its way
  const int num_items = header.num_items * args.num_kv_heads;
  const bool merges_together = header.merges_together != 0;
  wait_for_fetch();
  if (index >= num_items) {
    if (is_early) cuda::wait_for_previous_kernel();
    return;
  }
  ItemQueue queue(header.tickets, num_items);
  for (;;) {
    const int kv_head = index % args.num_kv_heads;
    const bool is_split = !item.is_tile_tail && item.block_begin < item.block_end;
    // Rows' tails read what the step writes before anything else.
    const bool waits_later = is_early && is_split && item.tail_row < 0;
    if (is_early && !waits_later) cuda::wait_for_previous_kernel();
    is_early = false;
    if (!waits_later) queue.prefetch();
    if (item.is_tile_tail) {
      attend_tails<kTiles>(args, item, kv_head, shared);
    } else if (is_split) {
      attend_split<kTiles>(args, item, kv_head, shared, scratch_of(args), waits_later);
    }
    if (waits_later) queue.prefetch();
    if (item.tail_end > 0) {
      go_to_tail(item);
      attend_tails<kTiles>(args, item, kv_head, shared);
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

/// Tiles of up to kMaxStreamTilePairs pairs over ranges of blocks: few rows of each span, no trees.
/// While a CTA is at one item, the next one's first blocks are on their way.
__global__ void __launch_bounds__(kStreamThreads, kSplitCtasPerSm)
    stream_kernel(const __grid_constant__ AttentionArgs args) {
  cuda::allow_next_kernel();
  extern __shared__ __align__(256) unsigned char shared[];
  __shared__ WorkItem item;
  __shared__ int message;
  constexpr int kChunks = sizeof(WorkItem) / 16;
  const int chunk = threadIdx.x, num_kv_heads = args.num_kv_heads;
  int index = blockIdx.x;
  const WorkItem* items = args.workspace.items;
  const WorkItem* first = items + min(index / num_kv_heads, args.workspace.max_items - 1);
  WorkHeader& header = *args.workspace.header;
  if (chunk < kChunks) cuda::fetch_to_cache(reinterpret_cast<const uint4*>(first) + chunk);
  if (chunk == kChunks) cuda::fetch_to_cache(&header);
  StreamCopier copier(args, shared);
  int* num_merged = reinterpret_cast<int*>(shared + StreamLayout::kNumMergedAt);
  const bool is_early = args.is_early;
  if (!is_early) cuda::wait_for_previous_kernel();

  // Exists, whether it is one of the step's or not.
  const StreamStart start(first, index % num_kv_heads, true);
  const int kv_len = __ldcg(&first->kv_len);
  const auto load_chunk = [&](const WorkItem* from) {
    return chunk < kChunks ? __ldcg(reinterpret_cast<const uint4*>(from) + chunk) : uint4{};
  };
  uint4 chunk_bits = load_chunk(first);
  const int num_items = header.num_items * num_kv_heads;
  const bool merges_together = header.merges_together != 0;
  if (index >= num_items) {
    if (is_early) cuda::wait_for_previous_kernel();
    return;
  }
  copier.go_to(start);
  // A block of which the step writes nothing need not wait.
  const bool is_past = (start.block + 1) * kBlockTokens <= kv_len;
  if (is_early && !is_past) cuda::wait_for_previous_kernel();
  copier.copy_keys();
  copier.copy_values();
  if (is_early && is_past) cuda::wait_for_previous_kernel();
  ItemQueue queue(header.tickets, num_items, 2);
  int next = index + gridDim.x;
  for (;;) {
    if (chunk < kChunks) reinterpret_cast<uint4*>(&item)[chunk] = chunk_bits;
    if (chunk == 0) *num_merged = 0;
    __syncthreads();
    queue.prefetch();
    const bool has_next = next < num_items;
    const int kv_head = index % num_kv_heads;
    const StreamStart next_start(items + next / num_kv_heads, next % num_kv_heads, has_next);
    if (has_next) chunk_bits = load_chunk(items + next / num_kv_heads);
    const auto attend = [&](auto num_tiles) {
      attend_stream<num_tiles.value>(args, item, kv_head, copier, next_start, shared,
                                     scratch_of(args));
    };
    switch (ceil_div(item.tile_rows * args.group, kStreamTilePairs)) {
      case 1:
        attend(std::integral_constant<int, 1>());
        break;
      case 2:
        attend(std::integral_constant<int, 2>());
        break;
      default:
        attend(std::integral_constant<int, 3>());
    }
    if (item.num_slots > 0) {
      const PairRange pairs = arrive(args, item, kv_head, merges_together, &message);
      for (int pair = pairs.begin + threadIdx.x / 32; pair < pairs.end; pair += kStreamWarps) {
        merge_pair(args, item, kv_head, pair);
      }
    }
    if (!has_next) break;
    index = next;
    next = queue.next(&message);
    __syncthreads();
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

}  // namespace openspec::span_attention
