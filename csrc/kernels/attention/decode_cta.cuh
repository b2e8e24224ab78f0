#pragma once

/// A tile of up to 64 pairs over a range of blocks, where reading K and V is the work: decoding and
/// drafts, trees too.

#include "kernels/attention/math.cuh"
#include "kernels/attention/sums.cuh"
#include "kernels/attention/tree_tail.cuh"
#include "kernels/attention/work.cuh"
#include "kernels/common/launch.cuh"

namespace openspec::span_attention {

// Half stages in the ring of shared memory: K or V of one block each.
constexpr int kDecodeRing = 5;

/// Shared memory behind the ring: Q, as K; p as bf16, rows of 128 bytes; each warp's maxima.
template <int kHeadDim, int kTiles>
struct CtaLayout {
  static constexpr int kQueriesAt = kDecodeRing * Lines<kHeadDim>::kStageBytes;
  static constexpr int kWeightsAt = kQueriesAt + kTiles * 16 * Lines<kHeadDim>::kLineBytes;
  static constexpr int kMaximaAt = kWeightsAt + kTiles * 16 * kBlockTokens * 2;
  static constexpr int kAncestorsAt = kMaximaAt + kDecodeCtaWarps * 16 * 4;
  static constexpr int kUsedBytes = kAncestorsAt + kMaxTreeRows;

  // Large tiles of large heads keep an SM busy alone.
  static constexpr int kMostCtasPerSm =
      kTiles == 4 && kHeadDim == kMaxHeadDim ? 1 : kDecodeCtasPerSm;
};

/// Copies an item's K and V to shared memory. A thread copies one chunk of every kKeyStep-th key.
template <int kHeadDim>
struct CtaCopier : Lines<kHeadDim> {
  using Lines<kHeadDim>::kLineBytes, Lines<kHeadDim>::kChunks;
  static constexpr int kKeyStep = kDecodeCtaThreads / kChunks, kKeys = kBlockTokens / kKeyStep;

  const char* kv;            // the thread's chunk of the KV head's first line
  const int32_t* pages;      // of the sequence
  const uint8_t* ancestors;  // in shared memory: row of the span at each depth; null: all rows
  uint64_t value_offset;     // from K to V
  uint32_t page_lines, page_reciprocal;
  int page_size, kv_len, end;
  uint32_t lines[kKeys];  // of the block to copy next

  __device__ __forceinline__ void find_lines(int block) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      int token = min(block * kBlockTokens + i * kKeyStep + static_cast<int>(threadIdx.x) / kChunks,
                      end - 1);
      if (ancestors != nullptr && token >= kv_len) token = kv_len + ancestors[token - kv_len];
      const int index =
          static_cast<int>(uint64_t{static_cast<uint32_t>(token)} * page_reciprocal >> 34);
      lines[i] = static_cast<uint32_t>(pages[index]) * page_lines + (token - index * page_size);
    }
  }
  /// Starts copying the block of `lines`: K, or V with value_offset. Keys from `end` on become
  /// zero.
  __device__ __forceinline__ void copy(uint32_t stage, int block, uint64_t offset) const {
    const int chunk = threadIdx.x % kChunks, key = threadIdx.x / kChunks;
    const uint32_t to = stage + key * kLineBytes + ((chunk ^ (key % 8)) * 16);
    const int visible = end - block * kBlockTokens - key;
    const char* from = kv + offset;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      copy_async(to + i * kKeyStep * kLineBytes, from + uint64_t{lines[i]} * kLineBytes,
                 i * kKeyStep < visible);
    }
  }
};

