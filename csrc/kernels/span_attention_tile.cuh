#pragma once

/// One tile of pairs over a range of blocks.

#include "kernels/span_attention_math.cuh"
#include "kernels/span_attention_sums.cuh"
#include "kernels/span_attention_work.cuh"

namespace openspec::span_attention {

// Shared memory: a ring of two blocks' K and V, rows of 256 bytes, 16-byte chunks swizzled by row.
constexpr int kLineBytes = kHeadDim * 2;
constexpr int kStageBytes = kBlockTokens * kLineBytes;
constexpr int kKeysAt = 0;
constexpr int kValuesAt = 2 * kStageBytes;
// Q lies where the second block's V will be, until it is in registers; in the wide kernel it stays.
constexpr int kQueriesAt = kValuesAt + kStageBytes;
constexpr int kWideQueriesAt = 4 * kStageBytes;
constexpr int kWideSharedBytes = kWideQueriesAt + kWideTilePairs * kLineBytes;
// Where several warps share 16 pairs: p as bf16, rows of 128 bytes; each warp's maxima.
constexpr int kWeightsAt = 4 * kStageBytes;
constexpr int kMaximaAt = kWeightsAt + 32 * kBlockTokens * 2;
constexpr int kAncestorsAt = kMaximaAt + 64 * 4;
constexpr int kSplitSharedBytes = kAncestorsAt + kMaxTreeRows;

/// Where an item's keys are.
struct KeySource {
  const AttentionArgs& args;
  const int32_t* pages;      // of the sequence
  const uint8_t* ancestors;  // in shared memory: row of the span at each depth; null: all rows
  int kv_len, end;
  uint32_t head_lines;

  /// Lines of K of keys lane and lane + 32 of a block.
  struct Lines {
    uint32_t low, high;
  };

  __device__ __forceinline__ uint32_t value_lines() const {
    return static_cast<uint32_t>(args.num_kv_heads) * args.page_size;
  }
  __device__ __forceinline__ uint32_t line_of(int key) const {
    int token = min(key, end - 1);
    if (ancestors != nullptr && token >= kv_len) token = kv_len + ancestors[token - kv_len];
    const int index = args.page_shift >= 0 ? token >> args.page_shift : token / args.page_size;
    const uint32_t offset = token - index * args.page_size;
    return static_cast<uint32_t>(pages[index]) * 2 * value_lines() + head_lines + offset;
  }
  __device__ __forceinline__ Lines lines_of(int block) const {
    const int key = block * kBlockTokens + threadIdx.x % 32;
    return {line_of(key), line_of(key + 32)};
  }

  /// Starts copying a block of K (extra_lines 0) or V (value_lines). Keys from `end` on become
  /// zero.
  __device__ __forceinline__ void copy(uint32_t stage, int block, Lines lines,
                                       uint32_t extra_lines) const {
    const int chunk = threadIdx.x % 16, row = threadIdx.x / 16;  // row 0 .. 7
    const uint32_t to = stage + row * kLineBytes + ((chunk ^ row) * 16);
    const int visible = end - block * kBlockTokens - row;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t line =
          __shfl_sync(0xffffffffu, i < 4 ? lines.low : lines.high, 8 * (i % 4) + row);
      copy_async(to + i * 8 * kLineBytes,
                 args.kv + static_cast<int64_t>(line + extra_lines) * kLineBytes + chunk * 16,
                 8 * i < visible);
    }
  }
};

