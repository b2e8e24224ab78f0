#pragma once

/// How a step's attention is cut into work items, and where the workspace keeps them.
///
/// What is summed with what is fixed by token indices alone. Visible tokens are cut into *blocks*
/// of kBlockTokens; a block's result (maximum, sum of exponentials, weighted sum of V) starts from
/// zero. Blocks are merged left to right into *segments* of kSegmentBlocks, segments left to right
/// into the row's result; both by merge_weights() and merged() of math.cuh. Two
/// levels, because whoever computes part of a segment has to hand its blocks on one by one, while a
/// whole segment is one partial result: long contexts stay cheap to cut over the SMs.
///
/// An item is a tile of consecutive rows (times the q heads of one KV head) and a range of blocks.
/// Which items there are depends on what the machine needs to be busy, never the results.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/attention/span_attention.h"

namespace openspec::span_attention {

constexpr int kMinHeadDim = 64, kMidHeadDim = 128, kMaxHeadDim = 256;  // and none between
/// Whether trees of such heads can be attended to: what a tile's tail keeps has to fit an SM.
__host__ __device__ constexpr bool takes_trees(int head_dim) { return head_dim < kMaxHeadDim; }
constexpr int kBlockTokens = 64;
constexpr int kSegmentBlocks = 8;
constexpr int kMaxGroup = 8;  // q heads per KV head
constexpr int kMaxSpans = 1024;
/// Lines of K and V that the tail of a tile of 16 num_tiles pairs has room for: all after the
/// shared blocks up to the tile's last row. Rows of tiles with more have a tail each.
__host__ __device__ constexpr int tail_lines_of(int num_tiles) {
  return num_tiles == 4 ? 192 : 144;
}
constexpr int kAncestorWords = kMaxTreeRows / 32;
constexpr int kLineRows = 8;  // tokens per entry of WorkItem::lines; divides every page size

/// A token's K or V of one head, or a pair's q, is a line, in shared memory with its chunks of 16
/// bytes swizzled by its number; a block's lines are a stage.
template <int kHeadDim>
struct Lines {
  static constexpr int kLineBytes = kHeadDim * 2;
  static constexpr int kStageBytes = kBlockTokens * kLineBytes;
  static constexpr int kChunks = kLineBytes / 16;
};

constexpr int kPrefillThreads = 128;  // of prefill_mma_kernel
constexpr int kPrefillWarps = kPrefillThreads / 32;
constexpr int kDecodeCtaThreads = 256;
constexpr int kDecodeCtaWarps = kDecodeCtaThreads / 32;
constexpr int kDecodeWarps = 3;
constexpr int kDecodeWarpThreads = kDecodeWarps * 32;

// A *pair* is a row and one q head of the item's KV head; pairs are the M dimension of the
// products.
constexpr int kWarpTilePairs = 8, kMaxWarpTilePairs = 24;
constexpr int kMinTilePairs = 16;
constexpr int kMaxTilePairs = 64;
constexpr int kPrefillTilePairs = 128;

// Fixed grids; CTAs beyond what fits at once find nothing left to do, or wait for a place. Split
// tiles: at most, and as many as fit at once.
constexpr int kDecodeCtasPerSm = 2;
constexpr int kPrefillCtasPerSm = 2;
// float4 per thread that a CTA keeps of the segments so far: sums of at most 8 tiles of 16 x 8, or
// 32 in prefill_mma_kernel, and maxima and normalisers. Of the largest heads a CTA that is alone on
// its SM has the room of two.
constexpr int kDecodeScratch = 8 + 1;
constexpr int kPrefillScratch = 32 + 2;

// Steps with room for fewer rows than this have no prefill tiles beside others, and spare the
// launch.
constexpr int kMinRowsForPrefill = 257;
// Rows from which steps have prefill tiles beside others where these are sm_90a's.
constexpr int kMinRowsForWgmma = kMinRowsOfLongSpans;

// Steps with trees and room for so many pairs of a KV head have tiles of a quarter.
constexpr int kMaxTreePairsForSmallTiles = 128;

/// Partial results by pair: enough to cut 64 sequences of 8k tokens with 4 rows each into
/// segments, with 32 heads. What does not fit is not cut.
constexpr int kMaxPairSlots = 128 * 1024;

/// One row tile and one range of blocks, for every KV head.
struct alignas(64) WorkItem {
  int32_t tile_row;       // first row of the tile
  int32_t tile_rows;      // rows of the tile: whole rows, all q heads of the KV head
  int32_t first_visible;  // tokens that the tile's first row sees; each next one sees one more, but
                          // no more than `end`
  // Of trees, after the shared blocks, rows have keys of their own: the rest of the committed
  // prefix, then their ancestors by depth. An item of these is a tail, of one row or of the tile.
  int32_t tail_row;                // -1: not of one row
  int32_t is_tile_tail;            // boolean
  int32_t kv_len;                  // tokens before the span
  int32_t seq;                     // slot in the sequence table
  int32_t block_begin, block_end;  // empty for tiles that end before the range
  int32_t end;  // tokens that the last row sees; keys from here on count as zero. Of a tile's tail:
                // tokens up to its last row
  int32_t num_shared_blocks;  // blocks that all items but tails cover
  // Tiles of several items; num_slots 0: the item is the whole tile and writes its output itself.
  int32_t num_slots;     // partial results per pair
  int32_t first_slot;    // of block_begin
  int32_t range_blocks;  // the grid of the ranges
  int32_t slot_base;     // pair slot where the tile's partial results begin
  int32_t num_arrivals;  // items of the tile
  int32_t arrival;       // this one's place among them
  int32_t tile_index;    // of the counters
  int32_t is_tree;
  int32_t tail_end;  // of an item with its tile's tail after its blocks: tokens up to the tile's
                     // last row; else 0
  // For each 8 tokens of the first kDecodeWarps blocks: line of head_dim elements in the layer, KV
  // head 0's K.
  uint32_t lines[kDecodeWarps * kBlockTokens / kLineRows];
};
static_assert(sizeof(WorkItem) == 192);

/// Items beyond the first of each CTA are drawn from a ticket counter, which the last CTA clears.
struct Tickets {
  int32_t next;
  int32_t num_done;
};

struct WorkHeader {
  int32_t num_items;           // times num_kv_heads
  int32_t num_prefill_items;   // times num_kv_heads
  int32_t merges_together;     // whether all items of a tile merge it; else the last one does
  int32_t num_prefill_merges;  // times num_kv_heads; come after the prefill items
  Tickets tickets, prefill_tickets;
};

// Pairs of a merge after the prefill items: a warp for each.
constexpr int kPrefillMergePairs = 8;
static_assert(kPrefillMergePairs >= kMaxGroup);

/// A share of a tile to merge by a CTA of its own.
struct MergeItem {
  int32_t item;  // any item of the tile
  int32_t first_pair;
};

/// Few rows, no trees (decode_cluster.cuh): an item is a tile of up to kMinTilePairs pairs
/// and kClusterBlocks blocks, for every KV head. A cluster of CTAs computes it: CTA `rank` has
/// blocks rank and rank + kClusterCtas of the item, and merges one share of the columns.
constexpr int kClusterCtas = 8;
constexpr int kClusterBlocks = 16;  // two segments
// Room for rows in a step of clusters: of few short spans, and of any. More items take several
// rounds of clusters, and where there are many bytes these count, not latencies.
constexpr int kMaxClusterRows = kMaxRowsOfShortSpans;
constexpr int kMaxClusterBatchRows = kMinRowsOfFewSpans - 1;

/// What one CTA of an item needs, one cache line.
struct alignas(128) ClusterItem {
  int32_t tile_row;       // first row of the tile
  int32_t num_pairs;      // of the tile
  int32_t first_visible;  // as WorkItem
  int32_t end;            // tokens that the last row sees; keys from here on count as zero
  int32_t block;          // of the item, the first
  int32_t num_blocks;     // 0 for tiles that end before the item's blocks
  // Tiles of several items; num_slots 0: the item is the whole tile and writes its output itself.
  int32_t num_slots;  // partial results per pair, one per segment
  int32_t slot_base;  // pair slot where the tile's partial results begin
  int32_t num_arrivals;
  int32_t tile_index;
  int32_t num_segments;  // that any of the tile's rows sees
  int32_t kv_len;        // tokens before the span
  int32_t reserved[4];
  // For each 8 tokens of both blocks: line of head_dim elements in the layer, KV head 0's K.
  uint32_t lines[2 * kBlockTokens / kLineRows];
};
static_assert(sizeof(ClusterItem) == 128);

struct Workspace {
  WorkHeader* header;
  WorkItem* items;
  WorkItem* prefill_items;
  MergeItem* prefill_merges;
  int32_t* num_arrived;  // [tiles, num_kv_heads] zero between launches
  int32_t* num_merged;   // as num_arrived
  uint32_t* ancestors;   // [num_rows, kAncestorWords] of tree rows: bit i is row i of the span
  ClusterItem* cluster_items;  // [items, kClusterCtas]
  int32_t* cluster_arrived;    // [tiles, num_kv_heads, kClusterCtas] zero between launches
  float4* scratch;             // [CTAs, kDecodeScratch or kPrefillScratch, threads]
  float2* partial_stats;       // [pair slots] maximum, normaliser
  float* partial_sums;         // [pair slots, head_dim]
  int32_t num_pair_slots;
  int32_t max_items;
  int32_t max_cluster_items;
};

/// What the workspace is sized by; every size grows with every field.
struct Geometry {
  int num_rows, num_spans, num_q_heads, head_dim, max_tokens, num_sms;
};

/// Returns the bytes in use.
inline size_t lay_out(const Geometry& geometry, void* base, Workspace& workspace) {
  size_t used = 0;
  const auto take = [&](auto*& pointer, size_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + used);
    used += (count * sizeof(T) + 255) / 256 * 256;
  };
  const size_t rows = geometry.num_rows, spans = geometry.num_spans;
  const size_t heads = geometry.num_q_heads, num_sms = geometry.num_sms;
  const int64_t max_blocks = (geometry.max_tokens + kBlockTokens - 1) / kBlockTokens;
  const int64_t most_pair_slots = static_cast<int64_t>(rows * heads) * max_blocks;
  workspace.num_pair_slots =
      static_cast<int32_t>(most_pair_slots < kMaxPairSlots ? most_pair_slots : kMaxPairSlots);
  // Tiles have kMinTilePairs / kMaxGroup rows or more, save the last one of a span; or, in trees
  // without room for partial results, one row.
  const size_t max_tiles = rows;
  // An item of a tile that is cut takes a slot for every head of a row or more, or is a row's tail.
  const size_t max_items = workspace.num_pair_slots / heads + max_tiles + rows;
  workspace.max_items = static_cast<int32_t>(max_items);
  take(workspace.header, 1);
  take(workspace.items, max_items);
  take(workspace.prefill_items,
       rows / (kPrefillTilePairs / kMaxGroup) + spans + workspace.num_pair_slots / heads);
  // A span's only tile has no more of them than rows. Of several, each has kPrefillTilePairs /
  // kMaxGroup of them or fewer, and the span half as many rows for each tile or more.
  take(workspace.prefill_merges, 2 * rows);
  take(workspace.num_arrived, max_tiles * heads);
  take(workspace.num_merged, max_tiles * heads);
  take(workspace.ancestors, rows * kAncestorWords);
  const size_t cluster_rows = rows < kMaxClusterRows ? rows : kMaxClusterRows;
  const size_t max_cluster_items =
      cluster_rows * ((max_blocks + kClusterBlocks - 1) / kClusterBlocks);
  workspace.max_cluster_items = static_cast<int32_t>(max_cluster_items);
  take(workspace.cluster_items, max_cluster_items * kClusterCtas);
  take(workspace.cluster_arrived, cluster_rows * heads * kClusterCtas);
  const size_t decode_scratch = kDecodeCtasPerSm * kDecodeScratch * kDecodeCtaThreads;
  const size_t prefill_scratch = geometry.num_rows >= kMinRowsForPrefill
                                     ? kPrefillCtasPerSm * kPrefillScratch * kPrefillThreads
                                     : 0;
  take(workspace.scratch,
       num_sms * (decode_scratch > prefill_scratch ? decode_scratch : prefill_scratch));
  take(workspace.partial_stats, workspace.num_pair_slots);
  take(workspace.partial_sums,
       static_cast<size_t>(workspace.num_pair_slots) * static_cast<size_t>(geometry.head_dim));
  return used;
}

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// Blocks of a segment that come to one partial result: those up to the end of the range that the
/// segment begins in. Each block after them has a partial result of its own.
__host__ __device__ inline int first_run_of(int segment, int range_blocks) {
  const int begin = segment * kSegmentBlocks;
  const int run = (begin / range_blocks + 1) * range_blocks - begin;
  return run < kSegmentBlocks ? run : kSegmentBlocks;
}

