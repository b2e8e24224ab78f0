#pragma once

/// The kernel that lists a step's work items from the lengths on the device, and how it chooses
/// what spans are cut into.

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "kernels/attention/work.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/rows.h"

namespace openspec::span_attention {

struct PlanArgs {
  RowBatch rows;
  const int32_t* pages;
  int max_pages_per_seq;
  int page_size;
  int num_kv_heads, group, head_dim;
  int num_decode_ctas, num_sms;
  int tile_pairs;
  float item_ns, block_ns;  // of a CTA: for an item, and for each of its blocks
  bool has_prefill;
  bool has_wgmma;         // prefill tiles are those of sm_90a
  int min_prefill_pairs;  // of a chain that these are for
  int range_blocks;       // of AttentionChoice
  bool is_causal;
  Workspace workspace;
};

constexpr int kPlanThreads = 512;
constexpr unsigned kAllLanes = 0xffffffffu;

constexpr int kNumRanges = 18, kNumStrategies = kNumRanges + 1;

__device__ __forceinline__ Strategy strategy_of(int index, int tile_pairs) {
  constexpr int kRanges[kNumRanges] = {1,  2,  3,  4,  5,  6,  7,  8,   10,
                                       12, 16, 20, 24, 32, 48, 64, 128, 1 << 28};
  return {tile_pairs, kRanges[min(index, kNumRanges - 1)], index >= kNumRanges};
}

/// Partial results of so many rows with so many slots each, or one more than `most`.
__device__ __forceinline__ int count_pair_slots(const PlanArgs& args, int num_slots, int num_rows,
                                                int most) {
  const int64_t count = int64_t{num_slots} * num_rows * args.group * args.num_kv_heads;
  return static_cast<int>(min(count, int64_t{most} + 1));
}

// What a tail that is joined to a range takes before its first block, in blocks.
constexpr int kTailStart = 2;

/// What a strategy comes to, over all spans of decode tiles.
struct StrategyTotals {
  int num_items, num_blocks;        // per KV head
  int longest_item;                 // blocks
  int most_pair_slots, most_share;  // of a tile and KV head; over its items
  int most_slots;                   // of a pair
  int num_pair_slots;
  int num_tails;  // items of their own
};

/// Estimated time in ns, from the H200's bandwidths. A wrong estimate costs time, never bits.
__device__ inline float estimate(const PlanArgs& args, const StrategyTotals& totals,
                                 int num_tokens) {
  const float token_bytes = 2 * args.head_dim * 2, partial_bytes = (args.head_dim + 2) * 4;
  constexpr float kMemory = 4200.0f, kCache = 5500.0f;  // bytes per ns
  const int num_kv_heads = args.num_kv_heads, num_ctas = args.num_decode_ctas;
  const float num_items = static_cast<float>(totals.num_items) * num_kv_heads;
  const float read = num_tokens * (num_kv_heads * token_bytes / kMemory);
  const float cached = totals.num_blocks * (num_kv_heads * kBlockTokens * token_bytes / kCache);
  float rounds = ceilf(num_items / num_ctas) * (args.item_ns + totals.longest_item * args.block_ns);
  // Tiles of trees that are not done together wait for each other's tails.
  if (totals.num_tails > 0 && num_items > num_ctas) rounds *= 1.5f;
  float merge = 2.0f * totals.num_pair_slots * (partial_bytes / kCache);
  if (totals.num_pair_slots > 0) {
    // A pair's slots are one warp's work.
    merge += 1600.0f +
             fmaxf(100.0f * totals.most_slots,
                   22.0f * (num_items <= num_ctas ? totals.most_share : totals.most_pair_slots));
  }
  if (totals.num_pair_slots > args.workspace.num_pair_slots)
    merge += 1e6f;  // some spans will not be cut
  return fmaxf(fmaxf(read, cached), rounds) + merge;
}

/// Per span, in shared memory. The begin arrays have an entry more, the end of the last span.
struct SpanTable {
  int *row, *kv_len, *flags, *slot, *item, *prefill_item, *tile, *prefill_merge;
  static constexpr int kArrays = 8;

