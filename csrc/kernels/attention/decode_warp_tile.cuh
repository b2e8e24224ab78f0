#pragma once

/// The stages of a block that a warp computes by itself (decode_warp.cuh).

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "kernels/attention/math.cuh"
#include "kernels/attention/sums.cuh"
#include "kernels/attention/work.cuh"

namespace openspec::span_attention {

/// A warp's results: of kTiles x 8 pairs. A lane has pairs 2 (lane % 4) and the next of each 8, and
/// columns lane / 4 and lane / 4 + 8 of each 16.
template <int kHeadDim, int kTiles>
struct WarpSums {
  static constexpr int kDimTiles = kHeadDim / 16;
  float out[kTiles][kDimTiles][4];  // [column half, pair]
  float maximum[kTiles][2];
  float normaliser[kTiles][2];

  /// *this = earlier + *this; of both pointers the lane's entries are 32 apart.
  __device__ __forceinline__ void merge_behind(const float4* sums, const float4* stats,
                                               float scale) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float4 earlier = stats[tile * 32];
      float first = earlier.x, second = earlier.y;
      const MergeWeights weights[2] = {merge_weights(first, maximum[tile][0], scale),
                                       merge_weights(second, maximum[tile][1], scale)};
      maximum[tile][0] = first;
      maximum[tile][1] = second;
      normaliser[tile][0] = merged(earlier.z, normaliser[tile][0], weights[0]);
      normaliser[tile][1] = merged(earlier.w, normaliser[tile][1], weights[1]);
#pragma unroll
      for (int i = 0; i < kDimTiles; ++i) {
        float (&x)[4] = out[tile][i];
        const float4 before = sums[(tile * kDimTiles + i) * 32];
        x[0] = merged(before.x, x[0], weights[0]);
        x[1] = merged(before.y, x[1], weights[1]);
        x[2] = merged(before.z, x[2], weights[0]);
        x[3] = merged(before.w, x[3], weights[1]);
      }
    }
  }
  __device__ __forceinline__ void keep(float4* sums, float4* stats) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      stats[tile * 32] =
          make_float4(maximum[tile][0], maximum[tile][1], normaliser[tile][0], normaliser[tile][1]);
#pragma unroll
      for (int i = 0; i < kDimTiles; ++i) {
        const float (&x)[4] = out[tile][i];
        sums[(tile * kDimTiles + i) * 32] = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
  }
  __device__ __forceinline__ void store_output(const AttentionArgs& args, int first_row,
                                               int kv_head, int num_pairs) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float reciprocal[2] = {__frcp_rn(normaliser[tile][0]), __frcp_rn(normaliser[tile][1])};
      const int pair = tile * 8 + lane / 4;
      __nv_bfloat16* to =
          args.out + pair_at<kHeadDim>(args, first_row, kv_head, pair) + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2 * kDimTiles; ++i) {
        const float* x = out[tile][i / 2] + i % 2 * 2;
        const uint32_t bits =
            transposed(pack_bf16(finish(x[0], reciprocal[0]), finish(x[1], reciprocal[1])));
        if (pair < num_pairs) *reinterpret_cast<uint32_t*>(to + i * 8) = bits;
      }
    }
  }
  /// To the partial results of pairs [0, num_pairs) that begin at `pair_slot`.
  __device__ __forceinline__ void store_partial(const Workspace& workspace, int64_t pair_slot,
                                                int num_pairs) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int pair = tile * 8 + lane % 4 * 2 + i;
        if (pair >= num_pairs) continue;
        float* to = workspace.partial_sums + (pair_slot + pair) * kHeadDim + lane / 4;
#pragma unroll
        for (int j = 0; j < 2 * kDimTiles; ++j) to[j * 8] = out[tile][j / 2][j % 2 * 2 + i];
        if (lane / 4 == 0) {
          workspace.partial_stats[pair_slot + pair] =
              make_float2(maximum[tile][i], normaliser[tile][i]);
        }
      }
    }
  }
};

/// What a warp computes of an item's pairs, 8 kTiles at most.
template <int kHeadDim, int kTiles>
struct WarpTile {
  using Sums = WarpSums<kHeadDim, kTiles>;
  static constexpr int kLineBytes = Lines<kHeadDim>::kLineBytes;
  static constexpr int kKeyTiles = kBlockTokens / 16, kSteps = kHeadDim / 16;

  using Queries = uint32_t[kTiles][kSteps][2];
  using Scores = float[kTiles][kKeyTiles][4];
  using Weights = uint32_t[kTiles][kKeyTiles][2];

