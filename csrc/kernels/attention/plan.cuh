#pragma once

/// The kernel that lists a step's work items from the lengths on the device.

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/cut.cuh"
#include "kernels/attention/work.cuh"
#include "kernels/common/launch.cuh"

namespace openspec::span_attention {

/// Sum of the values of the threads before this one; of all threads in `total`.
__device__ int sum_before(int value, int* warp_sums, int& total) {
  constexpr int kNumWarps = kPlanThreads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kNumWarps; ++i) {
    if (i == warp) before = total;
    total += warp_sums[i];
  }
  __syncthreads();
  return before + sum - value;
}

/// The span that entry `index` of a list belongs to.
__device__ int span_of(const int* begin, int num_spans, int index) {
  int low = 0, high = num_spans;  // begin[low] <= index < begin[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (begin[middle] <= index ? low : high) = middle;
  }
  return low;
}

__device__ __forceinline__ void set_lines(const PlanArgs& args, WorkItem& item) {
  const int32_t* pages = args.pages + static_cast<int64_t>(item.seq) * args.max_pages_per_seq;
#pragma unroll
  for (int i = 0; i < kStreamWarps * kBlockTokens / kLineRows; ++i) {
    // Behind the end: any line that exists.
    const int token =
        min(item.block_begin * kBlockTokens + i * kLineRows, (item.end - 1) & ~(kLineRows - 1));
    const int index = token / args.page_size;
    item.lines[i] =
        static_cast<uint32_t>(pages[index]) * (2u * args.num_kv_heads * args.page_size) +
        (token - index * args.page_size);
  }
}

__device__ void write_item(const PlanArgs& args, const SpanTable& spans, const Strategy& strategy,
                           int index) {
  const int span = span_of(spans.item, args.rows.num_spans, index);
  const int num_rows = spans.num_rows(span), flags = spans.flags[span];
  const SpanCut cut(strategy, num_rows, spans.kv_len[span], flags, args.group);
  const int in_span = index - spans.item[span], num_shared_items = cut.num_tiles * cut.num_ranges;
  const bool is_tail = in_span >= num_shared_items;
  const int tail_row = is_tail ? cut.tail_row(in_span - num_shared_items) : 0;
  // Tiles of one range follow each other: they share K and V in L2.
  const int tile = is_tail ? tail_row / cut.tile_rows : in_span % cut.num_tiles;
  const int first_row = tile * cut.tile_rows;  // in the span

  WorkItem item;
  item.tile_row = spans.row[span] + first_row;
  item.tile_rows = min(cut.tile_rows, num_rows - first_row);
  item.kv_len = spans.kv_len[span];
  item.seq = args.rows.span_seq[span];
  item.num_shared_blocks = cut.num_shared_blocks;
  item.num_slots = cut.num_slots;
  item.range_blocks = cut.range_blocks;
  item.slot_base = spans.slot[span] + first_row * args.group * args.num_kv_heads * cut.num_slots;
  item.num_arrivals = cut.num_ranges;
  if (cut.num_tails > 0) item.num_arrivals += tile < cut.num_tile_tails ? 1 : item.tile_rows;
  item.arrival = is_tail ? cut.num_ranges + tail_row - first_row : in_span / cut.num_tiles;
  item.tile_index = spans.tile[span] + tile;
  item.is_tree = (flags & kIsTree) != 0;
  item.is_tile_tail = is_tail && tile < cut.num_tile_tails;
  item.tail_row = is_tail && !item.is_tile_tail ? spans.row[span] + tail_row : -1;
  item.tail_end = cut.joins_tails ? item.kv_len + first_row + item.tile_rows : 0;
  if (is_tail) {
    item.end = item.kv_len;
    if (item.is_tile_tail) {
      item.end += first_row + item.tile_rows;
    } else {
      const uint32_t* words =
          args.workspace.ancestors + static_cast<int64_t>(item.tail_row) * kAncestorWords;
#pragma unroll
      for (int i = 0; i < kAncestorWords; ++i) item.end += __popc(words[i]);
    }
    item.first_visible = item.end;
    item.block_begin = cut.num_shared_blocks;
    item.block_end = ceil_div(item.end, kBlockTokens);
    item.first_slot = num_slots_of(cut.num_shared_blocks, cut.range_blocks);
  } else {
    item.end = item.is_tree     ? cut.num_shared_blocks * kBlockTokens
               : args.is_causal ? item.kv_len + first_row + item.tile_rows
                                : item.kv_len + num_rows;
    item.first_visible = args.is_causal && !item.is_tree ? item.kv_len + first_row + 1 : item.end;
    const int num_blocks = ceil_div(item.end, kBlockTokens);
    item.block_begin = in_span / cut.num_tiles * cut.range_blocks;
    item.block_end =
        cut.num_ranges == 1 ? num_blocks : min(item.block_begin + cut.range_blocks, num_blocks);
    item.first_slot = num_slots_of(item.block_begin, cut.range_blocks);
  }
  set_lines(args, item);
  args.workspace.items[index] = item;
}