  __device__ SpanTable(int* shared, int num_spans) {
    int** arrays[kArrays] = {&row,  &kv_len,       &flags, &slot,
                             &item, &prefill_item, &tile,  &prefill_merge};
    for (int i = 0; i < kArrays; ++i) *arrays[i] = shared + i * (num_spans + 1);
  }
  __device__ int num_rows(int span) const { return row[span + 1] - row[span]; }
};

/// Marks the spans for the prefill tiles of sm_90a, and those whose tiles are cut because there are
/// too few for the SMs. Needs every thread of the CTA.
__device__ inline void mark_prefill_spans(const PlanArgs& args, const SpanTable& spans) {
  __shared__ int num_tiles, num_blocks, num_segments, num_merges, longest, num_pair_slots;
  if (threadIdx.x == 0) {
    num_tiles = num_blocks = num_segments = num_merges = longest = num_pair_slots = 0;
  }
  __syncthreads();
  for (int span = threadIdx.x; span < args.rows.num_spans; span += kPlanThreads) {
    const int num_rows = spans.num_rows(span), kv_len = spans.kv_len[span];
    if (spans.flags[span] != 0 || num_rows * args.group < args.min_prefill_pairs) continue;
    spans.flags[span] = kIsPrefill;
    const PrefillCut cut(num_rows, kv_len, kIsCut | kHasSlots, args.group);
    const int mean_blocks = ceil_div(kv_len + num_rows / 2 + 1, kBlockTokens);
    atomicAdd(&num_tiles, cut.num_tiles);
    atomicAdd(&num_blocks, cut.num_tiles * mean_blocks);
    atomicAdd(&num_segments, cut.num_tiles * ceil_div(mean_blocks, kSegmentBlocks));
    atomicAdd(&num_merges, cut.num_tiles * cut.num_merges);
    atomicMax(&longest, cut.num_blocks);
    atomicAdd(&num_pair_slots,
              count_pair_slots(args, cut.num_slots, num_rows, args.workspace.num_pair_slots));
  }
  __syncthreads();
  if (num_tiles == 0 || num_pair_slots > args.workspace.num_pair_slots) return;
  // In blocks of a tile. Merges begin when the last items are done, and each CTA does one after the
  // other; partial results are written and read at 5.5 TB/s.
  constexpr float kBlockTime = 650.0f, kFirstMergeTime = 3.0f, kMergeTime = 1.0f;
  const int num_sms = args.num_sms;
  const int whole = max(
      longest, ceil_div(num_tiles * args.num_kv_heads, num_sms) * ceil_div(num_blocks, num_tiles));
  const float cut = ceil_div(num_segments * args.num_kv_heads, num_sms) * kSegmentBlocks +
                    kFirstMergeTime +
                    kMergeTime * ceil_div(num_merges * args.num_kv_heads, num_sms) +
                    num_pair_slots * (2.0f * (kMidHeadDim + 2) * 4 / 5500.0f / kBlockTime);
  if (args.range_blocks > 0 ? args.range_blocks != kSegmentBlocks : cut >= whole) return;
  for (int span = threadIdx.x; span < args.rows.num_spans; span += kPlanThreads) {
    const int num_tokens = spans.kv_len[span] + spans.num_rows(span);
    if ((spans.flags[span] & kIsPrefill) != 0 && num_tokens > 2 * kSegmentBlocks * kBlockTokens) {
      spans.flags[span] |= kIsCut;
    }
  }
}

/// Finds the cheapest strategy for the step; needs every thread of the CTA.
__device__ inline Strategy choose_strategy(const PlanArgs& args, const SpanTable& spans) {
  __shared__ StrategyTotals totals[32];
  __shared__ int num_tokens, chosen;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp == 0) {
    totals[lane] = {};
    num_tokens = 0;
  }
  __syncthreads();

  // A strategy per lane, a span per warp at a time.
  const Strategy strategy = strategy_of(min(lane, kNumStrategies - 1), args.tile_pairs);
  StrategyTotals mine = {};
  int my_tokens = 0;
  for (int span = warp; span < args.rows.num_spans; span += kPlanThreads / 32) {
    const int num_rows = spans.num_rows(span), kv_len = spans.kv_len[span];
    if (num_rows == 0 || (spans.flags[span] & kIsPrefill) != 0) continue;
    const SpanCut cut(strategy, num_rows, kv_len, spans.flags[span] | kHasSlots, args.group);
    const int num_tails = cut.joins_tails ? cut.num_tiles : cut.num_tails;
    const int tail_blocks =
        num_tails > 0 ? ceil_div(kv_len + num_rows, kBlockTokens) - cut.num_shared_blocks : 0;
    const int range_blocks =
        cut.num_slots == 0 ? cut.num_shared_blocks : min(cut.range_blocks, cut.num_shared_blocks);
    my_tokens += kv_len + num_rows;
    mine.num_items += cut.num_items();
    mine.num_tails += cut.num_tails;
    mine.num_blocks += cut.num_tiles * cut.num_shared_blocks + num_tails * tail_blocks;
    mine.longest_item =
        max(mine.longest_item, cut.joins_tails ? range_blocks + kTailStart + tail_blocks
                                               : max(range_blocks, tail_blocks));
    const int tile_rows = min(cut.tile_rows, num_rows);
    const int pair_slots = cut.num_slots * tile_rows * args.group;
    mine.most_pair_slots = max(mine.most_pair_slots, pair_slots);
    mine.most_slots = max(mine.most_slots, cut.num_slots);
    const int tile_tails = cut.num_tile_tails > 0 ? 1 : cut.num_tails > 0 ? tile_rows : 0;
    mine.most_share = max(mine.most_share, pair_slots / (cut.num_ranges + tile_tails));
    mine.num_pair_slots += count_pair_slots(args, cut.num_slots, num_rows, kMaxPairSlots);
  }
  StrategyTotals& all = totals[lane];
  atomicAdd(&all.num_items, mine.num_items);
  atomicAdd(&all.num_tails, mine.num_tails);
  atomicAdd(&all.num_blocks, mine.num_blocks);
  atomicMax(&all.longest_item, mine.longest_item);
  atomicMax(&all.most_share, mine.most_share);
  atomicMax(&all.most_pair_slots, mine.most_pair_slots);
  atomicMax(&all.most_slots, mine.most_slots);
  atomicAdd(&all.num_pair_slots, mine.num_pair_slots);
  if (lane == 0) atomicAdd(&num_tokens, my_tokens);
  __syncthreads();

