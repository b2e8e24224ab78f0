#pragma once

/// The arithmetic of attention: one tile of pairs over a range of blocks.
///
/// Every output element is a chain of the same m16n8k16 products and the same fp32 operations for
/// every shape of tile, so a pair's bits depend on its own q and visible keys only:
///   s = q . k             8 products over head_dim, in order, from zero
///   m = max of s          over the visible keys of the block
///   p = 2^(s c - m c)     c = scale * log2(e); one fused multiply-add; 0 where a key is not
///   visible l = p . 1, o = p . v  4 products over the block's keys in order, from zero, p rounded
///   to bf16
/// and (m, l, o) are merged in order. A block of which a row sees nothing changes nothing but the
/// sign of a zero, which finish() clears: so tiles may visit it or not.
///
/// One limit: within a tile a key that a row does not see still meets it with p = 0, so V must be
/// finite there. Behind the last token that any row of the tile sees nothing is read.

#include <cuda_bf16.h>

#include "kernels/span_attention_work.cuh"

namespace openspec::span_attention {

struct AttentionArgs {
  const __nv_bfloat16* q;  // [num_rows, num_q_heads, kHeadDim]
  __nv_bfloat16* out;      // as q
  const char* kv;          // KvLayerView::data
  const int32_t* pages;    // PageTableView::pages
  int max_pages_per_seq;
  int num_q_heads, num_kv_heads, group;
  int page_size;
  int page_shift;  // log2 of page_size; -1: no power of two
  float scale;     // c above
  Workspace workspace;
};

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

/// The thread's index, as a value that nothing can be derived from ahead of time: else addresses of
/// every kind of tile are computed before the loop over items, and spilled.
__device__ __forceinline__ int opaque_thread() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Copies 16 bytes, or writes 16 zero bytes.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool is_wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is_wanted ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Returns when all but the latest kPending groups of this thread have landed.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

/// sum += a . b, 16 x 8 over 16 terms.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

struct MergeWeights {
  float earlier, later;
};

/// Weights of two partial results, and the maximum of both in `maximum`. Of two that are both empty
/// both weights are 0; an empty later one leaves the earlier with weight 1.
__device__ __forceinline__ MergeWeights merge_weights(float& maximum, float later, float scale) {
  const float earlier = maximum;
  maximum = fmaxf(earlier, later);
  const float base = maximum == -INFINITY ? 0.0f : maximum;
  return {exp2_of(__fmul_rn(__fsub_rn(earlier, base), scale)),
          exp2_of(__fmul_rn(__fsub_rn(later, base), scale))};
}
__device__ __forceinline__ float merged(float earlier, float later, MergeWeights weights) {
  return __fmaf_rn(later, weights.later, __fmul_rn(earlier, weights.earlier));
}
/// The output: never -0, whichever empty blocks were merged.
__device__ __forceinline__ float finish(float sum, float reciprocal) {
  return __fmaf_rn(sum, reciprocal, 0.0f);
}

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

/// One warp's share of a tile: kRowTiles x 16 pairs, kDimTiles x 8 columns of the output. A thread
/// has rows lane / 4 and lane / 4 + 8 of each row tile, columns 2 (lane % 4) and the next of each
/// column tile.
template <int kRowTiles, int kDimTiles>
struct Sums {
  float out[kRowTiles][kDimTiles][4];
  float maximum[kRowTiles][2];
  float normaliser[kRowTiles][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kDimTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[tile][i][j] = 0.0f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[tile][half] = -INFINITY;
        normaliser[tile][half] = 0.0f;
      }
    }
  }

  // In the next two `pair` is the thread's first row and `column` its first column.

  /// To the partial results of pairs [0, num_pairs) that begin at `pair_slot`.
  __device__ __forceinline__ void store_partial(const Workspace& workspace, int64_t pair_slot,
                                                int num_pairs, int pair, int column) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = pair + tile * 16 + half * 8;
        if (row >= num_pairs) continue;
        float* to = workspace.partial_sums + (pair_slot + row) * kHeadDim + column;