  /// Q of the lane's pairs, and how many tokens they see.
  static __device__ __forceinline__ void load_queries(const ItemPairs& of, int lane, Queries& query,
                                                      int (&num_visible)[kTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int pair = min(tile * 8 + lane / 4, of.num_pairs - 1);
      const __nv_bfloat16* from =
          of.args.q + pair_at<kHeadDim>(of.args, of.first_row, of.kv_head, pair) + lane % 4 * 2;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          query[tile][step][i] = *reinterpret_cast<const uint32_t*>(from + step * 16 + i * 8);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int seeing = min(tile * 8 + lane % 4 * 2 + i, of.num_pairs - 1);
        const int seeing_row = seeing * of.args.group_reciprocal >> 16;
        num_visible[tile][i] = min(of.item.first_visible + seeing_row, of.item.end);
      }
    }
  }

  /// q . k of a block.
  static __device__ __forceinline__ void multiply_keys(uint32_t key_at, const Queries& query,
                                                       Scores& scores) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        uint32_t key[4];
        load_matrices(key, (key_at ^ (step % 4 * 32)) + step / 4 * 128 + i * 16 * kLineBytes);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          multiply_add(scores[tile][i], key, query[tile][step][0], query[tile][step][1]);
        }
      }
    }
  }

  /// Scores of tokens that a pair does not see become -infinity.
  static __device__ __forceinline__ void hide_tokens(const ItemPairs& of, int block, int lane,
                                                     const int (&num_visible)[kTiles][2],
                                                     Scores& scores) {
    const int first = block * kBlockTokens + lane / 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int seen[2] = {first_seen(of.args, of.item.kv_len, num_visible[tile][0]),
                           first_seen(of.args, of.item.kv_len, num_visible[tile][1])};
#pragma unroll
      for (int i = 0; i < kKeyTiles * 4; ++i) {
        const int token = first + i / 2 * 8;
        if (token >= num_visible[tile][i % 2] || token < seen[i % 2]) {
          scores[tile][i / 4][i % 4] = -INFINITY;
        }
      }
    }
  }

  /// Maxima of the scores, and p as a right operand.
  static __device__ __forceinline__ void soften(const Scores& scores, float scale, Sums& sums,
                                                Weights& weights) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float offset[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& m = sums.maximum[tile][i];
        m = fmaxf(scores[tile][0][i], scores[tile][0][i + 2]);
#pragma unroll
        for (int j = 1; j < kKeyTiles; ++j) {
          m = fmaxf(m, fmaxf(scores[tile][j][i], scores[tile][j][i + 2]));
        }
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, distance));
        }
        offset[i] = m == -INFINITY ? 0.0f : -__fmul_rn(m, scale);
      }
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        const float (&s)[4] = scores[tile][j];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          weights[tile][j][i] =
              transposed(pack_bf16(exp2_of(__fmaf_rn(s[2 * i], scale, offset[0])),
                                   exp2_of(__fmaf_rn(s[2 * i + 1], scale, offset[1]))));
        }
      }
    }
  }

  /// p . 1 and p . v of a block.
  static __device__ __forceinline__ void weigh_values(uint32_t value_at, const Weights& weights,
                                                      Sums& sums) {
    constexpr uint32_t kOnes[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float total[4] = {};
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        multiply_add(total, kOnes, weights[tile][j][0], weights[tile][j][1]);
      }
      sums.normaliser[tile][0] = total[0];
      sums.normaliser[tile][1] = total[1];
#pragma unroll
      for (int i = 0; i < Sums::kDimTiles; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sums.out[tile][i][k] = 0.0f;
      }
    }
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int i = 0; i < Sums::kDimTiles; ++i) {
        uint32_t value[4];
        load_matrices_transposed(value,
                                 (value_at ^ (i % 4 * 32)) + i / 4 * 128 + j * 16 * kLineBytes);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          multiply_add(sums.out[tile][i], value, weights[tile][j][0], weights[tile][j][1]);
        }
      }
    }
  }

  /// Merges a block into its run, which is in `sums_at` and `stats_at` so far, and a run that ends
  /// into the item's result, which is in `kept` so far. Then keeps the sums there, or writes them.
  ///
  /// A run goes up to the end of the item or of a segment. Where the item is no whole tile and
  /// began inside the segment, a run is one block, and every run is a partial result of its own.
  static __device__ __forceinline__ void merge(const ItemPairs& of, int block, int block_begin,
                                               bool is_last, bool is_direct, int num_singles,
                                               float scale, int lane, float4* sums_at,
                                               float4* stats_at, float4* kept, Sums& sums) {
    const int in_item = block - block_begin;
    const bool is_single = in_item < num_singles;
    if (in_item > 0 && !is_single && block % kSegmentBlocks != 0) {
      sums.merge_behind(sums_at, stats_at, scale);
    }
    if (!is_last && !is_single && (block + 1) % kSegmentBlocks != 0) {
      sums.keep(sums_at, stats_at);
    } else if (is_direct) {
      float4* kept_stats = kept + kTiles * Sums::kDimTiles * 32 + lane;
      if (block >= kSegmentBlocks) sums.merge_behind(kept + lane, kept_stats, scale);
      if (is_last) {
        sums.store_output(of.args, of.first_row, of.kv_head, of.num_pairs);
      } else {
        sums.keep(kept + lane, kept_stats);
      }
    } else {
      // [of.kv_head][slot][pair] of the tile
      const int run =
          is_single ? in_item
                    : num_singles + block / kSegmentBlocks - ceil_div(block_begin, kSegmentBlocks);
      const int slot = of.kv_head * of.item.num_slots + of.item.first_slot + run;
      sums.store_partial(of.args.workspace,
                         of.item.slot_base + static_cast<int64_t>(slot) * of.num_pairs,
                         of.num_pairs);
    }
  }
};

}  // namespace openspec::span_attention