/// Partial results of blocks [0, num_blocks), which end where a range or the tile does.
__host__ __device__ inline int num_slots_of(int num_blocks, int range_blocks) {
  if (range_blocks % kSegmentBlocks == 0) return ceil_div(num_blocks, kSegmentBlocks);
  int num_slots = 0;
  for (int begin = 0; begin < num_blocks; begin += kSegmentBlocks) {
    const int left = num_blocks - begin;
    const int blocks = left < kSegmentBlocks ? left : kSegmentBlocks;
    const int singles = blocks - first_run_of(begin / kSegmentBlocks, range_blocks);
    num_slots += 1 + (singles > 0 ? singles : 0);
  }
  return num_slots;
}

/// How spans are cut: pairs per tile, blocks per range; and whether a CTA that has all shared
/// blocks of a tree's tile has its tail as well.
struct Strategy {
  int tile_pairs, range_blocks;
  bool joins_tails;
};

// kIsCut: prefill tiles, an item for each segment.
enum SpanFlags : int { kIsTree = 1, kIsPrefill = 2, kHasSlots = 4, kIsCut = 8 };

/// A span's rows cut by a strategy.
struct SpanCut {
  int tile_rows, num_tiles;
  int num_shared_blocks, num_ranges, range_blocks;  // ranges of the shared blocks, per tile
  int num_slots;                                    // 0: each item is a whole tile
  bool joins_tails;                                 // of the tiles to their only ranges
  int num_tile_tails, num_tails;  // tails of the first tiles, and in all; after the other items

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
      const bool is_cut = has_slots && num_blocks > range_blocks;
      num_shared_blocks = num_blocks;
      num_ranges = is_cut ? ceil_div(num_blocks, range_blocks) : 1;
      num_slots = is_cut ? num_slots_of(num_blocks, range_blocks) : 0;
    }
  }
  __device__ int num_items() const { return num_tiles * num_ranges + num_tails; }
  /// The row of the span that a tail begins with.
  __device__ int tail_row(int tail) const {
    return tail < num_tile_tails ? tail * tile_rows
                                 : num_tile_tails * tile_rows + tail - num_tile_tails;
  }
};

/// A span's rows cut into prefill tiles.
struct PrefillCut {
  int tile_rows, num_tiles, num_blocks;
  int num_ranges;  // per tile
  int num_slots;   // 0: each item is a whole tile
  int num_merges;  // per tile

  __device__ PrefillCut(int num_rows, int kv_len, int flags, int group) {
    tile_rows = kPrefillTilePairs / group;
    num_tiles = ceil_div(num_rows, tile_rows);
    num_blocks = ceil_div(kv_len + num_rows, kBlockTokens);
    const bool is_cut = (flags & kIsCut) != 0 && (flags & kHasSlots) != 0;
    num_ranges = is_cut ? ceil_div(num_blocks, kSegmentBlocks) : 1;
    num_slots = is_cut ? num_ranges : 0;
    num_merges = is_cut ? ceil_div(min(tile_rows, num_rows) * group, kPrefillMergePairs) : 0;
  }
};

}  // namespace openspec::span_attention
