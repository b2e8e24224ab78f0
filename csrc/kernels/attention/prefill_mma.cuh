#pragma once

/// Tiles of many pairs over all their blocks: rows of prompts, without the products of sm_90a.

#include "kernels/attention/math.cuh"
#include "kernels/attention/sums.cuh"
#include "kernels/attention/work.cuh"
#include "kernels/common/launch.cuh"

namespace openspec::span_attention {

/// Shared memory: a ring of two blocks' K and V, and Q.
template <int kHeadDim>
struct PrefillLayout {
  static constexpr int kKeysAt = 0;
  static constexpr int kValuesAt = 2 * Lines<kHeadDim>::kStageBytes;
  static constexpr int kQueriesAt = 4 * Lines<kHeadDim>::kStageBytes;
  static constexpr int kBytes = kQueriesAt + kPrefillTilePairs * Lines<kHeadDim>::kLineBytes;
};

/// Where an item's keys are.
template <int kHeadDim>
struct KeySource {
  const AttentionArgs& args;
  const int32_t* pages;  // of the sequence
  int end;
  uint32_t head_lines;

  /// Lines of K of keys lane and lane + 32 of a block.
  struct KeyLines {
    uint32_t low, high;
  };

  __device__ __forceinline__ uint32_t value_lines() const {
    return static_cast<uint32_t>(args.num_kv_heads) * args.page_size;
  }
  __device__ __forceinline__ uint32_t line_of(int key) const {
    const int token = min(key, end - 1);
    const int index = args.page_shift >= 0 ? token >> args.page_shift : token / args.page_size;
    const uint32_t offset = token - index * args.page_size;
    return static_cast<uint32_t>(pages[index]) * 2 * value_lines() + head_lines + offset;
  }
  __device__ __forceinline__ KeyLines lines_of(int block) const {
    const int key = block * kBlockTokens + threadIdx.x % 32;
    return {line_of(key), line_of(key + 32)};
  }

  /// Starts copying a block of K (extra_lines 0) or V (value_lines). Keys from `end` on become
  /// zero.
  __device__ __forceinline__ void copy(uint32_t stage, int block, KeyLines lines,
                                       uint32_t extra_lines) const {
    using Form = Lines<kHeadDim>;
    constexpr int kStep =
        kPrefillThreads / Form::kChunks;  // a thread has a chunk of every kStep-th
    const int chunk = threadIdx.x % Form::kChunks, row = threadIdx.x / Form::kChunks;
    const uint32_t to = stage + row * Form::kLineBytes + ((chunk ^ (row % 8)) * 16);
    const int visible = end - block * kBlockTokens - row;
#pragma unroll
    for (int i = 0; i < kBlockTokens; i += kStep) {
      const uint32_t line = __shfl_sync(0xffffffffu, i < 32 ? lines.low : lines.high, i % 32 + row);
      copy_async(to + i * Form::kLineBytes,
                 args.kv + static_cast<int64_t>(line + extra_lines) * Form::kLineBytes + chunk * 16,
                 i < visible);
    }
  }
};

/// What a thread computes of an item's pairs, kRowTiles x 16 pairs to a warp.
template <int kHeadDim>
struct PrefillTile {
  static constexpr int kLineBytes = Lines<kHeadDim>::kLineBytes;
  static constexpr int kChunks = Lines<kHeadDim>::kChunks, kPairStep = kPrefillThreads / kChunks;
  static constexpr int kTiles = kPrefillTilePairs / 16, kRowTiles = kTiles / kPrefillWarps;
  static constexpr int kKeyTiles = kBlockTokens / 8, kDimTiles = kHeadDim / 8;
  static constexpr int kDimChunk = 4;  // column tiles at a time
  static constexpr int kSteps = kHeadDim / 16, kKeySteps = kBlockTokens / 16;

  using Scores = float[kRowTiles][kKeyTiles][4];
  using Weights = uint32_t[kRowTiles][kKeySteps][4];
  using Halves = float[kRowTiles][2];  // a value of each of the thread's rows
  using Merges = MergeWeights[kRowTiles][2];
  using TileSums = Sums<kHeadDim, kRowTiles, kDimTiles>;

  static __device__ __forceinline__ void copy_queries(const ItemPairs& of, int thread,
                                                      uint32_t queries) {
#pragma unroll
    for (int first = 0; first < kPrefillTilePairs; first += kPairStep) {
      const int chunk = thread % kChunks, pair = first + thread / kChunks;
      const int64_t from =
          pair_at<kHeadDim>(of.args, of.first_row, of.kv_head, min(pair, of.num_pairs - 1));
      copy_async(queries + pair * kLineBytes + ((chunk ^ (pair % 8)) * 16),
                 of.args.q + from + chunk * 8, pair < of.num_pairs);
    }
  }

