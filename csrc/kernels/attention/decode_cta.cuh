#pragma once

/// A tile of up to 64 pairs over a range of blocks, where reading K and V is the work: decoding and
/// drafts, trees too.

#include "kernels/attention/decode_cta_tile.cuh"
#include "kernels/attention/math.cuh"
#include "kernels/attention/sums.cuh"
#include "kernels/attention/tree_tail.cuh"
#include "kernels/attention/work.cuh"
#include "kernels/common/launch.cuh"

namespace openspec::span_attention {

/// Attention of an item's pairs over its blocks. Uses all of the CTA's shared memory; the caller
/// puts a barrier between calls. With `waits` it waits for the previous kernel, and copies ahead of
/// that what was there before the step; not for a row's tail.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void attend_by_cta(const AttentionArgs& args, const WorkItem& item,
                                              int kv_head, unsigned char* shared, float4* scratch,
                                              bool waits) {
  using Tile = CtaTile<kHeadDim, kTiles>;
  using Layout = CtaLayout<kHeadDim, kTiles>;
  constexpr int kLineBytes = Tile::kLineBytes, kStageBytes = Tile::kStageBytes;
  constexpr int kKeyTiles = Tile::kKeyTiles;
  const int thread = opaque_thread();
  const int warp = thread / 32, lane = thread % 32;
  const int part = warp % Tile::kParts, first_pair = warp / Tile::kParts * 16;
  const uint32_t ring = shared_address(shared);
  const float scale = args.scale;

  const bool is_tail = item.tail_row >= 0;
  const int first_row = is_tail ? item.tail_row : item.tile_row;
  const int num_pairs = (is_tail ? 1 : item.tile_rows) * args.group;
  const ItemPairs pairs = {args, item, kv_head, first_row, num_pairs};
  const int block_begin = item.block_begin, block_end = item.block_end;

  CtaCopier<kHeadDim> keys;
  keys.ancestors = nullptr;
  if (takes_trees(kHeadDim) && is_tail) {
    keys.ancestors = Tile::list_ancestors(args, item, warp, lane, shared + Layout::kAncestorsAt);
  }
  keys.go_to(args, item, kv_head, thread);
  if (is_tail) {
    keys.find_lines(block_begin);
  } else {
    keys.take_lines(item, thread);
  }
  Tile::start_copies(pairs, block_begin, block_end, thread, ring, waits, keys);

  int num_visible[2];
  Tile::count_visible(pairs, first_pair, lane, num_visible);
  const int all_visible = item.first_visible;

  // Lane addresses of the fragments. A step of 16 columns flips bits 5 .. 7, a step of rows adds.
  // One tile of 8 keys: two steps at a time.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const uint32_t first_key = part * kKeyTiles * 8 + (kTiles == 1 ? 0 : matrix / 2 * 8) + matrix_row;
  const uint32_t key_at =
      first_key * kLineBytes + (((kTiles == 1 ? matrix : matrix % 2) ^ matrix_row) * 16);
  const uint32_t value_at = (matrix % 2 * 8 + matrix_row) * kLineBytes +
                            (((part * Tile::kDimTiles + matrix / 2) ^ matrix_row) * 16);
  const uint32_t pair_at = first_pair + matrix % 2 * 8 + matrix_row;
  const uint32_t swizzled = (matrix / 2 ^ matrix_row) * 16;
  const uint32_t weights_at = ring + Layout::kWeightsAt + pair_at * kBlockTokens * 2 + swizzled;
  float* maxima = reinterpret_cast<float*>(shared + Layout::kMaximaAt) + first_pair + lane / 4;
  const uint32_t query_at = ring + Layout::kQueriesAt + pair_at * kLineBytes + swizzled;

  // Blocks are merged in runs, up to the end of the item or of a segment. Where the item is no
  // whole tile and began inside the segment, a run is one block.
  const bool is_direct = item.num_slots == 0;
  bool has_kept = false;
  int num_runs = 0;
  typename Tile::TileSums sums;
  sums.clear();

  // Half stages: of V before, of K and V of this block.
  uint32_t before = ring + 4 * kStageBytes, key_stage = ring, value_stage = ring + kStageBytes;
#pragma unroll 1
  for (int block = block_begin; block < block_end; ++block) {
    wait_for_copies<3>();
    __syncthreads();  // K of this block is there, and everyone is done with the block before
    if (block + 2 < block_end) keys.copy(before, block + 2, 0);
    commit_copies();

    float scores[kKeyTiles][4] = {}, maximum[2];
    Tile::multiply_keys(key_stage, key_at, query_at, scores);
    if ((block + 1) * kBlockTokens > all_visible || block * kBlockTokens < args.hidden_end) {
      Tile::hide_tokens(pairs, is_tail, block, part, lane, first_pair, num_visible, scores);
    }
    Tile::share_maxima(scores, part, lane, maxima);
    __syncthreads();
    Tile::soften(scores, maxima, part, lane, first_pair, scale, shared, maximum);

    wait_for_copies<3>();
    __syncthreads();  // V of this block and the weights are there; everyone is done with K
    if (block + 2 < block_end) keys.copy(key_stage, block + 2, keys.value_offset);
    commit_copies();
    if (block + 3 < block_end) keys.find_lines(block + 3);

    Tile::weigh_values(value_stage, value_at, weights_at, maximum, scale, sums);
    before = value_stage;
    key_stage = Tile::next(ring, value_stage);
    value_stage = Tile::next(ring, key_stage);

    const bool is_last = block + 1 == block_end;
    const bool is_single =
        !is_direct && (is_tail || block / kSegmentBlocks * kSegmentBlocks < block_begin);
    if (!is_last && !is_single && (block + 1) % kSegmentBlocks != 0) continue;
    // Nothing of what follows is to be computed ahead of the loop.
    const int thread_here = opaque_thread();
    if (has_kept) sums.merge_into_kept(scratch, scale);
    if (is_direct && !is_last) {
      sums.keep(scratch);
      has_kept = true;
    } else {
      Tile::store(pairs, num_runs, thread_here, is_direct, sums);
    }
    sums.clear();
    ++num_runs;
  }
}