/// Attention of an item's pairs over its blocks. The warps share out kTiles x 16 pairs; the
/// kDecodeCtaWarps / kTiles warps of 16 pairs split first a block's keys, then the columns of the
/// output. Uses all of the CTA's shared memory; the caller puts a barrier between calls. With
/// `waits` it waits for the previous kernel, and copies ahead of that what was there before the
/// step; not for a row's tail.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void attend_by_cta(const AttentionArgs& args, const WorkItem& item,
                                              int kv_head, unsigned char* shared, float4* scratch,
                                              bool waits) {
  using Layout = CtaLayout<kHeadDim, kTiles>;
  using Copier = CtaCopier<kHeadDim>;
  constexpr int kLineBytes = Lines<kHeadDim>::kLineBytes,
                kStageBytes = Lines<kHeadDim>::kStageBytes;
  constexpr int kChunks = Lines<kHeadDim>::kChunks;
  constexpr int kParts = kDecodeCtaWarps / kTiles;
  constexpr int kKeyTiles = kBlockTokens / 8 / kParts, kDimTiles = kHeadDim / 8 / kParts;
  constexpr int kDimChunk = kTiles == 4 ? 4 : 2;  // column tiles at a time
  static_assert(kKeyTiles > 0 && kDimTiles >= kDimChunk && (kTiles == 1 || kKeyTiles % 2 == 0));
  constexpr int kSteps = kHeadDim / 16, kKeySteps = kBlockTokens / 16;

  const int thread = opaque_thread();
  const int warp = thread / 32, lane = thread % 32;
  const int part = warp % kParts, first_pair = warp / kParts * 16;
  const uint32_t ring = shared_address(shared);
  const float scale = args.scale;

  const bool is_tail = item.tail_row >= 0;
  const int first_row = is_tail ? item.tail_row : item.tile_row;
  const int num_pairs = (is_tail ? 1 : item.tile_rows) * args.group;
  const int block_begin = item.block_begin, block_end = item.block_end;

  Copier keys;
  keys.ancestors = nullptr;
  if (is_tail) {
    const uint32_t* words =
        args.workspace.ancestors + static_cast<int64_t>(item.tail_row) * kAncestorWords;
    uint8_t* ancestors = shared + Layout::kAncestorsAt;
    // A word per warp; those before count the depth of its first row.
    static_assert(kAncestorWords == kDecodeCtaWarps);
    const uint32_t lane_word = words[lane % kAncestorWords];
    int depth = 0;
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kAncestorWords; ++i) {
      const uint32_t other = __shfl_sync(0xffffffffu, lane_word, i);
      if (i < warp) depth += __popc(other);
      if (i == warp) word = other;
    }
    if ((word >> lane & 1) != 0) {
      ancestors[depth + __popc(word & ((1u << lane) - 1))] = static_cast<uint8_t>(warp * 32 + lane);
    }
    keys.ancestors = ancestors;
    __syncthreads();
  }
  const uint32_t head_lines = static_cast<uint32_t>(args.num_kv_heads) * args.page_size;
  keys.kv =
      args.kv + static_cast<int64_t>(kv_head) * args.page_size * kLineBytes + thread % kChunks * 16;
  keys.pages = args.pages + static_cast<int64_t>(item.seq) * args.max_pages_per_seq;
  keys.value_offset = uint64_t{head_lines} * kLineBytes;
  keys.page_lines = 2 * head_lines;
  keys.page_size = args.page_size;
  keys.page_reciprocal = args.page_reciprocal;
  keys.kv_len = item.kv_len;
  keys.end = item.end;
  if (is_tail) {
    keys.find_lines(block_begin);
  } else {
    // The first block's lines stand in the item: one dependent load less.
#pragma unroll
    for (int i = 0; i < Copier::kKeys; ++i) {
      const int key = i * Copier::kKeyStep + thread / kChunks;
      keys.lines[i] = item.lines[key / kLineRows] + key % kLineRows;
    }
  }
  // Of the first two blocks those of which the step writes nothing.
  int num_copied = 0;
  if (waits) {
    const int num_past = min(item.kv_len / kBlockTokens, block_end) - block_begin;
#pragma unroll 1
    for (; num_copied < min(num_past, 2); ++num_copied) {
      const int block = block_begin + num_copied;
      if (num_copied > 0) keys.find_lines(block);
      keys.copy(ring + 2 * num_copied * kStageBytes, block, 0);
      keys.copy(ring + (2 * num_copied + 1) * kStageBytes, block, keys.value_offset);
    }
    cuda::wait_for_previous_kernel();
  }
  if (num_copied == 0) keys.copy(ring, block_begin, 0);
  const uint32_t queries = ring + Layout::kQueriesAt;