#pragma unroll
        for (int i = 0; i < kDimTiles; ++i) {
          *reinterpret_cast<float2*>(to + i * 8) =
              make_float2(out[tile][i][2 * half], out[tile][i][2 * half + 1]);
        }
        if (column == 0) {
          workspace.partial_stats[pair_slot + row] =
              make_float2(maximum[tile][half], normaliser[tile][half]);
        }
      }
    }
  }
  __device__ __forceinline__ void store_output(const AttentionArgs& args, int first_row,
                                               int kv_head, int num_pairs, int pair,
                                               int column) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = pair + tile * 16 + half * 8;
        if (row >= num_pairs) continue;
        const float reciprocal = __frcp_rn(normaliser[tile][half]);
        const int head = kv_head * args.group + row % args.group;
        __nv_bfloat16* to =
            args.out + column +
            (static_cast<int64_t>(first_row + row / args.group) * args.num_q_heads + head) *
                kHeadDim;
#pragma unroll
        for (int i = 0; i < kDimTiles; ++i) {
          *reinterpret_cast<uint32_t*>(to + i * 8) =
              pack_bf16(finish(out[tile][i][2 * half], reciprocal),
                        finish(out[tile][i][2 * half + 1], reciprocal));
        }
      }
    }
  }

  // `scratch` is the CTA's; each thread gets back what it kept.
  __device__ __forceinline__ void keep(float4* scratch) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kDimTiles; ++i) {
        const float (&x)[4] = out[tile][i];
        scratch[(tile * kDimTiles + i) * kThreads + threadIdx.x] =
            make_float4(x[0], x[1], x[2], x[3]);
      }
      scratch[(kRowTiles * kDimTiles + tile) * kThreads + threadIdx.x] =
          make_float4(maximum[tile][0], maximum[tile][1], normaliser[tile][0], normaliser[tile][1]);
    }
  }
  /// *this = kept + *this.
  __device__ __forceinline__ void merge_into_kept(const float4* scratch, float scale) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const float4 kept = scratch[(kRowTiles * kDimTiles + tile) * kThreads + threadIdx.x];
      float first = kept.x, second = kept.y;
      const MergeWeights weights[2] = {merge_weights(first, maximum[tile][0], scale),
                                       merge_weights(second, maximum[tile][1], scale)};
      maximum[tile][0] = first;
      maximum[tile][1] = second;
      normaliser[tile][0] = merged(kept.z, normaliser[tile][0], weights[0]);
      normaliser[tile][1] = merged(kept.w, normaliser[tile][1], weights[1]);