  if (warp == 0) {
    float time = lane < kNumStrategies ? estimate(args, all, num_tokens) : INFINITY;
    if (strategy.range_blocks == args.range_blocks) time = 0.0f;
    int index = lane;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float other_time = __shfl_xor_sync(kAllLanes, time, offset);
      const int other = __shfl_xor_sync(kAllLanes, index, offset);
      if (other_time < time || (other_time == time && other < index)) {
        time = other_time;
        index = other;
      }
    }
    if (lane == 0) chosen = index;
  }
  __syncthreads();
  return strategy_of(chosen, args.tile_pairs);
}

/// Where the thread's `count` entries of a list come: after the first `end` and those of the
/// threads before. Moves `end` past those of all threads, each of which calls it.
__device__ inline int add_entries(int count, int* warp_sums, int& end) {
  constexpr int kNumWarps = kPlanThreads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = count;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = end;
#pragma unroll
  for (int i = 0; i < kNumWarps; ++i) {
    if (i == warp) before = end;
    end += warp_sums[i];
  }
  __syncthreads();
  return before + sum - count;
}

/// The span that entry `index` of a list belongs to.
__device__ inline int span_of(const int* begin, int num_spans, int index) {
  int low = 0, high = num_spans;  // begin[low] <= index < begin[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (begin[middle] <= index ? low : high) = middle;
  }
  return low;
}

/// The line of KV head 0's K of a token of a sequence; from `end` on, of any token before.
__device__ __forceinline__ uint32_t line_of(const PlanArgs& args, int seq, int token, int end) {
  token = min(token, (end - 1) & ~(kLineRows - 1));
  const int index = token / args.page_size;
  const int32_t page = args.pages[static_cast<int64_t>(seq) * args.max_pages_per_seq + index];
  return static_cast<uint32_t>(page) * (2u * args.num_kv_heads * args.page_size) +
         (token - index * args.page_size);
}

__device__ __forceinline__ void set_lines(const PlanArgs& args, WorkItem& item) {
#pragma unroll
  for (int i = 0; i < kDecodeWarps * kBlockTokens / kLineRows; ++i) {
    item.lines[i] =
        line_of(args, item.seq, item.block_begin * kBlockTokens + i * kLineRows, item.end);
  }
}

__device__ inline void write_item(const PlanArgs& args, const SpanTable& spans,
                                  const Strategy& strategy, int index) {
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
__device__ inline void write_prefill_item(const PlanArgs& args, const SpanTable& spans, int index) {
  const int span = span_of(spans.prefill_item, args.rows.num_spans, index);
  const PrefillCut cut(spans.num_rows(span), spans.kv_len[span], spans.flags[span], args.group);
  const int in_span = index - spans.prefill_item[span];
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
    item.num_arrivals = cut.num_ranges * (kPrefillTilePairs / kMaxTilePairs);
    item.tile_index = spans.tile[span] + tile;
  }
  set_lines(args, item);
  args.workspace.prefill_items[index] = item;
}

__device__ inline void write_prefill_merge(const PlanArgs& args, const SpanTable& spans,
                                           int index) {
  const int span = span_of(spans.prefill_merge, args.rows.num_spans, index);
  const PrefillCut cut(spans.num_rows(span), spans.kv_len[span], spans.flags[span], args.group);
  const int in_span = index - spans.prefill_merge[span];
  args.workspace.prefill_merges[index] = {spans.prefill_item[span] + in_span / cut.num_merges,
                                          in_span % cut.num_merges * kPrefillMergePairs};
}