/// Attention of an item's pairs over its blocks. kTiles x 16 pairs are shared out over the warps in
/// groups of kRowTiles; where there are fewer groups than warps, the warps of a group split first
/// the keys, then the columns of the output. Uses all of the CTA's shared memory; the caller puts a
/// barrier between calls.
template <int kTiles, int kRowTiles>
__device__ __forceinline__ void attend(const AttentionArgs& args, const WorkItem& item, int kv_head,
                                       unsigned char* shared, float4* scratch) {
  constexpr bool kIsWide = kTiles * 16 > kMaxTilePairs;
  constexpr int kParts = kWarps * kRowTiles / kTiles;  // warps of a group
  constexpr int kKeyTiles = kBlockTokens / 8 / kParts;
  constexpr int kDimTiles = kHeadDim / 8 / kParts;
  constexpr int kDimChunk = kDimTiles < 4 ? kDimTiles : 4;  // column tiles at a time
  constexpr int kSteps = kHeadDim / 16, kKeySteps = kBlockTokens / 16;
  static_assert(kParts >= 1 && (kRowTiles == 1 || kParts == 1));

  const int thread = opaque_thread();
  const int warp = thread / 32, lane = thread % 32;
  const int part = warp % kParts, first_tile = warp / kParts * kRowTiles;
  const uint32_t ring = shared_address(shared);
  const float scale = args.scale;

  const bool is_tail = item.tail_row >= 0;
  const int first_row = is_tail ? item.tail_row : item.tile_row;
  const int num_pairs = (is_tail ? 1 : item.tile_rows) * args.group;
  const int block_begin = item.block_begin, block_end = item.block_end;

  uint8_t* ancestors = nullptr;
  if constexpr (kTiles == 1) {
    if (is_tail) {
      ancestors = shared + kAncestorsAt;
      const uint32_t* words =
          args.workspace.ancestors + static_cast<int64_t>(item.tail_row) * kAncestorWords;
      int depth = 0;  // of the first row of the word
#pragma unroll
      for (int i = 0; i < kAncestorWords; ++i) {
        const uint32_t word = words[i];
        if (i % kWarps == warp && (word >> lane & 1) != 0) {
          ancestors[depth + __popc(word & ((1u << lane) - 1))] =
              static_cast<uint8_t>(i * 32 + lane);
        }
        depth += __popc(word);
      }
      __syncthreads();
    }
  }
  const KeySource keys = {
      args,      args.pages + static_cast<int64_t>(item.seq) * args.max_pages_per_seq,
      ancestors, item.kv_len,
      item.end,  static_cast<uint32_t>(kv_head) * args.page_size};

  // The first block's lines stand in the item: one dependent load less.
  KeySource::Lines lines;
  if (is_tail) {
    lines = keys.lines_of(block_begin);
  } else {
    lines.low = item.lines[lane / kLineRows] + lane % kLineRows + keys.head_lines;
    lines.high = item.lines[(lane + 32) / kLineRows] + lane % kLineRows + keys.head_lines;
  }
  keys.copy(ring + kKeysAt, block_begin, lines, 0);
  const uint32_t queries = ring + (kIsWide ? kWideQueriesAt : kQueriesAt);
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const int chunk = thread % 16, pair = 8 * i + thread / 16;
    const int row = first_row + min(pair, num_pairs - 1) / args.group;
    const int head = kv_head * args.group + pair % args.group;
    copy_async(
        queries + pair * kLineBytes + ((chunk ^ (pair % 8)) * 16),
        args.q + (static_cast<int64_t>(row) * args.num_q_heads + head) * kHeadDim + chunk * 8,
        pair < num_pairs);
  }
  commit_copies();
  keys.copy(ring + kValuesAt, block_begin, lines, keys.value_lines());
  commit_copies();
  if (block_begin + 1 < block_end) {
    lines = keys.lines_of(block_begin + 1);
    keys.copy(ring + kKeysAt + kStageBytes, block_begin + 1, lines, 0);
  }
  commit_copies();

  // Tokens that the thread's rows see, counted from 0.
  int num_visible[kRowTiles][2];
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int pair = min((first_tile + tile) * 16 + half * 8 + lane / 4, num_pairs - 1);
      const int row = item.tile_row - item.span_row + pair / args.group;
      num_visible[tile][half] = is_tail ? item.end : item.kv_len + row + 1;
    }
  }
  const int all_visible = is_tail ? item.end : item.kv_len + item.tile_row - item.span_row + 1;

  // Lane addresses of the fragments. A step of 16 columns flips bits 5 .. 7, a step of rows adds.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const uint32_t first_key = part * kKeyTiles * 8 + matrix / 2 * 8 + matrix_row;
  const uint32_t key_at = first_key * kLineBytes + ((matrix % 2 ^ matrix_row) * 16);
  const uint32_t value_at = (matrix % 2 * 8 + matrix_row) * kLineBytes +
                            (((part * kDimTiles + matrix / 2) ^ matrix_row) * 16);
  const uint32_t pair_in_tile = matrix % 2 * 8 + matrix_row;
  const uint32_t query_at =
      queries + (first_tile * 16 + pair_in_tile) * kLineBytes + ((matrix / 2 ^ matrix_row) * 16);

  uint32_t query[kRowTiles == 1 ? kSteps : 1][4];
  if constexpr (kRowTiles == 1) {
    wait_for_copies<2>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_matrices(query[step], query_at ^ (step * 32));
  }

  // Blocks are merged in runs: of a segment where the item is a whole tile; else of the range,
  // where it begins a segment, or of one block.
  const bool is_direct = kIsWide || item.num_slots == 0;
  const bool keeps_blocks = !is_direct && (is_tail || block_begin % kSegmentBlocks != 0);
  bool has_kept = false;

  int block = block_begin;
  while (block < block_end) {
    Sums<kRowTiles, kDimTiles> sums;
    sums.clear();
    const int run_end =
        keeps_blocks ? block + 1 : min(block_end, (block / kSegmentBlocks + 1) * kSegmentBlocks);
    for (; block < run_end; ++block) {
      const uint32_t stage = (block - block_begin) % 2 * kStageBytes;
      wait_for_copies<2>();
      __syncthreads();  // K of this block is there, and everyone is done with the block before
      if (block + 1 < block_end) {
        keys.copy(ring + kValuesAt + (stage ^ kStageBytes), block + 1, lines, keys.value_lines());
      }
      commit_copies();
      KeySource::Lines lines_after = lines;
      if (block + 2 < block_end) lines_after = keys.lines_of(block + 2);

      float scores[kRowTiles][kKeyTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
          for (int k = 0; k < 4; ++k) scores[tile][j][k] = 0.0f;
        }
      }
      const uint32_t key_stage = ring + kKeysAt + stage + key_at;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t wide_query[kRowTiles][4];
        if constexpr (kRowTiles > 1) {
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            load_matrices(wide_query[tile], (query_at ^ (step * 32)) + tile * 16 * kLineBytes);
          }
        }
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += 2) {
          uint32_t key[4];
          load_matrices(key, (key_stage ^ (step * 32)) + j * 8 * kLineBytes);
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            const uint32_t (&a)[4] =
                kRowTiles == 1 ? query[kRowTiles == 1 ? step : 0] : wide_query[tile];
            multiply_add(scores[tile][j], a, key[0], key[1]);
            multiply_add(scores[tile][j + 1], a, key[2], key[3]);
          }
        }
      }

      if ((block + 1) * kBlockTokens > all_visible || block * kBlockTokens < args.first_token) {
        const int first = block * kBlockTokens + part * kKeyTiles * 8 + lane % 4 * 2;
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
          for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const int token = first + j * 8 + k % 2;
              if (token >= num_visible[tile][k / 2] || token < args.first_token) {
                scores[tile][j][k] = -INFINITY;
              }
            }
          }
        }
      }

      float maximum[kRowTiles][2];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& m = maximum[tile][half];
          m = fmaxf(scores[tile][0][2 * half], scores[tile][0][2 * half + 1]);