/// Longest tiles first: they are drawn in order.
__device__ void write_wide_item(const PlanArgs& args, const SpanTable& spans, int index) {
  const int span = span_of(spans.wide_item, args.rows.num_spans, index);
  const WideCut cut(spans.num_rows(span), spans.kv_len[span], spans.flags[span], args.group);
  const int in_span = index - spans.wide_item[span];
  const int tile = cut.num_tiles - 1 - in_span % cut.num_tiles, range = in_span / cut.num_tiles;
  const int first_row = tile * cut.tile_rows;
  WorkItem item = {};
  item.tile_row = spans.row[span] + first_row;
  item.tile_rows = min(cut.tile_rows, spans.num_rows(span) - first_row);
  item.tail_row = -1;
  item.kv_len = spans.kv_len[span];
  item.seq = args.rows.span_seq[span];
  item.end = item.kv_len + (args.is_causal ? first_row + item.tile_rows : spans.num_rows(span));
  item.first_visible = args.is_causal ? item.kv_len + first_row + 1 : item.end;
  item.block_end = ceil_div(item.end, kBlockTokens);
  item.num_shared_blocks = cut.num_blocks;
  item.range_blocks = kSegmentBlocks;
  item.num_arrivals = 1;
  if (cut.num_slots > 0) {
    item.block_begin = range * kSegmentBlocks;
    item.block_end = min(item.block_end, item.block_begin + kSegmentBlocks);
    item.num_slots = cut.num_slots;
    item.first_slot = range;
    item.slot_base = spans.slot[span] + first_row * args.group * args.num_kv_heads * cut.num_slots;
    item.num_arrivals = cut.num_ranges * (kWideTilePairs / kMaxTilePairs);
    item.tile_index = spans.tile[span] + tile;
  }
  set_lines(args, item);
  args.workspace.wide_items[index] = item;
}

__device__ void write_wide_merge(const PlanArgs& args, const SpanTable& spans, int index) {
  const int span = span_of(spans.wide_merge, args.rows.num_spans, index);
  const WideCut cut(spans.num_rows(span), spans.kv_len[span], spans.flags[span], args.group);
  const int in_span = index - spans.wide_merge[span], per_tile = cut.merges_per_tile(args.group);
  args.workspace.wide_merges[index] = {spans.wide_item[span] + in_span / per_tile,
                                       in_span % per_tile * kWideMergePairs};
}

/// Bits of the rows of the span that a row sees: itself and its ancestors, which come before it.
__device__ void write_ancestors(const PlanArgs& args, int row, int span_row) {
  uint32_t words[kAncestorWords] = {};
  for (int node = row; node >= span_row;) {
    const int index = node - span_row;
#pragma unroll
    for (int i = 0; i < kAncestorWords; ++i) {
      if (index / 32 == i) words[i] |= 1u << index % 32;
    }
    const int parent = args.rows.row_parent[node];
    if (parent >= node) break;
    node = parent;
  }
  uint4* to = reinterpret_cast<uint4*>(args.workspace.ancestors +
                                       static_cast<int64_t>(row) * kAncestorWords);
  to[0] = make_uint4(words[0], words[1], words[2], words[3]);
  to[1] = make_uint4(words[4], words[5], words[6], words[7]);
}