/// Bits of the rows of the span that a row sees: itself and its ancestors, which come before it.
__device__ inline void write_ancestors(const PlanArgs& args, int row, int span_row) {
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

/// Marks the spans that are trees, and lists their rows' ancestors.
__device__ __forceinline__ void mark_trees(const PlanArgs& args, const SpanTable& spans,
                                           int num_rows) {
  const int thread = threadIdx.x;
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
  mark_trees(args, spans, num_rows);
  if (args.has_prefill && args.has_wgmma) {
    mark_prefill_spans(args, spans);
  } else if (args.has_prefill) {
    for (int span = thread; span < num_spans; span += kPlanThreads) {
      // Prefill tiles are the most efficient, and pay where there are enough of them to keep the
      // SMs busy or where they are short.
      const int num_pairs = spans.num_rows(span) * args.group;
      const int num_blocks = ceil_div(spans.kv_len[span] + spans.num_rows(span), kBlockTokens);
      if (spans.flags[span] == 0 && num_pairs > kMaxTilePairs &&
          (num_pairs * args.num_kv_heads >= 64 * kPrefillTilePairs || num_blocks <= 16)) {
        spans.flags[span] = kIsPrefill;
      }
    }
  }
  __syncthreads();
  const Strategy strategy = choose_strategy(args, spans);

  // Where each span's share of every list begins.
  int slot_end = 0, item_end = 0, prefill_end = 0, tile_end = 0, prefill_merge_end = 0;
  for (int begin = 0; begin <= num_spans; begin += kPlanThreads) {
    const int span = begin + thread;
    const bool is_span = span < num_spans && spans.num_rows(span) > 0;
    const int span_rows = is_span ? spans.num_rows(span) : 0;
    int flags = is_span ? spans.flags[span] : 0;
    const bool is_decode = is_span && (flags & kIsPrefill) == 0;
    int num_slots = 0;
    if (is_decode) {
      const SpanCut cut(strategy, span_rows, spans.kv_len[span], flags | kHasSlots, args.group);
      num_slots = count_pair_slots(args, cut.num_slots, span_rows, kMaxPairSlots);
    } else if (is_span) {
      const PrefillCut cut(span_rows, spans.kv_len[span], flags | kHasSlots, args.group);
      num_slots = count_pair_slots(args, cut.num_slots, span_rows, kMaxPairSlots);
    }
    const int slot = add_entries(num_slots, warp_sums, slot_end);
    if (slot + num_slots <= args.workspace.num_pair_slots) flags |= kHasSlots;

    int num_items = 0, num_tiles = 0, num_prefill = 0, num_prefill_merges = 0;
    if (is_decode) {
      const SpanCut cut(strategy, span_rows, spans.kv_len[span], flags, args.group);
      num_items = cut.num_items();
      num_tiles = cut.num_tiles;
    } else if (is_span) {
      const PrefillCut cut(span_rows, spans.kv_len[span], flags, args.group);
      num_prefill = cut.num_tiles * cut.num_ranges;
      num_tiles = cut.num_slots > 0 ? cut.num_tiles : 0;
      num_prefill_merges = cut.num_tiles * cut.num_merges;
    }
    const int item = add_entries(num_items, warp_sums, item_end);
    const int tile = add_entries(num_tiles, warp_sums, tile_end);
    const int prefill_item = add_entries(num_prefill, warp_sums, prefill_end);
    const int prefill_merge = add_entries(num_prefill_merges, warp_sums, prefill_merge_end);
    if (span <= num_spans) {
      spans.flags[span] = flags;
      spans.slot[span] = slot;
      spans.item[span] = item;
      spans.tile[span] = tile;
      spans.prefill_item[span] = prefill_item;
      spans.prefill_merge[span] = prefill_merge;
    }
  }
  __syncthreads();

  const bool merges_together = item_end * args.num_kv_heads <= args.num_decode_ctas;
  if (thread == 0)
    *args.workspace.header = {item_end,          prefill_end, merges_together,
                              prefill_merge_end, {0, 0},      {0, 0}};
  for (int i = thread; i < tile_end * args.num_kv_heads; i += kPlanThreads) {
    args.workspace.num_arrived[i] = 0;
    args.workspace.num_merged[i] = 0;
  }
  for (int i = thread; i < item_end; i += kPlanThreads) write_item(args, spans, strategy, i);
  for (int i = thread; i < prefill_end; i += kPlanThreads) write_prefill_item(args, spans, i);
  for (int i = thread; i < prefill_merge_end; i += kPlanThreads)
    write_prefill_merge(args, spans, i);
}

}  // namespace openspec::span_attention