/// Goes from an item's blocks to the tail after them. A barrier for the CTA.
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

/// Tiles of up to 16 kTiles pairs over ranges of blocks: many rows, or trees.
template <int kHeadDim, int kTiles>
__global__ void __launch_bounds__(kDecodeCtaThreads, CtaLayout<kHeadDim, kTiles>::kMostCtasPerSm)
    decode_cta_kernel(const __grid_constant__ AttentionArgs args) {
  cuda::allow_next_kernel();
  // Lines of the largest heads, whose columns are found by flipping bits of an address.
  extern __shared__ __align__(512) unsigned char cta_shared[];
  unsigned char* shared = cta_shared;
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
  const auto attend_tail = [&](int kv_head) {
    if constexpr (takes_trees(kHeadDim))
      attend_tails<kHeadDim, kTiles>(args, item, kv_head, shared);
  };
  for (;;) {
    const int kv_head = index % args.num_kv_heads;
    const bool has_blocks = !item.is_tile_tail && item.block_begin < item.block_end;
    // Rows' tails read what the step writes before anything else.
    const bool waits_later = is_early && has_blocks && item.tail_row < 0;
    if (is_early && !waits_later) cuda::wait_for_previous_kernel();
    is_early = false;
    if (!waits_later) queue.prefetch();
    if (item.is_tile_tail) {
      attend_tail(kv_head);
    } else if (has_blocks) {
      attend_by_cta<kHeadDim, kTiles>(args, item, kv_head, shared, scratch_of<kHeadDim>(args),
                                      waits_later);
    }
    if (waits_later) queue.prefetch();
    if (item.tail_end > 0) {
      go_to_tail(item);
      attend_tail(kv_head);
    }
    if (item.num_slots > 0) {
      const PairRange pairs = arrive(args, item, kv_head, merges_together, &message);
      for (int pair = pairs.begin + threadIdx.x / 32; pair < pairs.end; pair += kDecodeCtaWarps) {
        merge_pair<kHeadDim>(args, item, kv_head, pair);
      }
    }
    index = queue.next(&message);
    if (index >= num_items) break;
    fetch(item, args.workspace.items + index / args.num_kv_heads);
    wait_for_fetch();
  }
  queue.close();
}

}  // namespace openspec::span_attention
