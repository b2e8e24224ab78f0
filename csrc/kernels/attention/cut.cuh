#pragma once

/// How a step's spans are cut into tiles and ranges: what there is to choose from, and the choice.

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "kernels/attention/work.cuh"
#include "kernels/steps/rows.h"

namespace openspec::span_attention {

struct PlanArgs {
  RowBatch rows;
  const int32_t* pages;
  int max_pages_per_seq;
  int page_size;
  int num_kv_heads, group;
  int num_split_ctas, num_sms;
  int tile_pairs;
  float item_ns, block_ns;  // of a CTA: for an item, and for each of its blocks
  bool has_wide;
  bool has_wgmma;  // wide tiles are those of sm_90a
  bool is_causal;
  Workspace workspace;
};

constexpr int kPlanThreads = 512;
constexpr unsigned kAllLanes = 0xffffffffu;

/// How spans are cut: pairs per tile, blocks per range; and whether a CTA that has all shared
/// blocks of a tree's tile has its tail as well.
struct Strategy {
  int tile_pairs, range_blocks;
  bool joins_tails;
};
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

// kIsCut: wide tiles, an item for each segment.
enum SpanFlags : int { kIsTree = 1, kIsWide = 2, kHasSlots = 4, kIsCut = 8 };

/// A span's rows cut by a strategy.
struct SpanCut {
  int tile_rows, num_tiles;
  int num_shared_blocks, num_ranges, range_blocks;  // ranges of the shared blocks, per tile
  int num_slots;                                    // 0: each item is a whole tile
  bool joins_tails;                                 // of the tiles to their only ranges
  int num_tile_tails, num_tails;  // tails of the first tiles, and in all; behind the other items

  __device__ SpanCut(const Strategy& strategy, int num_rows, int kv_len, int flags, int group) {
    const int num_blocks = ceil_div(kv_len + num_rows, kBlockTokens);
    const bool is_tree = (flags & kIsTree) != 0, has_slots = (flags & kHasSlots) != 0;
    tile_rows = is_tree && !has_slots ? 1 : strategy.tile_pairs / group;
    num_tiles = ceil_div(num_rows, tile_rows);
    range_blocks = strategy.range_blocks;
    num_tile_tails = num_tails = 0;
    joins_tails = false;
    if (is_tree) {
      num_shared_blocks = has_slots ? kv_len / kBlockTokens : 0;
      num_ranges = ceil_div(num_shared_blocks, range_blocks);
      num_slots =
          has_slots ? num_slots_of(num_shared_blocks, range_blocks) + num_blocks - num_shared_blocks
                    : 0;
      if (has_slots) {
        const int room = tail_lines_of(strategy.tile_pairs / 16) - kv_len % kBlockTokens;
        num_tile_tails = num_rows <= room ? num_tiles : room / tile_rows;
      }
      joins_tails = strategy.joins_tails && num_ranges == 1 && num_tile_tails == num_tiles;
      if (joins_tails) {
        num_tile_tails = 0;
      } else {
        num_tails = num_tile_tails + max(num_rows - num_tile_tails * tile_rows, 0);
      }
    } else {
      const bool is_split = has_slots && num_blocks > range_blocks;
      num_shared_blocks = num_blocks;
      num_ranges = is_split ? ceil_div(num_blocks, range_blocks) : 1;
      num_slots = is_split ? num_slots_of(num_blocks, range_blocks) : 0;
    }
  }
  __device__ int num_items() const { return num_tiles * num_ranges + num_tails; }
  /// The row of the span that a tail begins with.
  __device__ int tail_row(int tail) const {
    return tail < num_tile_tails ? tail * tile_rows
                                 : num_tile_tails * tile_rows + tail - num_tile_tails;
  }
};

/// A span's rows cut into wide tiles.
struct WideCut {
  int tile_rows, num_tiles, num_blocks;
  int num_ranges;  // per tile
  int num_slots;   // 0: each item is a whole tile

