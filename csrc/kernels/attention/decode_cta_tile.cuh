#pragma once

/// The stages of a tile that a CTA takes block by block (decode_cta.cuh). What the thread computes
/// from reaches them by value: as members of one object it takes more registers.

#include "kernels/attention/math.cuh"
#include "kernels/attention/sums.cuh"
#include "kernels/attention/work.cuh"
#include "kernels/common/launch.cuh"

namespace openspec::span_attention {

// Half stages in the ring of shared memory: K or V of one block each.
constexpr int kDecodeRing = 5;

/// Shared memory after the ring: Q, as K; p as bf16, rows of 128 bytes; each warp's maxima.
template <int kHeadDim, int kTiles>
struct CtaLayout {
  static constexpr int kQueriesAt = kDecodeRing * Lines<kHeadDim>::kStageBytes;
  static constexpr int kWeightsAt = kQueriesAt + kTiles * 16 * Lines<kHeadDim>::kLineBytes;
  static constexpr int kMaximaAt = kWeightsAt + kTiles * 16 * kBlockTokens * 2;
  static constexpr int kAncestorsAt = kMaximaAt + kDecodeCtaWarps * 16 * 4;
  static constexpr int kUsedBytes = kAncestorsAt + kMaxTreeRows;

  // Large tiles of large heads keep an SM busy alone, and the largest heads fill its memory.
  static constexpr bool kIsAlone =
      kHeadDim == kMaxHeadDim || (kTiles == 4 && kHeadDim == kMidHeadDim);
  static constexpr int kMostCtasPerSm = kIsAlone ? 1 : kDecodeCtasPerSm;
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

  __device__ __forceinline__ void go_to(const AttentionArgs& args, const WorkItem& item,
                                        int kv_head, int thread) {
    const uint32_t head_lines = static_cast<uint32_t>(args.num_kv_heads) * args.page_size;
    kv = args.kv + static_cast<int64_t>(kv_head) * args.page_size * kLineBytes +
         thread % kChunks * 16;
    pages = args.pages + static_cast<int64_t>(item.seq) * args.max_pages_per_seq;
    value_offset = uint64_t{head_lines} * kLineBytes;
    page_lines = 2 * head_lines;
    page_size = args.page_size;
    page_reciprocal = args.page_reciprocal;
    kv_len = item.kv_len;
    end = item.end;
  }
  /// The first block's lines stand in the item: one dependent load less.
  __device__ __forceinline__ void take_lines(const WorkItem& item, int thread) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = i * kKeyStep + thread / kChunks;
      lines[i] = item.lines[key / kLineRows] + key % kLineRows;
    }
  }
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

/// What a thread computes of an item's pairs. The warps share out kTiles x 16 pairs; the
/// kDecodeCtaWarps / kTiles warps of 16 pairs split first a block's keys, then the columns of the
/// output.
template <int kHeadDim, int kTiles>
struct CtaTile {
  using Layout = CtaLayout<kHeadDim, kTiles>;
  using Copier = CtaCopier<kHeadDim>;
  static constexpr int kLineBytes = Lines<kHeadDim>::kLineBytes,
                       kStageBytes = Lines<kHeadDim>::kStageBytes;
  static constexpr int kChunks = Lines<kHeadDim>::kChunks;
  static constexpr int kParts = kDecodeCtaWarps / kTiles;
  static constexpr int kKeyTiles = kBlockTokens / 8 / kParts, kDimTiles = kHeadDim / 8 / kParts;
  static constexpr int kDimChunk = kTiles == 4 ? 4 : 2;  // column tiles at a time
  static_assert(kKeyTiles > 0 && kDimTiles >= kDimChunk && (kTiles == 1 || kKeyTiles % 2 == 0));
  static constexpr int kSteps = kHeadDim / 16, kKeySteps = kBlockTokens / 16;

  using Scores = float[kKeyTiles][4];
  using TileSums = Sums<kHeadDim, 1, kDimTiles, kDecodeCtaThreads>;

  /// Lists the row of the span at each depth of a tail's row.
  static __device__ __forceinline__ const uint8_t* list_ancestors(const AttentionArgs& args,
                                                                  const WorkItem& item, int warp,
                                                                  int lane, uint8_t* ancestors) {
    const uint32_t* words =
        args.workspace.ancestors + static_cast<int64_t>(item.tail_row) * kAncestorWords;
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
    __syncthreads();
    return ancestors;
  }