  /// Tokens that the thread's rows see, counted from 0.
  static __device__ __forceinline__ void count_visible(const ItemPairs& of, int first_tile,
                                                       int lane, int (&num_visible)[kRowTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pair = min((first_tile + tile) * 16 + half * 8 + lane / 4, of.num_pairs - 1);
        num_visible[tile][half] = min(of.item.first_visible + pair / of.args.group, of.item.end);
      }
    }
  }

  /// q . k of a block.
  static __device__ __forceinline__ void multiply_keys(uint32_t key_stage, uint32_t query_at,
                                                       Scores& scores) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t query[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        load_matrices(query[tile], (query_at ^ (step * 32)) + tile * 16 * kLineBytes);
      }
#pragma unroll
      for (int j = 0; j < kKeyTiles; j += 2) {
        uint32_t key[4];
        load_matrices(key, (key_stage ^ (step * 32)) + j * 8 * kLineBytes);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          multiply_add(scores[tile][j], query[tile], key[0], key[1]);
          multiply_add(scores[tile][j + 1], query[tile], key[2], key[3]);
        }
      }
    }
  }

  /// Scores of tokens that a pair does not see become -infinity.
  static __device__ __forceinline__ void hide_tokens(const ItemPairs& of, int block, int lane,
                                                     const int (&num_visible)[kRowTiles][2],
                                                     Scores& scores) {
    const int first = block * kBlockTokens + lane % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const int seen[2] = {first_seen(of.args, of.item.kv_len, num_visible[tile][0]),
                           first_seen(of.args, of.item.kv_len, num_visible[tile][1])};
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int token = first + j * 8 + k % 2;
          if (token >= num_visible[tile][k / 2] || token < seen[k / 2]) {
            scores[tile][j][k] = -INFINITY;
          }
        }
      }
    }
  }

  /// Maxima of the scores, and p as a left operand.
  static __device__ __forceinline__ void soften(const Scores& scores, float scale, Halves& maximum,
                                                Weights& weights) {
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
        weights[tile][j / 2][j % 2 * 2] = upper;
        weights[tile][j / 2][j % 2 * 2 + 1] = lower;
      }
    }
  }

  /// p . 1 of a block, merged into the normalisers; and how its sums are to be merged.
  static __device__ __forceinline__ void add_weights(const Weights& weights, const Halves& maximum,
                                                     float scale, TileSums& sums, Merges& merge) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      constexpr uint32_t kOnes = 0x3f803f80u;
      float total[4] = {};
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
  }

  /// p . v of a block, merged into the sums.
  static __device__ __forceinline__ void weigh_values(uint32_t value_stage, const Weights& weights,
                                                      const Merges& merge, TileSums& sums) {
#pragma unroll
    for (int chunk = 0; chunk < kDimTiles; chunk += kDimChunk) {
      float product[kRowTiles][kDimChunk][4] = {};
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
};

/// Attention of an item's pairs over its blocks. Uses all of the CTA's shared memory; the caller
/// puts a barrier between calls.
template <int kHeadDim>
__device__ __forceinline__ void attend_prefill(const AttentionArgs& args, const WorkItem& item,
                                               int kv_head, unsigned char* shared,
                                               float4* scratch) {
  using Layout = PrefillLayout<kHeadDim>;
  using Keys = KeySource<kHeadDim>;
  using Tile = PrefillTile<kHeadDim>;
  constexpr int kLineBytes = Lines<kHeadDim>::kLineBytes,
                kStageBytes = Lines<kHeadDim>::kStageBytes;

  const int thread = opaque_thread();
  const int warp = thread / 32, lane = thread % 32;
  const int first_tile = warp * Tile::kRowTiles;
  const uint32_t ring = shared_address(shared);
  const float scale = args.scale;

  const int first_row = item.tile_row, num_pairs = item.tile_rows * args.group;
  const ItemPairs pairs = {args, item, kv_head, first_row, num_pairs};
  const int block_begin = item.block_begin, block_end = item.block_end;

  const Keys keys = {args, args.pages + static_cast<int64_t>(item.seq) * args.max_pages_per_seq,
                     item.end, static_cast<uint32_t>(kv_head) * args.page_size};

  // The first block's lines stand in the item: one dependent load less.
  typename Keys::KeyLines lines;
  lines.low = item.lines[lane / kLineRows] + lane % kLineRows + keys.head_lines;
  lines.high = item.lines[(lane + 32) / kLineRows] + lane % kLineRows + keys.head_lines;
  keys.copy(ring + Layout::kKeysAt, block_begin, lines, 0);
  const uint32_t queries = ring + Layout::kQueriesAt;
  Tile::copy_queries(pairs, thread, queries);
  commit_copies();
  keys.copy(ring + Layout::kValuesAt, block_begin, lines, keys.value_lines());
  commit_copies();
  if (block_begin + 1 < block_end) {
    lines = keys.lines_of(block_begin + 1);
    keys.copy(ring + Layout::kKeysAt + kStageBytes, block_begin + 1, lines, 0);
  }
  commit_copies();

  int num_visible[Tile::kRowTiles][2];
  Tile::count_visible(pairs, first_tile, lane, num_visible);
  const int all_visible = item.first_visible;

  // Lane addresses of the fragments. A step of 16 columns flips bits 5 .. 7, a step of rows adds.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const uint32_t first_key = matrix / 2 * 8 + matrix_row;
  const uint32_t key_at = first_key * kLineBytes + ((matrix % 2 ^ matrix_row) * 16);
  const uint32_t value_at =
      (matrix % 2 * 8 + matrix_row) * kLineBytes + ((matrix / 2 ^ matrix_row) * 16);
  const uint32_t pair_in_tile = matrix % 2 * 8 + matrix_row;
  const uint32_t query_at =
      queries + (first_tile * 16 + pair_in_tile) * kLineBytes + ((matrix / 2 ^ matrix_row) * 16);

  bool has_kept = false;

  int block = block_begin;
  while (block < block_end) {
    typename Tile::TileSums sums;
    sums.clear();
    const int run_end = min(block_end, (block / kSegmentBlocks + 1) * kSegmentBlocks);
    for (; block < run_end; ++block) {
      const uint32_t stage = (block - block_begin) % 2 * kStageBytes;
      wait_for_copies<2>();
      __syncthreads();  // K of this block is there, and everyone is done with the block before
      if (block + 1 < block_end) {
        keys.copy(ring + Layout::kValuesAt + (stage ^ kStageBytes), block + 1, lines,
                  keys.value_lines());
      }
      commit_copies();
      typename Keys::KeyLines lines_after = lines;
      if (block + 2 < block_end) lines_after = keys.lines_of(block + 2);

      typename Tile::Scores scores = {};
      const uint32_t key_stage = ring + Layout::kKeysAt + stage + key_at;
      Tile::multiply_keys(key_stage, query_at, scores);

      if ((block + 1) * kBlockTokens > all_visible || block * kBlockTokens < args.hidden_end) {
        Tile::hide_tokens(pairs, block, lane, num_visible, scores);
      }

      typename Tile::Halves maximum;
      typename Tile::Weights weights;
      Tile::soften(scores, scale, maximum, weights);

      wait_for_copies<2>();
      __syncthreads();  // V of this block is there; everyone is done with K
      if (block + 2 < block_end)
        keys.copy(ring + Layout::kKeysAt + stage, block + 2, lines_after, 0);
      commit_copies();
      lines = lines_after;

      typename Tile::Merges merge;
      Tile::add_weights(weights, maximum, scale, sums, merge);

      const uint32_t value_stage = ring + Layout::kValuesAt + stage + value_at;
      Tile::weigh_values(value_stage, weights, merge, sums);
    }

    if (has_kept) sums.merge_into_kept(scratch, scale);
    if (block < block_end) {
      sums.keep(scratch);
      has_kept = true;
    } else {
      sums.store_output(args, first_row, kv_head, num_pairs, first_tile * 16 + lane / 4,
                        lane % 4 * 2);
    }
  }
}

/// Tiles of 128 pairs over all their blocks: the rows of a long chain.
template <int kHeadDim>
__global__ void __launch_bounds__(kPrefillThreads, kPrefillCtasPerSm)
    prefill_mma_kernel(const __grid_constant__ AttentionArgs args) {
  cuda::allow_next_kernel();
  extern __shared__ __align__(256) unsigned char shared[];
  __shared__ WorkItem item;
  __shared__ int message;
  cuda::wait_for_previous_kernel();

  WorkHeader& header = *args.workspace.header;
  const int num_items = header.num_prefill_items * args.num_kv_heads;
  float4* scratch =
      args.workspace.scratch + static_cast<int64_t>(blockIdx.x) * kPrefillScratch * kPrefillThreads;
  ItemQueue queue(header.prefill_tickets, num_items);
  for (int index = blockIdx.x; index < num_items; index = queue.next(&message)) {
    queue.prefetch();
    fetch(item, args.workspace.prefill_items + index / args.num_kv_heads);
    wait_for_fetch();
    attend_prefill<kHeadDim>(args, item, index % args.num_kv_heads, shared, scratch);
  }
  queue.close();
}

}  // namespace openspec::span_attention
