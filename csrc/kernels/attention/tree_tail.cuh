#pragma once

/// The rows of a tree after the blocks that all of them share. What a row sees there are the rest
/// of the committed prefix and its own ancestors, at positions that follow each other; so each row
/// has a block of its own. But all rows of a tile take their keys from the same few lines, those of
/// the prefix's rest and of the span: K and V of these are read once, and q . k is computed for
/// all of them. Then each pair picks the scores of its row's path, and p . v takes the lines of V
/// in the path's order.

#include <cuda_bf16.h>

#include "kernels/attention/math.cuh"
#include "kernels/attention/sums.cuh"
#include "kernels/attention/work.cuh"

namespace openspec::span_attention {

/// Shared memory: V, K and Q; p as bf16, rows of 128 bytes, swizzled too; each pair's maximum; each
/// row's positions and the line of each of them.
template <int kHeadDim, int kTiles>
struct TailLayout {
  static constexpr int kLineBytes = Lines<kHeadDim>::kLineBytes;
  static constexpr int kLines = tail_lines_of(kTiles);
  static constexpr int kValuesAt = 0;
  static constexpr int kKeysAt = kLines * kLineBytes;
  static constexpr int kQueriesAt = 2 * kLines * kLineBytes;
  // Scores lie where K and Q were, and after them.
  static constexpr int kScoresAt = kKeysAt;
  static constexpr int kScoreStride = kLines + 8;
  static constexpr int kQueriesEnd = kQueriesAt + kTiles * 16 * kLineBytes;
  static constexpr int kScoresEnd = kScoresAt + kTiles * 16 * kScoreStride * 4;
  static constexpr int kWeightsAt = kQueriesEnd > kScoresEnd ? kQueriesEnd : kScoresEnd;
  static constexpr int kMaximaAt = kWeightsAt + kTiles * 16 * kBlockTokens * 2;
  static constexpr int kNumPositionsAt = kMaximaAt + kTiles * 16 * 4;
  static constexpr int kPathsAt = kNumPositionsAt + kTiles * 16 * 4;  // [row][kLines] uint8
  static constexpr int kBytes = kPathsAt + kTiles * 16 * kLines;
  static_assert(kLines <= 2 * 16 * kDecodeCtaWarps && kLines <= 256);
};

/// Lists the lines of each row's path, by position: the rest of the prefix, then its ancestors.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void list_paths(const AttentionArgs& args, const WorkItem& item,
                                           int rest, unsigned char* shared) {
  using Layout = TailLayout<kHeadDim, kTiles>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = warp; row < item.tile_rows; row += kDecodeCtaWarps) {
    const uint32_t* words =
        args.workspace.ancestors + static_cast<int64_t>(item.tile_row + row) * kAncestorWords;
    uint8_t* path = shared + Layout::kPathsAt + row * Layout::kLines;
    for (int position = lane; position < rest; position += 32) {
      path[position] = static_cast<uint8_t>(position);
    }
    int num_positions = rest;
#pragma unroll
    for (int i = 0; i < kAncestorWords; ++i) {
      const uint32_t word = words[i];
      if ((word >> lane & 1) != 0) {
        path[num_positions + __popc(word & ((1u << lane) - 1))] =
            static_cast<uint8_t>(rest + i * 32 + lane);
      }
      num_positions += __popc(word);
    }
    if (lane == 0) {
      reinterpret_cast<int*>(shared + Layout::kNumPositionsAt)[row] = num_positions;
    }
  }
}

/// What a CTA computes of a tile's rows over their own blocks.
template <int kHeadDim, int kTiles>
struct TailTile {
  using Layout = TailLayout<kHeadDim, kTiles>;
  static constexpr int kLineBytes = Layout::kLineBytes, kChunks = Lines<kHeadDim>::kChunks;
  static constexpr int kColumnWarps = kHeadDim / 16;
  using Scores = float[2][kTiles][2][4];  // of the lines that a warp has at a time