  /// Starts copying Q and the first two blocks, and finds the lines of the third. With `waits` it
  /// waits for the previous kernel, after blocks of which the step writes nothing.
  static __device__ __forceinline__ void start_copies(const ItemPairs& of, int block_begin,
                                                      int block_end, int thread, uint32_t ring,
                                                      bool waits, Copier& keys) {
    int num_copied = 0;
    if (waits) {
      const int num_past = min(of.item.kv_len / kBlockTokens, block_end) - block_begin;
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
      const int chunk = thread % kChunks, tile_pair = min(pair, of.num_pairs - 1);
      copy_async(
          queries + pair * kLineBytes + ((chunk ^ (pair % 8)) * 16),
          of.args.q + pair_at<kHeadDim>(of.args, of.first_row, of.kv_head, tile_pair) + chunk * 8,
          pair < of.num_pairs);
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
  }

  /// Tokens that the thread's rows see, counted from 0.
  static __device__ __forceinline__ void count_visible(const ItemPairs& of, int first_pair,
                                                       int lane, int (&num_visible)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int pair = min(first_pair + half * 8 + lane / 4, of.num_pairs - 1);
      const int row = pair * of.args.group_reciprocal >> 16;
      num_visible[half] = min(of.item.first_visible + row, of.item.end);
    }
  }

  /// q . k of the warp's keys of a block.
  static __device__ __forceinline__ void multiply_keys(uint32_t key_stage, uint32_t key_at,
                                                       uint32_t query_at, Scores& scores) {
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
  }

  /// Scores of tokens that a pair does not see become -infinity.
  static __device__ __forceinline__ void hide_tokens(const ItemPairs& of, bool is_tail, int block,
                                                     int part, int lane, int first_pair,
                                                     const int (&num_visible)[2], Scores& scores) {
    const int first = block * kBlockTokens + part * kKeyTiles * 8 + lane % 4 * 2;
    int seen[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int all_seen = num_visible[half];
      // Where the rows of a tree see the same, they do not end at the same place.
      if (of.args.window_follows_rows && of.item.is_tree && !is_tail &&
          block * kBlockTokens < of.item.kv_len + kMaxTreeRows - of.args.window) {
        const int pair = min(first_pair + half * 8 + lane / 4, of.num_pairs - 1);
        all_seen = num_seen_in_tree(of.args, of.item,
                                    of.first_row + (pair * of.args.group_reciprocal >> 16));
      }
      seen[half] = first_seen(of.args, of.item.kv_len, all_seen);
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

  /// To `maxima` in shared memory, which begin with the lane's first pair.
  static __device__ __forceinline__ void share_maxima(const Scores& scores, int part, int lane,
                                                      float* maxima) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m = fmaxf(scores[0][2 * half], scores[0][2 * half + 1]);
#pragma unroll
      for (int j = 1; j < kKeyTiles; ++j) {
        m = fmaxf(m, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
      }
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      if (lane % 4 == 0) maxima[part * kTiles * 16 + half * 8] = m;
    }
  }

  /// The block's maxima, and p to shared memory.
  static __device__ __forceinline__ void soften(const Scores& scores, const float* maxima, int part,
                                                int lane, int first_pair, float scale,
                                                unsigned char* shared, float (&maximum)[2]) {
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
  }

  /// p . 1 and p . v of a block, merged into the sums.
  static __device__ __forceinline__ void weigh_values(uint32_t value_stage, uint32_t value_at,
                                                      uint32_t weights_at,
                                                      const float (&maximum)[2], float scale,
                                                      TileSums& sums) {
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
  }

  /// Writes a run's sums: the tile's output where the item is the whole tile, else a partial
  /// result.
  static __device__ __forceinline__ void store(const ItemPairs& of, int run, int thread,
                                               bool is_direct, const TileSums& sums) {
    const int pair = thread / 32 / kParts * 16 + thread % 32 / 4;
    const int column = thread / 32 % kParts * kDimTiles * 8 + thread % 4 * 2;
    if (is_direct) {
      sums.store_output(of.args, of.first_row, of.kv_head, of.num_pairs, pair, column);
    } else {
      // [of.kv_head][slot][pair] of the tile
      const int slot = of.kv_head * of.item.num_slots + of.item.first_slot + run;
      const int64_t pair_slot = of.item.slot_base +
                                (of.first_row - of.item.tile_row) * of.args.group +
                                static_cast<int64_t>(slot) * (of.item.tile_rows * of.args.group);
      sums.store_partial(of.args.workspace, pair_slot, of.num_pairs, pair, column);
    }
  }

  /// The half stage after one.
  static __device__ __forceinline__ uint32_t next(uint32_t ring, uint32_t stage) {
    return stage == ring + (kDecodeRing - 1) * kStageBytes ? ring : stage + kStageBytes;
  }
};

}  // namespace openspec::span_attention