#pragma unroll 1
  for (int pair = thread / kChunks; pair < kTiles * 16; pair += kDecodeCtaThreads / kChunks) {
    const int chunk = thread % kChunks, tile_pair = min(pair, num_pairs - 1);
    copy_async(queries + pair * kLineBytes + ((chunk ^ (pair % 8)) * 16),
               args.q + pair_at<kHeadDim>(args, first_row, kv_head, tile_pair) + chunk * 8,
               pair < num_pairs);
  }
  commit_copies();
  if (num_copied == 0) keys.copy(ring + kStageBytes, block_begin, keys.value_offset);
  commit_copies();
  if (num_copied < 2 && block_begin + 1 < block_end) {
    keys.find_lines(block_begin + 1);
    keys.copy(ring + 2 * kStageBytes, block_begin + 1, 0);
    commit_copies();
    keys.copy(ring + 3 * kStageBytes, block_begin + 1, keys.value_offset);
  } else {
    commit_copies();
  }
  commit_copies();
  if (block_begin + 2 < block_end) keys.find_lines(block_begin + 2);

  // Tokens that the thread's rows see, counted from 0.
  int num_visible[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int pair = min(first_pair + half * 8 + lane / 4, num_pairs - 1);
    const int row = pair * args.group_reciprocal >> 16;
    num_visible[half] = min(item.first_visible + row, item.end);
  }
  const int all_visible = item.first_visible;

  // Lane addresses of the fragments. A step of 16 columns flips bits 5 .. 7, a step of rows adds.
  // One tile of 8 keys: two steps at a time.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const uint32_t first_key = part * kKeyTiles * 8 + (kTiles == 1 ? 0 : matrix / 2 * 8) + matrix_row;
  const uint32_t key_at =
      first_key * kLineBytes + (((kTiles == 1 ? matrix : matrix % 2) ^ matrix_row) * 16);
  const uint32_t value_at = (matrix % 2 * 8 + matrix_row) * kLineBytes +
                            (((part * kDimTiles + matrix / 2) ^ matrix_row) * 16);
  const uint32_t pair_at = first_pair + matrix % 2 * 8 + matrix_row;
  const uint32_t swizzled = (matrix / 2 ^ matrix_row) * 16;
  const uint32_t weights_at = ring + Layout::kWeightsAt + pair_at * kBlockTokens * 2 + swizzled;
  float* maxima = reinterpret_cast<float*>(shared + Layout::kMaximaAt) + first_pair + lane / 4;

  const uint32_t query_at = queries + pair_at * kLineBytes + swizzled;

  // Blocks are merged in runs, up to the end of the item or of a segment. Where the item is no
  // whole tile and began inside the segment, a run is one block.
  const bool is_direct = item.num_slots == 0;
  bool has_kept = false;
  int num_runs = 0;
  Sums<kHeadDim, 1, kDimTiles, kDecodeCtaThreads> sums;
  sums.clear();

  // Half stages: of V before, of K and V of this block.
  uint32_t before = ring + 4 * kStageBytes, key_stage = ring, value_stage = ring + kStageBytes;
  const auto next = [&](uint32_t stage) {
    return stage == ring + (kDecodeRing - 1) * kStageBytes ? ring : stage + kStageBytes;
  };
#pragma unroll 1
  for (int block = block_begin; block < block_end; ++block) {
    wait_for_copies<3>();
    __syncthreads();  // K of this block is there, and everyone is done with the block before
    if (block + 2 < block_end) keys.copy(before, block + 2, 0);
    commit_copies();

    float scores[kKeyTiles][4] = {};
    if constexpr (kTiles == 1) {
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        uint32_t key[4], query[2][4];
        load_matrices(key, (key_stage + key_at) ^ (step * 32));
        load_matrices(query[0], query_at ^ (step * 32));
        load_matrices(query[1], query_at ^ (step * 32 + 32));
        multiply_add(scores[0], query[0], key[0], key[1]);
        multiply_add(scores[0], query[1], key[2], key[3]);
      }
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t query[4];
        load_matrices(query, query_at ^ (step * 32));
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += 2) {
          uint32_t key[4];
          load_matrices(key, ((key_stage + key_at) ^ (step * 32)) + j * 8 * kLineBytes);
          multiply_add(scores[j], query, key[0], key[1]);
          multiply_add(scores[j + 1], query, key[2], key[3]);
        }
      }
    }
    if ((block + 1) * kBlockTokens > all_visible || block * kBlockTokens < args.hidden_end) {
      const int first = block * kBlockTokens + part * kKeyTiles * 8 + lane % 4 * 2;
      int seen[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int all_seen = num_visible[half];
        // Where the rows of a tree see the same, they do not end at the same place.
        if (args.window_follows_rows && item.is_tree && !is_tail &&
            block * kBlockTokens < item.kv_len + kMaxTreeRows - args.window) {
          const int pair = min(first_pair + half * 8 + lane / 4, num_pairs - 1);
          all_seen = num_seen_in_tree(args, item, first_row + (pair * args.group_reciprocal >> 16));
        }
        seen[half] = first_seen(args, item.kv_len, all_seen);
      }
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int token = first + j * 8 + k % 2;
          if (token >= num_visible[k / 2] || token < seen[k / 2]) scores[j][k] = -INFINITY;
        }
      }
    }

    float maximum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& m = maximum[half];
      m = fmaxf(scores[0][2 * half], scores[0][2 * half + 1]);
