#pragma once

/// A tile of few pairs over a range of blocks, of chains: decoding and short drafts, where reading
/// K and V is all the work.
///
/// A warp computes a block by itself, of its own copies of K and V; warps meet only where they
/// merge their blocks, one after the other. Keys are the rows of the products and pairs their
/// columns, so that 8 pairs are enough for whole ones.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/attention/decode_warp_tile.cuh"
#include "kernels/attention/math.cuh"
#include "kernels/attention/sums.cuh"
#include "kernels/attention/work.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"

namespace openspec::span_attention {

/// Shared memory: each warp's K and V; the sums of the segment so far, as the lanes have them; how
/// many of the item's blocks are in these.
template <int kHeadDim>
struct WarpLayout {
  static constexpr int kTiles = kMaxWarpTilePairs / kWarpTilePairs;
  static constexpr int kSumsAt = kDecodeWarps * 2 * Lines<kHeadDim>::kStageBytes;
  static constexpr int kStatsAt = kSumsAt + kTiles * (kHeadDim / 16) * 32 * 16;
  static constexpr int kNumMergedAt = kStatsAt + kTiles * 32 * 16;
  static constexpr int kUsedBytes = kNumMergedAt + 16;
};

/// Waits until `count` blocks are merged, and sees what their warps wrote.
__device__ __forceinline__ void wait_for_turn(const int* num_merged, int count) {
  while (load_from_cta(num_merged) != count) {
  }
}

/// Where a warp begins with an item: known before the item itself is at hand.
struct WarpStart {
  int kv_head, block, block_end, end;
  uint32_t line;  // of K of the block's keys 8 (lane % 8) .. 8 (lane % 8) + 7

  __device__ __forceinline__ WarpStart(const WorkItem* item, int kv_head, bool is_wanted)
      : kv_head(kv_head), block(0), block_end(0), end(0), line(0) {
    if (!is_wanted) return;
    const int warp = threadIdx.x / 32;
    block = __ldcg(&item->block_begin) + warp;
    block_end = __ldcg(&item->block_end);
    end = __ldcg(&item->end);
    line = __ldcg(item->lines + warp * (kBlockTokens / kLineRows) + threadIdx.x % 8);
  }
};

/// Copies blocks for one warp, K and then V. A lane copies one chunk of every kKeyStep-th key.
template <int kHeadDim>
struct WarpCopier : Lines<kHeadDim> {
  using Lines<kHeadDim>::kLineBytes, Lines<kHeadDim>::kStageBytes, Lines<kHeadDim>::kChunks;
  static constexpr int kKeyStep = 32 / kChunks;

  const AttentionArgs& args;
  uint32_t keys, values;  // where to
  const char* kv;         // the lane's chunk of the KV head's first line, or of one of the next
  int block, block_end, end;
  uint32_t line;

  __device__ __forceinline__ WarpCopier(const AttentionArgs& args, unsigned char* shared)
      : args(args) {
    keys = shared_address(shared) + threadIdx.x / 32 * (2 * kStageBytes);
    values = keys + kStageBytes;
  }
  __device__ __forceinline__ bool has_block() const { return block < block_end; }

  __device__ __forceinline__ void go_to(const WarpStart& start) {
    const int lane = threadIdx.x % 32;
    kv = args.kv +
         static_cast<int64_t>(start.kv_head * args.page_size + lane / kChunks) * kLineBytes +
         lane % kChunks * 16;
    block = start.block;
    block_end = start.block_end;
    end = start.end;
    line = start.line;
  }
  /// To a later block of the same item. `pages` are the sequence's.
  __device__ __forceinline__ void go_to(int later, const int32_t* pages) {
    block = later;
    // After the end: any line that exists.
    const uint32_t token = min(later * kBlockTokens + static_cast<int>(threadIdx.x) % 8 * kLineRows,
                               (end - 1) & ~(kLineRows - 1));
    const int index = static_cast<int>(uint64_t{token} * args.page_reciprocal >> 34);
    line = static_cast<uint32_t>(pages[index]) * (2u * args.num_kv_heads * args.page_size) +
           (token - index * args.page_size);
  }
  __device__ __forceinline__ void copy_keys() const { copy(keys, kv); }
  __device__ __forceinline__ void copy_values() const {
    copy(values,
         kv + uint64_t{static_cast<uint32_t>(args.num_kv_heads) * args.page_size} * kLineBytes);
  }