/// One CTA: lists the step's work.
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanArgs args) {
  cuda::allow_next_kernel();
  extern __shared__ int table[];
  __shared__ int warp_sums[kPlanThreads / 32];
  const int num_spans = args.rows.num_spans, thread = threadIdx.x;
  const SpanTable spans(table, num_spans);
  cuda::wait_for_previous_kernel();

  for (int span = thread; span <= num_spans; span += kPlanThreads) {
    spans.row[span] = args.rows.span_begin[span];
    if (span == num_spans) break;
    spans.kv_len[span] = args.rows.span_kv_len[span];
    spans.flags[span] = 0;
  }
  __syncthreads();
  const int num_rows = spans.row[num_spans];
  bool has_tree = false;
  for (int row = thread; row < num_rows && args.is_causal; row += kPlanThreads) {
    const int span = args.rows.row_span[row];
    const int chain_parent = row == spans.row[span] ? -1 : row - 1;
    if (args.rows.row_parent[row] != chain_parent) {
      spans.flags[span] = kIsTree;
      has_tree = true;
    }
  }
  if (__syncthreads_or(has_tree)) {
    for (int row = thread; row < num_rows; row += kPlanThreads) {
      const int span = args.rows.row_span[row];
      if ((spans.flags[span] & kIsTree) != 0) write_ancestors(args, row, spans.row[span]);
    }
  }
  if (args.has_wide && args.has_wgmma) {
    mark_wide_spans(args, spans);
  } else if (args.has_wide) {
    for (int span = thread; span < num_spans; span += kPlanThreads) {
      // Wide tiles are the most efficient, and pay where there are enough of them to keep the SMs
      // busy or where they are short.
      const int num_pairs = spans.num_rows(span) * args.group;
      const int num_blocks = ceil_div(spans.kv_len[span] + spans.num_rows(span), kBlockTokens);
      if (spans.flags[span] == 0 && num_pairs > kMaxTilePairs &&
          (num_pairs * args.num_kv_heads >= 64 * kWideTilePairs || num_blocks <= 16)) {
        spans.flags[span] = kIsWide;
      }
    }
  }
  __syncthreads();
  const Strategy strategy = choose_strategy(args, spans);

  // Where each span's share of every list begins.
  int slot_end = 0, item_end = 0, wide_end = 0, tile_end = 0, wide_merge_end = 0;
  for (int begin = 0; begin <= num_spans; begin += kPlanThreads) {
    const int span = begin + thread;
    const bool is_span = span < num_spans && spans.num_rows(span) > 0;
    const int span_rows = is_span ? spans.num_rows(span) : 0;
    int flags = is_span ? spans.flags[span] : 0;
    const bool is_split = is_span && (flags & kIsWide) == 0;
    int num_slots = 0;
    if (is_split) {
      const SpanCut cut(strategy, span_rows, spans.kv_len[span], flags | kHasSlots, args.group);
      num_slots = count_pair_slots(args, cut.num_slots, span_rows, kMaxPairSlots);
    } else if (is_span) {
      const WideCut cut(span_rows, spans.kv_len[span], flags | kHasSlots, args.group);
      num_slots = count_pair_slots(args, cut.num_slots, span_rows, kMaxPairSlots);
    }
    int total;
    const int slot = slot_end + sum_before(num_slots, warp_sums, total);
    slot_end += total;
    if (slot + num_slots <= args.workspace.num_pair_slots) flags |= kHasSlots;

    int num_items = 0, num_tiles = 0, num_wide = 0, num_wide_merges = 0;
    if (is_split) {
      const SpanCut cut(strategy, span_rows, spans.kv_len[span], flags, args.group);
      num_items = cut.num_items();
      num_tiles = cut.num_tiles;
    } else if (is_span) {
      const WideCut cut(span_rows, spans.kv_len[span], flags, args.group);
      num_wide = cut.num_tiles * cut.num_ranges;
      num_tiles = cut.num_slots > 0 ? cut.num_tiles : 0;
      num_wide_merges = cut.num_tiles * cut.merges_per_tile(args.group);
    }
    const int item = item_end + sum_before(num_items, warp_sums, total);
    item_end += total;
    const int tile = tile_end + sum_before(num_tiles, warp_sums, total);
    tile_end += total;
    const int wide_item = wide_end + sum_before(num_wide, warp_sums, total);
    wide_end += total;
    const int wide_merge = wide_merge_end + sum_before(num_wide_merges, warp_sums, total);
    wide_merge_end += total;
    if (span <= num_spans) {
      spans.flags[span] = flags;
      spans.slot[span] = slot;
      spans.item[span] = item;
      spans.tile[span] = tile;
      spans.wide_item[span] = wide_item;
      spans.wide_merge[span] = wide_merge;
    }
  }
  __syncthreads();

  const bool merges_together = item_end * args.num_kv_heads <= args.num_split_ctas;
  if (thread == 0)
    *args.workspace.header = {item_end, wide_end, merges_together, wide_merge_end, {0, 0}, {0, 0}};
  for (int i = thread; i < tile_end * args.num_kv_heads; i += kPlanThreads) {
    args.workspace.num_arrived[i] = 0;
    args.workspace.num_merged[i] = 0;
  }
  for (int i = thread; i < item_end; i += kPlanThreads) write_item(args, spans, strategy, i);
  for (int i = thread; i < wide_end; i += kPlanThreads) write_wide_item(args, spans, i);
  for (int i = thread; i < wide_merge_end; i += kPlanThreads) write_wide_merge(args, spans, i);
}

}  // namespace openspec::span_attention