  /// Starts copying K and V of the lines, and Q.
  static __device__ __forceinline__ void start_copies(const AttentionArgs& args,
                                                      const WorkItem& item, int kv_head,
                                                      int num_pairs, int first_token, int num_lines,
                                                      int thread, uint32_t base) {
    const int chunk = thread % kChunks;
    const uint32_t head_lines = static_cast<uint32_t>(args.num_kv_heads) * args.page_size;
    const int32_t* pages = args.pages + static_cast<int64_t>(item.seq) * args.max_pages_per_seq;
    const char* kv =
        args.kv + static_cast<int64_t>(kv_head) * args.page_size * kLineBytes + chunk * 16;
#pragma unroll 2
    for (int i = thread / kChunks; i < num_lines; i += kDecodeCtaThreads / kChunks) {
      const uint32_t token = first_token + i;
      const int index = static_cast<int>(uint64_t{token} * args.page_reciprocal >> 34);
      const uint32_t line =
          static_cast<uint32_t>(pages[index]) * 2 * head_lines + token - index * args.page_size;
      const char* from = kv + uint64_t{line} * kLineBytes;
      const uint32_t to = base + i * kLineBytes + ((chunk ^ (i % 8)) * 16);
      copy_async(to + Layout::kKeysAt, from, true);
      copy_async(to + Layout::kValuesAt, from + uint64_t{head_lines} * kLineBytes, true);
    }
#pragma unroll 1
    for (int pair = thread / kChunks; pair < kTiles * 16; pair += kDecodeCtaThreads / kChunks) {
      const int tile_pair = min(pair, num_pairs - 1);
      copy_async(base + Layout::kQueriesAt + pair * kLineBytes + ((chunk ^ (pair % 8)) * 16),
                 args.q + pair_at<kHeadDim>(args, item.tile_row, kv_head, tile_pair) + chunk * 8,
                 pair < num_pairs);
    }
    commit_copies();
  }

  /// q . k of all lines. A warp has 16 lines at a time. What is computed of lines that were not
  /// copied nobody picks.
  static __device__ __forceinline__ void multiply_keys(int num_lines, int warp, int lane,
                                                       uint32_t base, Scores& scores) {
    const int matrix = lane / 8, matrix_row = lane % 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first_line = (warp + i * kDecodeCtaWarps) * 16;
      if (first_line >= num_lines) break;
      const uint32_t key_at = base + Layout::kKeysAt +
                              (first_line + matrix / 2 * 8 + matrix_row) * kLineBytes +
                              ((matrix % 2 ^ matrix_row) * 16);
      const uint32_t query_at = base + Layout::kQueriesAt +
                                (matrix % 2 * 8 + matrix_row) * kLineBytes +
                                ((matrix / 2 ^ matrix_row) * 16);
#pragma unroll 2
      for (int step = 0; step < kHeadDim / 16; ++step) {
        uint32_t key[4];
        load_matrices(key, key_at ^ (step * 32));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          uint32_t query[4];
          load_matrices(query, (query_at ^ (step * 32)) + tile * 16 * kLineBytes);
          multiply_add(scores[i][tile][0], query, key[0], key[1]);
          multiply_add(scores[i][tile][1], query, key[2], key[3]);
        }
      }
    }
  }

  /// To shared memory, where K and Q were.
  static __device__ __forceinline__ void share_scores(const Scores& scores, int num_lines, int warp,
                                                      int lane, float* all_scores) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first_line = (warp + i * kDecodeCtaWarps) * 16;
      if (first_line >= num_lines) break;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float* to = all_scores + (tile * 16 + j / 2 * 8 + lane / 4) * Layout::kScoreStride +
                      first_line + j % 2 * 8 + lane % 4 * 2;
          const float (&from)[4] = scores[i][tile][j % 2];
          *reinterpret_cast<float2*>(to) = make_float2(from[j / 2 * 2], from[j / 2 * 2 + 1]);
        }
      }
    }
  }

  /// p and the maximum of a block of each pair, whose scores are those of its row's path.
  static __device__ __forceinline__ void soften(const AttentionArgs& args, const WorkItem& item,
                                                int num_pairs, int first_token, int first_position,
                                                int warp, int lane, float scale,
                                                const float* all_scores, const int* num_positions,
                                                const uint8_t* paths, float* maxima,
                                                unsigned char* shared) {
#pragma unroll 1
    for (int pair = warp; pair < num_pairs; pair += kDecodeCtaWarps) {
      const int row = pair * args.group_reciprocal >> 16;
      if (num_positions[row] <= first_position) continue;
      const int seen = first_seen(args, item.kv_len, first_token + num_positions[row]);
      float score[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int position = first_position + i * 32 + lane;
        const bool is_visible = position < num_positions[row] && first_token + position >= seen;
        score[i] =
            is_visible
                ? all_scores[pair * Layout::kScoreStride + paths[row * Layout::kLines + position]]
                : -INFINITY;
      }
      float m = fmaxf(score[0], score[1]);
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, distance));
      }
      const float offset = m == -INFINITY ? 0.0f : -__fmul_rn(m, scale);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = i * 32 + lane;
        reinterpret_cast<__nv_bfloat16*>(shared + Layout::kWeightsAt + pair * kBlockTokens * 2 +
                                         ((column / 8 ^ pair % 8) * 16))[column % 8] =
            __float2bfloat16_rn(exp2_of(__fmaf_rn(score[i], scale, offset)));
      }
      if (lane == 0) maxima[pair] = m;
    }
  }

  /// p . 1 and p . v of a block of each row: a partial result.
  static __device__ __forceinline__ void weigh_values(const AttentionArgs& args,
                                                      const WorkItem& item, int kv_head,
                                                      int num_pairs, int block, int warp, int lane,
                                                      const int* num_positions,
                                                      const uint8_t* paths, const float* maxima,
                                                      uint32_t base) {
    const int group = args.group, first_position = block * kBlockTokens;
    const int matrix = lane / 8, matrix_row = lane % 8;
    // A warp has 16 columns of every row, or of every other one. A row's pairs are the first of 16
    // that are multiplied.
    constexpr uint32_t kOnes = 0x3f803f80u;
    const int column_warp = warp % kColumnWarps, column = column_warp * 16 + lane % 4 * 2;
#pragma unroll 2
    for (int row = warp / kColumnWarps; row < item.tile_rows;
         row += kDecodeCtaWarps / kColumnWarps) {
      const int last = num_positions[row] - 1;
      if (last < first_position) continue;
      const int weight_pair = min(row * group + matrix_row, kTiles * 16 - 1);
      const uint32_t weights_at = base + Layout::kWeightsAt + weight_pair * kBlockTokens * 2;
      float total[4] = {}, product[2][4] = {};
#pragma unroll
      for (int steps = 0; steps < kBlockTokens / 16; steps += 2) {
        uint32_t weights[4];
        load_matrices(weights, weights_at + ((steps * 2 + matrix) ^ (weight_pair % 8)) * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t weight[4] = {weights[2 * i], 0, weights[2 * i + 1], 0};
          const int position = first_position + (steps + i) * 16 + matrix % 2 * 8 + matrix_row;
          const int line = paths[row * Layout::kLines + min(position, last)];
          uint32_t value[4];
          load_matrices_transposed(value, base + Layout::kValuesAt + line * kLineBytes +
                                              (((column_warp * 2 + matrix / 2) ^ (line % 8)) * 16));
          if (column_warp == 0) multiply_add(total, weight, kOnes, kOnes);
          multiply_add(product[0], weight, value[0], value[1]);
          multiply_add(product[1], weight, value[2], value[3]);
        }
      }
      if (lane / 4 >= group) continue;
      // [kv_head][slot][pair] of the tile
      const int pair = row * group + lane / 4;
      const int slot = kv_head * item.num_slots + item.first_slot + block;
      const int64_t at = item.slot_base + pair + static_cast<int64_t>(slot) * num_pairs;
      float* to = args.workspace.partial_sums + at * kHeadDim + column;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<float2*>(to + i * 8) = make_float2(product[i][0], product[i][1]);
      }
      if (column == 0) args.workspace.partial_stats[at] = make_float2(maxima[pair], total[0]);
    }
  }
};