 private:
  /// Keys from `end` on become zero.
  __device__ __forceinline__ void copy(uint32_t stage, const char* from) const {
    if (has_block()) {
      const int chunk = threadIdx.x % kChunks, key = threadIdx.x / kChunks % kKeyStep;
      int visible = end - block * kBlockTokens - key;
      stage += key * kLineBytes;
      const uint32_t place = (chunk ^ key) * 16;
#pragma unroll 2
      for (int i = 0; i < kBlockTokens / kLineRows; ++i) {
        const char* lines = from + uint64_t{__shfl_sync(0xffffffffu, line, i)} * kLineBytes;
#pragma unroll
        for (int j = 0; j < kLineRows; j += kKeyStep) {
          copy_async(stage + j * kLineBytes + (place ^ (j * 16)), lines + j * kLineBytes,
                     j < visible);
        }
        stage += kLineRows * kLineBytes;
        visible -= kLineRows;
      }
    }
    commit_copies();
  }
};

/// Attention of an item's pairs, 8 kTiles at most, over its blocks. `kept` is the CTA's: the
/// segments so far. `copier` has started on the warp's first block; it goes on with the item after
/// this one.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void attend_by_warps(const AttentionArgs& args, const WorkItem& item,
                                                int kv_head, WarpCopier<kHeadDim>& copier,
                                                const WarpStart& next, unsigned char* shared,
                                                float4* kept) {
  using Tile = WarpTile<kHeadDim, kTiles>;
  using Layout = WarpLayout<kHeadDim>;
  constexpr int kLineBytes = Tile::kLineBytes;
  const int lane = opaque_thread() % 32;
  const float scale = args.scale;
  const int first_row = item.tile_row, num_pairs = item.tile_rows * args.group;
  const ItemPairs pairs = {args, item, kv_head, first_row, num_pairs};
  const int block_begin = item.block_begin, block_end = item.block_end;
  const int32_t* pages = args.pages + static_cast<int64_t>(item.seq) * args.max_pages_per_seq;
  int block = copier.block;
  if (block >= block_end) {
    copier.go_to(next);
    copier.copy_keys();
    copier.copy_values();
    return;
  }

  typename Tile::Queries query;
  int num_visible[kTiles][2];
  Tile::load_queries(pairs, lane, query, num_visible);

  // Lane addresses of the fragments. A step of 16 columns flips bits 5 and 6, or adds.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const uint32_t key_at =
      copier.keys + (matrix % 2 * 8 + matrix_row) * kLineBytes + ((matrix / 2 ^ matrix_row) * 16);
  const uint32_t value_at =
      copier.values + (matrix / 2 * 8 + matrix_row) * kLineBytes + ((matrix % 2 ^ matrix_row) * 16);

  const bool is_direct = item.num_slots == 0;
  const int num_singles =
      is_direct ? 0 : (kSegmentBlocks - block_begin % kSegmentBlocks) % kSegmentBlocks;
  float4* sums_at = reinterpret_cast<float4*>(shared + Layout::kSumsAt) + lane;
  float4* stats_at = reinterpret_cast<float4*>(shared + Layout::kStatsAt) + lane;
  int* num_merged = reinterpret_cast<int*>(shared + Layout::kNumMergedAt);
  for (;;) {
    const int later = block + kDecodeWarps;
    const bool has_later = later < block_end;
    if (has_later) {
      copier.go_to(later, pages);
    } else {
      copier.go_to(next);
    }
    wait_for_copies<1>();
    __syncwarp();  // K of this block is there

    typename Tile::Scores scores = {};
    Tile::multiply_keys(key_at, query, scores);
    __syncwarp();  // everyone is done with K
    copier.copy_keys();

    if ((block + 1) * kBlockTokens > item.first_visible || block * kBlockTokens < args.hidden_end) {
      Tile::hide_tokens(pairs, block, lane, num_visible, scores);
    }
    typename Tile::Sums sums;
    typename Tile::Weights weights;
    Tile::soften(scores, scale, sums, weights);

    wait_for_copies<1>();
    __syncwarp();  // V of this block is there
    Tile::weigh_values(value_at, weights, sums);
    __syncwarp();  // everyone is done with V
    copier.copy_values();

    const int in_item = block - block_begin;
    const bool is_last = block + 1 == block_end;
    wait_for_turn(num_merged, in_item);
    Tile::merge(pairs, block, block_begin, is_last, is_direct, num_singles, scale, lane, sums_at,
                stats_at, kept, sums);
    __syncwarp();
    if (lane == 0) store_for_cta(num_merged, in_item + 1);
    if (!has_later) break;
    block = later;
  }
}

/// Tiles of up to kMaxWarpTilePairs pairs over ranges of blocks: few rows of each span, no trees.
/// While a CTA is at one item, the next one's first blocks are on their way.
template <int kHeadDim>
__global__ void __launch_bounds__(kDecodeWarpThreads, kDecodeCtasPerSm)
    decode_warp_kernel(const __grid_constant__ AttentionArgs args) {
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
  WarpCopier<kHeadDim> copier(args, shared);
  int* num_merged = reinterpret_cast<int*>(shared + WarpLayout<kHeadDim>::kNumMergedAt);
  const bool is_early = args.is_early;
  if (!is_early) cuda::wait_for_previous_kernel();

  // Exists, whether it is one of the step's or not.
  const WarpStart start(first, index % num_kv_heads, true);
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
    const WarpStart next_start(items + next / num_kv_heads, next % num_kv_heads, has_next);
    if (has_next) chunk_bits = load_chunk(items + next / num_kv_heads);
    const auto attend = [&](auto num_tiles) {
      attend_by_warps<kHeadDim, num_tiles.value>(args, item, kv_head, copier, next_start, shared,
                                                 scratch_of<kHeadDim>(args));
    };
    switch (ceil_div(item.tile_rows * args.group, kWarpTilePairs)) {
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
      for (int pair = pairs.begin + threadIdx.x / 32; pair < pairs.end; pair += kDecodeWarps) {
        merge_pair<kHeadDim>(args, item, kv_head, pair);
      }
    }
    if (!has_next) break;
    index = next;
    next = queue.next(&message);
    __syncthreads();
  }
  queue.close();
}

}  // namespace openspec::span_attention