#pragma unroll
      for (int i = 0; i < kDimTiles; ++i) {
        float (&x)[4] = out[tile][i];
        const float4 earlier = scratch[(tile * kDimTiles + i) * kThreads + threadIdx.x];
        x[0] = merged(earlier.x, x[0], weights[0]);
        x[1] = merged(earlier.y, x[1], weights[0]);
        x[2] = merged(earlier.z, x[2], weights[1]);
        x[3] = merged(earlier.w, x[3], weights[1]);
      }
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
  int run_blocks = kSegmentBlocks;
  if (!is_direct && (is_tail || block_begin % kSegmentBlocks != 0)) run_blocks = 1;
  bool has_kept = false;

  int block = block_begin;
  while (block < block_end) {
    Sums<kRowTiles, kDimTiles> sums;
    sums.clear();
    const int run_end = min(block_end, (block / run_blocks + 1) * run_blocks);
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

      if ((block + 1) * kBlockTokens > all_visible) {
        const int first = block * kBlockTokens + part * kKeyTiles * 8 + lane % 4 * 2;
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
          for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (first + j * 8 + k % 2 >= num_visible[tile][k / 2]) scores[tile][j][k] = -INFINITY;
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
      const int slot = item.first_slot + (run_blocks == 1 ? block - 1 - block_begin : 0);
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

/// One warp merges a pair's partial results in order and writes its output.
__device__ __forceinline__ void merge_pair(const AttentionArgs& args, const WorkItem& item,
                                           int kv_head, int pair) {
  constexpr int kLoads = 8;  // in flight together
  const int lane = opaque_thread() % 32;
  const int row = item.tile_row + pair / args.group;
  int num_visible = item.kv_len + row - item.span_row + 1;
  if (item.is_tree) {
    const uint32_t* words = args.workspace.ancestors + static_cast<int64_t>(row) * kAncestorWords;
    num_visible = item.kv_len;
    for (int i = 0; i < kAncestorWords; ++i) num_visible += __popc(words[i]);
  }
  const int num_blocks = ceil_div(num_visible, kBlockTokens);
  const int num_shared = min(num_blocks, item.num_shared_blocks);
  const int num_shared_slots = num_slots_of(num_shared, item.range_blocks);
  const int num_slots = num_shared_slots + num_blocks - num_shared;
  const int slots_per_segment = kSegmentBlocks + 1 - item.range_blocks;

  const int tile_pairs = item.tile_rows * args.group;
  const int64_t from =
      item.slot_base + static_cast<int64_t>(kv_head) * item.num_slots * tile_pairs + pair;
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f), part = total;
  float total_max = -INFINITY, total_sum = 0.0f, part_max = -INFINITY, part_sum = 0.0f;
  const auto add = [&](float4& sums, float& maximum, float& normaliser, const float4& later,
                       float later_max, float later_sum) {
    const MergeWeights weights = merge_weights(maximum, later_max, args.scale);
    normaliser = merged(normaliser, later_sum, weights);
    sums.x = merged(sums.x, later.x, weights);
    sums.y = merged(sums.y, later.y, weights);
    sums.z = merged(sums.z, later.z, weights);
    sums.w = merged(sums.w, later.w, weights);
  };
  // Where the slots of the next segment begin; blocks that are not shared have one slot each.
  int num_done = 0;
  const auto end_of_segment = [&] {
    num_done += kSegmentBlocks;
    return num_done <= num_shared ? num_done / kSegmentBlocks * slots_per_segment
                                  : num_shared_slots + num_done - num_shared;
  };
  int segment_end = end_of_segment();
  for (int begin = 0; begin < num_slots; begin += kLoads) {
    float4 sums[kLoads];
    float2 stats[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (begin + i < num_slots) {
        // Written by other SMs in this launch: from L2.
        const int64_t slot = from + static_cast<int64_t>(begin + i) * tile_pairs;
        sums[i] = __ldcg(
            reinterpret_cast<const float4*>(args.workspace.partial_sums + slot * kHeadDim) + lane);
        stats[i] = __ldcg(args.workspace.partial_stats + slot);
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (begin + i < num_slots) {
        if (begin + i == segment_end) {
          add(total, total_max, total_sum, part, part_max, part_sum);
          part = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          part_max = -INFINITY;
          part_sum = 0.0f;
          segment_end = end_of_segment();
        }
        add(part, part_max, part_sum, sums[i], stats[i].x, stats[i].y);
      }
    }
  }
  add(total, total_max, total_sum, part, part_max, part_sum);

  const float reciprocal = __frcp_rn(total_sum);
  const int head = kv_head * args.group + pair % args.group;
  uint2 bits;
  bits.x = pack_bf16(finish(total.x, reciprocal), finish(total.y, reciprocal));
  bits.y = pack_bf16(finish(total.z, reciprocal), finish(total.w, reciprocal));
  reinterpret_cast<uint2*>(args.out + (static_cast<int64_t>(row) * args.num_q_heads + head) *
                                          kHeadDim)[lane] = bits;
}

}  // namespace openspec::span_attention
