#pragma once

/// The kernel that lists the work items of a step for decode_cluster_kernel.

#include <cuda_runtime.h>

#include "kernels/attention/plan.cuh"
#include "kernels/attention/work.cuh"
#include "kernels/common/launch.cuh"

namespace openspec::span_attention {

/// A span cut into items for clusters.
struct ClusterCut {
  int tile_rows, num_tiles, num_ranges, num_slots;

  __device__ ClusterCut(int num_rows, int kv_len, int group) {
    const int num_blocks = ceil_div(kv_len + num_rows, kBlockTokens);
    tile_rows = kMinTilePairs / group;
    num_tiles = ceil_div(num_rows, tile_rows);
    num_ranges = ceil_div(num_blocks, kClusterBlocks);
    num_slots = num_ranges > 1 ? ceil_div(num_blocks, kSegmentBlocks) : 0;
  }
};

__device__ inline void write_cluster_item(const PlanArgs& args, const SpanTable& spans, int index) {
  const int rank = index % kClusterCtas;
  const int span = span_of(spans.item, args.rows.num_spans, index / kClusterCtas);
  const int num_rows = spans.num_rows(span), kv_len = spans.kv_len[span];
  const ClusterCut cut(num_rows, kv_len, args.group);
  const int in_span = index / kClusterCtas - spans.item[span];
  const int tile = in_span % cut.num_tiles, first_row = tile * cut.tile_rows;
  const int rows_here = min(cut.tile_rows, num_rows - first_row);

  ClusterItem item = {};
  item.tile_row = spans.row[span] + first_row;
  item.num_pairs = rows_here * args.group;
  item.end = kv_len + (args.is_causal ? first_row + rows_here : num_rows);
  item.first_visible = args.is_causal ? kv_len + first_row + 1 : item.end;
  const int num_blocks = ceil_div(item.end, kBlockTokens);
  item.block = in_span / cut.num_tiles * kClusterBlocks;
  item.num_blocks = max(min(kClusterBlocks, num_blocks - item.block), 0);
  item.num_slots = cut.num_slots;
  item.slot_base = spans.slot[span] + first_row * args.group * args.num_kv_heads * cut.num_slots;
  item.num_arrivals = cut.num_ranges;
  item.tile_index = spans.tile[span] + tile;
  item.num_segments = ceil_div(num_blocks, kSegmentBlocks);
  item.kv_len = kv_len;
  const int seq = args.rows.span_seq[span];
#pragma unroll
  for (int i = 0; i < 2 * kBlockTokens / kLineRows; ++i) {
    const int block = item.block + rank + (i >= kBlockTokens / kLineRows ? kClusterCtas : 0);
    const int token = block * kBlockTokens + i % (kBlockTokens / kLineRows) * kLineRows;
    item.lines[i] = line_of(args, seq, token, item.end);
  }
  args.workspace.cluster_items[index] = item;
}

/// One CTA: lists the items of a step of clusters.
__global__ void __launch_bounds__(kPlanThreads)
    decode_cluster_plan_kernel(const __grid_constant__ PlanArgs args) {
  cuda::allow_next_kernel();
  extern __shared__ int table[];
  __shared__ int warp_sums[kPlanThreads / 32];
  const int num_spans = args.rows.num_spans, thread = threadIdx.x;
  const SpanTable spans(table, num_spans);
  cuda::wait_for_previous_kernel();

  for (int span = thread; span <= num_spans; span += kPlanThreads) {
    spans.row[span] = args.rows.span_begin[span];
    if (span < num_spans) spans.kv_len[span] = args.rows.span_kv_len[span];
  }
  __syncthreads();

  int slot_end = 0, item_end = 0, tile_end = 0;
  for (int begin = 0; begin <= num_spans; begin += kPlanThreads) {
    const int span = begin + thread;
    const int num_rows = span < num_spans ? spans.num_rows(span) : 0;
    int num_slots = 0, num_items = 0, num_tiles = 0;
    if (num_rows > 0) {
      const ClusterCut cut(num_rows, spans.kv_len[span], args.group);
      num_slots = cut.num_slots * num_rows * args.group * args.num_kv_heads;
      num_items = cut.num_tiles * cut.num_ranges;
      num_tiles = cut.num_tiles;
    }
    const int slot = add_entries(num_slots, warp_sums, slot_end);
    const int item = add_entries(num_items, warp_sums, item_end);
    const int tile = add_entries(num_tiles, warp_sums, tile_end);
    if (span <= num_spans) {
      spans.slot[span] = slot;
      spans.item[span] = item;
      spans.tile[span] = tile;
    }
  }
  __syncthreads();

  if (thread == 0) *args.workspace.header = {item_end, 0, 0, 0, {0, 0}, {0, 0}};
  const int num_counters = tile_end * args.num_kv_heads * kClusterCtas;
  for (int i = thread; i < num_counters; i += kPlanThreads) args.workspace.cluster_arrived[i] = 0;
  for (int i = thread; i < item_end * kClusterCtas; i += kPlanThreads) {
    write_cluster_item(args, spans, i);
  }
}

}  // namespace openspec::span_attention