#pragma unroll
      for (int j = 1; j < kKeyTiles; ++j) {
        m = fmaxf(m, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
      }
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      if (lane % 4 == 0) maxima[part * kTiles * 16 + half * 8] = m;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& m = maximum[half];
      m = maxima[half * 8];
#pragma unroll
      for (int other = 1; other < kParts; ++other) {
        m = fmaxf(m, maxima[other * kTiles * 16 + half * 8]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float m = maximum[half];
      const float offset = m == -INFINITY ? 0.0f : -__fmul_rn(m, scale);
      const int pair = first_pair + half * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        *reinterpret_cast<uint32_t*>(shared + Layout::kWeightsAt + pair * kBlockTokens * 2 +
                                     (((part * kKeyTiles + j) ^ (lane / 4)) * 16) + lane % 4 * 4) =
            pack_bf16(exp2_of(__fmaf_rn(scores[j][2 * half], scale, offset)),
                      exp2_of(__fmaf_rn(scores[j][2 * half + 1], scale, offset)));
      }
    }

    wait_for_copies<3>();
    __syncthreads();  // V of this block and the weights are there; everyone is done with K
    if (block + 2 < block_end) keys.copy(key_stage, block + 2, keys.value_offset);
    commit_copies();
    if (block + 3 < block_end) keys.find_lines(block + 3);

    MergeWeights merge[2];
#pragma unroll
    for (int chunk = 0; chunk < kDimTiles; chunk += kDimChunk) {
      constexpr uint32_t kOnes = 0x3f803f80u;
      float total[4] = {}, product[kDimChunk][4] = {};
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        uint32_t weights[4];
        load_matrices(weights, weights_at ^ (step * 32));
        if (chunk == 0) multiply_add(total, weights, kOnes, kOnes);
#pragma unroll
        for (int j = 0; j < kDimChunk; j += 2) {
          uint32_t value[4];
          load_matrices_transposed(
              value, ((value_stage + value_at) ^ ((chunk + j) * 16)) + step * 16 * kLineBytes);
          multiply_add(product[j], weights, value[0], value[1]);
          multiply_add(product[j + 1], weights, value[2], value[3]);
        }
      }
      if (chunk == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          merge[half] = merge_weights(sums.maximum[0][half], maximum[half], scale);
          sums.normaliser[0][half] = merged(sums.normaliser[0][half], total[2 * half], merge[half]);
        }
      }
#pragma unroll
      for (int j = 0; j < kDimChunk; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float& sum = sums.out[0][chunk + j][k];
          sum = merged(sum, product[j][k], merge[k / 2]);
        }
      }
    }
    before = value_stage;
    key_stage = next(value_stage);
    value_stage = next(key_stage);

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
      const int pair = thread_here / 32 / kParts * 16 + thread_here % 32 / 4;
      const int column = thread_here / 32 % kParts * kDimTiles * 8 + thread_here % 4 * 2;
      if (is_direct) {
        sums.store_output(args, first_row, kv_head, num_pairs, pair, column);
      } else {
        // [kv_head][slot][pair] of the tile
        const int slot = kv_head * item.num_slots + item.first_slot + num_runs;
        const int64_t pair_slot = item.slot_base + (first_row - item.tile_row) * args.group +
                                  static_cast<int64_t>(slot) * (item.tile_rows * args.group);
        sums.store_partial(args.workspace, pair_slot, num_pairs, pair, column);
      }
    }
    sums.clear();
    ++num_runs;
  }
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

/// Tiles of up to 16 kTiles pairs over ranges of blocks: many rows, or trees.
template <int kHeadDim, int kTiles>
__global__ void __launch_bounds__(kDecodeCtaThreads, CtaLayout<kHeadDim, kTiles>::kMostCtasPerSm)
    decode_cta_kernel(const __grid_constant__ AttentionArgs args) {
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
    const bool has_blocks = !item.is_tile_tail && item.block_begin < item.block_end;
    // Rows' tails read what the step writes before anything else.
    const bool waits_later = is_early && has_blocks && item.tail_row < 0;
    if (is_early && !waits_later) cuda::wait_for_previous_kernel();
    is_early = false;
    if (!waits_later) queue.prefetch();
    if (item.is_tile_tail) {
      attend_tails<kHeadDim, kTiles>(args, item, kv_head, shared);
    } else if (has_blocks) {
      attend_by_cta<kHeadDim, kTiles>(args, item, kv_head, shared, scratch_of(args), waits_later);
    }
    if (waits_later) queue.prefetch();
    if (item.tail_end > 0) {
      go_to_tail(item);
      attend_tails<kHeadDim, kTiles>(args, item, kv_head, shared);
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