#pragma unroll
          for (int j = 1; j < kKeyTiles; ++j) {
            m = fmaxf(m, fmaxf(scores[tile][j][2 * half], scores[tile][j][2 * half + 1]));
          }
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        }
      }
      if constexpr (kParts > 1) {
        float* maxima = reinterpret_cast<float*>(shared + kMaximaAt) + first_tile * 16 + lane / 4;
        if (lane % 4 == 0) {
          maxima[part * kTiles * 16] = maximum[0][0];
          maxima[part * kTiles * 16 + 8] = maximum[0][1];
        }
        __syncthreads();
#pragma unroll
        for (int other = 0; other < kParts; ++other) {
          maximum[0][0] = fmaxf(maximum[0][0], maxima[other * kTiles * 16]);
          maximum[0][1] = fmaxf(maximum[0][1], maxima[other * kTiles * 16 + 8]);
        }
      }

      uint32_t weights[kRowTiles][kKeySteps][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        float offset[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float m = maximum[tile][half];
          offset[half] = m == -INFINITY ? 0.0f : -__fmul_rn(m, scale);
        }
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
          const float (&s)[4] = scores[tile][j];
          const uint32_t upper = pack_bf16(exp2_of(__fmaf_rn(s[0], scale, offset[0])),
                                           exp2_of(__fmaf_rn(s[1], scale, offset[0])));
          const uint32_t lower = pack_bf16(exp2_of(__fmaf_rn(s[2], scale, offset[1])),
                                           exp2_of(__fmaf_rn(s[3], scale, offset[1])));
          if constexpr (kParts == 1) {
            weights[tile][j / 2][j % 2 * 2] = upper;
            weights[tile][j / 2][j % 2 * 2 + 1] = lower;
          } else {
            const int row = first_tile * 16 + lane / 4;
            unsigned char* to = shared + kWeightsAt + row * kBlockTokens * 2 +
                                (((part * kKeyTiles + j) ^ (row % 8)) * 16) + lane % 4 * 4;
            *reinterpret_cast<uint32_t*>(to) = upper;
            *reinterpret_cast<uint32_t*>(to + 8 * kBlockTokens * 2) = lower;
          }
        }
      }

      wait_for_copies<2>();
      __syncthreads();  // V of this block and the weights are there; everyone is done with K
      if (block + 2 < block_end) keys.copy(ring + kKeysAt + stage, block + 2, lines_after, 0);
      commit_copies();
      lines = lines_after;

      if constexpr (kParts > 1) {
        const uint32_t from = ring + kWeightsAt +
                              (first_tile * 16 + pair_in_tile) * kBlockTokens * 2 +
                              ((matrix / 2 ^ matrix_row) * 16);
#pragma unroll
        for (int step = 0; step < kKeySteps; ++step) {
          load_matrices(weights[0][step], from ^ (step * 32));
        }
      }

      MergeWeights merge[kRowTiles][2];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        constexpr uint32_t kOnes = 0x3f803f80u;
        float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int step = 0; step < kKeySteps; ++step) {
          multiply_add(total, weights[tile][step], kOnes, kOnes);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          merge[tile][half] = merge_weights(sums.maximum[tile][half], maximum[tile][half], scale);
          sums.normaliser[tile][half] =
              merged(sums.normaliser[tile][half], total[2 * half], merge[tile][half]);
        }
      }

      const uint32_t value_stage = ring + kValuesAt + stage + value_at;