/// Attention of a tile's rows over their own blocks: a partial result for each. Uses all of the
/// CTA's shared memory; the caller puts a barrier between calls.
template <int kHeadDim, int kTiles>
__device__ __forceinline__ void attend_tails(const AttentionArgs& args, const WorkItem& item,
                                             int kv_head, unsigned char* shared) {
  using Layout = TailLayout<kHeadDim, kTiles>;
  using Tile = TailTile<kHeadDim, kTiles>;
  const int thread = opaque_thread();
  const int warp = thread / 32, lane = thread % 32;
  const uint32_t base = shared_address(shared);
  const int num_pairs = item.tile_rows * args.group;
  const int first_token = item.num_shared_blocks * kBlockTokens;  // of the lines
  const int num_lines = item.end - first_token;

  Tile::start_copies(args, item, kv_head, num_pairs, first_token, num_lines, thread, base);
  list_paths<kHeadDim, kTiles>(args, item, item.kv_len - first_token, shared);
  wait_for_copies<0>();
  __syncthreads();

  typename Tile::Scores scores = {};
  Tile::multiply_keys(num_lines, warp, lane, base, scores);
  __syncthreads();  // everyone is done with K and Q
  float* all_scores = reinterpret_cast<float*>(shared + Layout::kScoresAt);
  Tile::share_scores(scores, num_lines, warp, lane, all_scores);
  __syncthreads();

  float* maxima = reinterpret_cast<float*>(shared + Layout::kMaximaAt);
  const int* num_positions = reinterpret_cast<const int*>(shared + Layout::kNumPositionsAt);
  const uint8_t* paths = shared + Layout::kPathsAt;
  const float scale = args.scale;
#pragma unroll 1
  for (int block = 0; block < item.block_end - item.block_begin; ++block) {
    const int first_position = block * kBlockTokens;
    Tile::soften(args, item, num_pairs, first_token, first_position, warp, lane, scale, all_scores,
                 num_positions, paths, maxima, shared);
    __syncthreads();

    Tile::weigh_values(args, item, kv_head, num_pairs, block, warp, lane, num_positions, paths,
                       maxima, base);
    __syncthreads();
  }
}

}  // namespace openspec::span_attention