  __device__ WideCut(int num_rows, int kv_len, int flags, int group) {
    tile_rows = kWideTilePairs / group;
    num_tiles = ceil_div(num_rows, tile_rows);
    num_blocks = ceil_div(kv_len + num_rows, kBlockTokens);
    const bool is_cut = (flags & kIsCut) != 0 && (flags & kHasSlots) != 0;
    num_ranges = is_cut ? ceil_div(num_blocks, kSegmentBlocks) : 1;
    num_slots = is_cut ? num_ranges : 0;
  }
  __device__ int merges_per_tile(int group) const {
    return num_slots > 0 ? ceil_div(tile_rows * group, kWideMergePairs) : 0;
  }
};

/// What a strategy comes to, over all spans that are not wide.
struct StrategyTotals {
  int num_items, num_blocks;        // per KV head
  int longest_item;                 // blocks
  int most_pair_slots, most_share;  // of a tile and KV head; over its items
  int most_slots;                   // of a pair
  int num_pair_slots;
  int num_tails;  // items of their own
};

/// Estimated time in ns, from the H200's bandwidths. A wrong estimate costs time, never bits.
__device__ float estimate(const PlanArgs& args, const StrategyTotals& totals, int num_tokens) {
  constexpr float kTokenBytes = 2 * kHeadDim * 2, kPartialBytes = (kHeadDim + 2) * 4;
  constexpr float kMemory = 4200.0f, kCache = 5500.0f;  // bytes per ns
  const int num_kv_heads = args.num_kv_heads, num_ctas = args.num_split_ctas;
  const float num_items = static_cast<float>(totals.num_items) * num_kv_heads;
  const float read = num_tokens * (num_kv_heads * kTokenBytes / kMemory);
  const float cached = totals.num_blocks * (num_kv_heads * kBlockTokens * kTokenBytes / kCache);
  float rounds = ceilf(num_items / num_ctas) * (args.item_ns + totals.longest_item * args.block_ns);
  // Tiles of trees that are not done together wait for each other's tails.
  if (totals.num_tails > 0 && num_items > num_ctas) rounds *= 1.5f;
  float merge = 2.0f * totals.num_pair_slots * (kPartialBytes / kCache);
  if (totals.num_pair_slots > 0) {
    // A pair's slots are one warp's work.
    merge += 1600.0f +
             fmaxf(100.0f * totals.most_slots,
                   22.0f * (num_items <= num_ctas ? totals.most_share : totals.most_pair_slots));
  }
  if (totals.num_pair_slots > args.workspace.num_pair_slots)
    merge += 1e6f;  // some spans will not be split
  return fmaxf(fmaxf(read, cached), rounds) + merge;
}

/// Per span, in shared memory. The begin arrays have an entry more, the end of the last span.
struct SpanTable {
  int *row, *kv_len, *flags, *slot, *item, *wide_item, *tile, *wide_merge;
  static constexpr int kArrays = 8;

  __device__ SpanTable(int* shared, int num_spans) {
    int** arrays[kArrays] = {&row, &kv_len, &flags, &slot, &item, &wide_item, &tile, &wide_merge};
    for (int i = 0; i < kArrays; ++i) *arrays[i] = shared + i * (num_spans + 1);
  }
  __device__ int num_rows(int span) const { return row[span + 1] - row[span]; }
};

/// Marks the spans for the wide tiles of sm_90a, which are the fastest way wherever they are not
/// mostly empty, and those whose tiles are cut because there are too few for the SMs. Needs every
/// thread of the CTA.
__device__ void mark_wide_spans(const PlanArgs& args, const SpanTable& spans) {
  __shared__ int num_tiles, num_blocks, num_segments, longest, num_pair_slots;
  if (threadIdx.x == 0) num_tiles = num_blocks = num_segments = longest = num_pair_slots = 0;
  __syncthreads();
  for (int span = threadIdx.x; span < args.rows.num_spans; span += kPlanThreads) {
    const int num_rows = spans.num_rows(span), kv_len = spans.kv_len[span];
    if (spans.flags[span] != 0 || num_rows * args.group <= kMaxTilePairs) continue;
    spans.flags[span] = kIsWide;
    const WideCut cut(num_rows, kv_len, kIsCut | kHasSlots, args.group);
    const int mean_blocks = ceil_div(kv_len + num_rows / 2 + 1, kBlockTokens);
    atomicAdd(&num_tiles, cut.num_tiles);
    atomicAdd(&num_blocks, cut.num_tiles * mean_blocks);
    atomicAdd(&num_segments, cut.num_tiles * ceil_div(mean_blocks, kSegmentBlocks));
    atomicMax(&longest, cut.num_blocks);
    atomicAdd(&num_pair_slots,
              count_pair_slots(args, cut.num_slots, num_rows, args.workspace.num_pair_slots));
  }
  __syncthreads();
  if (num_tiles == 0 || num_pair_slots > args.workspace.num_pair_slots) return;
  // In blocks of a tile. Partial results are written and read at 5.5 TB/s.
  constexpr float kBlockTime = 650.0f, kMergeTime = 12.0f;
  const int num_sms = args.num_sms;
  const int whole = max(
      longest, ceil_div(num_tiles * args.num_kv_heads, num_sms) * ceil_div(num_blocks, num_tiles));
  const float cut = ceil_div(num_segments * args.num_kv_heads, num_sms) * kSegmentBlocks +
                    kMergeTime +
                    num_pair_slots * (2.0f * (kHeadDim + 2) * 4 / 5500.0f / kBlockTime);
  if (cut >= whole) return;
  for (int span = threadIdx.x; span < args.rows.num_spans; span += kPlanThreads) {
    const int num_tokens = spans.kv_len[span] + spans.num_rows(span);
    if ((spans.flags[span] & kIsWide) != 0 && num_tokens > 2 * kSegmentBlocks * kBlockTokens) {
      spans.flags[span] |= kIsCut;
    }
  }
}

/// Finds the cheapest strategy for the step; needs every thread of the CTA.
__device__ Strategy choose_strategy(const PlanArgs& args, const SpanTable& spans) {
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
    if (num_rows == 0 || (spans.flags[span] & kIsWide) != 0) continue;
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

}  // namespace openspec::span_attention