#pragma unroll
      for (int chunk = 0; chunk < kDimTiles; chunk += kDimChunk) {
        float product[kRowTiles][kDimChunk][4];
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
          for (int j = 0; j < kDimChunk; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) product[tile][j][k] = 0.0f;
          }
        }
#pragma unroll
        for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
          for (int j = 0; j < kDimChunk; j += 2) {
            uint32_t value[4];
            load_matrices_transposed(value,
                                     (value_stage ^ ((chunk + j) * 16)) + step * 16 * kLineBytes);
#pragma unroll
            for (int tile = 0; tile < kRowTiles; ++tile) {
              multiply_add(product[tile][j], weights[tile][step], value[0], value[1]);
              multiply_add(product[tile][j + 1], weights[tile][step], value[2], value[3]);
            }
          }
        }
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
          for (int j = 0; j < kDimChunk; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              float& sum = sums.out[tile][chunk + j][k];
              sum = merged(sum, product[tile][j][k], merge[tile][k / 2]);
            }
          }
        }
      }
    }

    const int pair = first_tile * 16 + lane / 4, column = part * kDimTiles * 8 + lane % 4 * 2;
    if (!is_direct) {
      // [kv_head][slot][pair] of the tile
      const int slot = item.first_slot + (keeps_blocks ? block - 1 - block_begin : 0);
      const int first_pair = (first_row - item.tile_row) * args.group;
      const int64_t pair_slot =
          item.slot_base + first_pair +
          static_cast<int64_t>(kv_head * item.num_slots + slot) * (item.tile_rows * args.group);
      sums.store_partial(args.workspace, pair_slot, num_pairs, pair, column);
    } else {
      if (has_kept) sums.merge_into_kept(scratch, scale);
      if (block < block_end) {
        sums.keep(scratch);
        has_kept = true;
      } else {
        sums.store_output(args, first_row, kv_head, num_pairs, pair, column);
      }
    }
  }
}

}  // namespace openspec::span_attention
