#pragma once

/// Attention of steps with few rows and no trees, where a layer is a chain of latencies rather than
/// of bytes. Everything else in the step runs between two launches, so the code comes from memory
/// again every time: little of it, and each loop that costs nothing stays one.
///
/// A cluster of kClusterCtas CTAs attends to one ClusterItem and KV head. Four warps compute one
/// block, each a quarter of the keys and then of the columns, and write the block's result straight
/// into the shared memory of the CTAs that merge it, each of them kClusterColumns columns.

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "kernels/attention/sums.cuh"
#include "kernels/common/cluster.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"

namespace openspec::span_attention {

constexpr int kClusterThreads = 256;
// Of heads of kMaxHeadDim only.
constexpr int kClusterLineBytes = Lines<kMaxHeadDim>::kLineBytes;
constexpr int kClusterStageBytes = Lines<kMaxHeadDim>::kStageBytes;
constexpr int kClusterColumns = kMaxHeadDim / kClusterCtas;
static_assert(kClusterColumns * 16 == kClusterThreads && kClusterBlocks == 16 &&
              kClusterColumns == 16);

/// Shared memory of a CTA: K of both blocks, V of both and Q, all in rows of 256 bytes, chunks
/// swizzled by row; per block p as bf16, rows of 128 bytes, and the warps' maxima.
struct ClusterLayout {
  static constexpr int kPairs = kMinTilePairs;
  static constexpr int kValuesAt = 2 * kClusterStageBytes;
  static constexpr int kQueriesAt = 4 * kClusterStageBytes;
  static constexpr int kWeightsAt = kQueriesAt + kPairs * kClusterLineBytes;
  static constexpr int kMaximaAt = kWeightsAt + 2 * kPairs * kBlockTokens * 2;
  static constexpr int kBarrierAt = kMaximaAt + 2 * 4 * kPairs * 4;
  static constexpr int kUsedBytes = kBarrierAt + 16;
  // More than a third of what an SM has, for steps of which all clusters run at once in twos: in
  // threes they would pile up on whichever SMs are free first.
  static constexpr int kApartBytes = 77 * 1024;
  // Where K was, what the cluster's CTAs wrote: [block][pair][kClusterColumns]. After it, maximum
  // and normaliser [block][pair] and ClusterMerge [pair][block].
  static constexpr int kSumsAt = 0;
  static constexpr int kStatsAt = kClusterBlocks * kPairs * kClusterColumns * 4;
  static constexpr int kMergeAt = kStatsAt + kClusterBlocks * kPairs * 8;
  static_assert(kMergeAt + kClusterBlocks * kPairs * 16 <= kValuesAt);
  // 80 registers: CTAs of the kernels before and after find room beside. Measured: with 114 (and
  // the next item's copies under way during the merge) a layer alone is a little faster, a step
  // slower.
  static constexpr int kCtasPerSm = 3;
  static_assert(kUsedBytes <= kApartBytes && kCtasPerSm * (kUsedBytes + 1024) <= 228 * 1024);
};

struct ClusterArgs {
  const __nv_bfloat16* q;  // as AttentionArgs
  __nv_bfloat16* out;
  const char* kv;
  int num_q_heads, num_kv_heads, group;
  // 2^16 and 2^31 over what they stand for, rounded up: products shifted back are quotients.
  uint32_t group_reciprocal, num_kv_heads_reciprocal;
  int page_size;
  float scale;
  int first_token;
  int window;
  bool window_follows_rows;
  bool is_early;
  const WorkHeader* header;
  const ClusterItem* items;
  int32_t* num_arrived;
  float2* partial_stats;
  float* partial_sums;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/// From L2, here and not later: several loads in flight before the first is looked at.
__device__ __forceinline__ int4 load_now(const void* from) {
  int4 x;
  asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

/// How one block enters the pair's segment, and the segment's maximum up to it.
struct ClusterMerge {
  MergeWeights weights;
  float normaliser, maximum;
};
static_assert(sizeof(ClusterMerge) == 16);

/// Running results of one pair, one column.
struct ClusterSum {
  float out = 0.0f, normaliser = 0.0f, maximum = -INFINITY;

  __device__ __forceinline__ void add(float later, float later_sum, float later_max, float scale) {
    const MergeWeights weights = merge_weights(maximum, later_max, scale);
    normaliser = merged(normaliser, later_sum, weights);
    out = merged(out, later, weights);
  }
};

__device__ __forceinline__ void store_cluster_sum(const ClusterArgs& args, int tile_row,
                                                  int kv_head, int pair, int column,
                                                  const ClusterSum& sum) {
  args.out[pair_at<kMaxHeadDim>(args, tile_row, kv_head, pair) + column] =
      __float2bfloat16_rn(finish(sum.out, __frcp_rn(sum.normaliser)));
}

/// Counts an item of a tile that is cut as done; the last CTA of this rank merges the rank's
/// columns of all segments of the tile.
__device__ __forceinline__ void merge_items(const ClusterArgs& args, const ClusterItem* item,
                                            int kv_head, int rank) {
  const int thread = threadIdx.x;
  const int4 tile = load_now(item), range = load_now(reinterpret_cast<const int4*>(item) + 1);
  const int4 arrival = load_now(reinterpret_cast<const int4*>(item) + 2);
  __syncthreads();
  int32_t* counter =
      args.num_arrived + (arrival.y * args.num_kv_heads + kv_head) * kClusterCtas + rank;
  bool is_last = false;
  if (thread == 0) {
    is_last = add_and_order(counter) == arrival.x - 1;
    if (is_last) *counter = 0;
  }
  if (!__syncthreads_or(is_last)) return;
  // Runs once, as the loop below over pairs: as loops they spill less.
#pragma unroll 1
  for (int pair = thread / 16; pair < tile.y; pair += ClusterLayout::kPairs) {
    ClusterSum all;
    int64_t at = range.w + pair + static_cast<int64_t>(kv_head) * range.z * tile.y;
#pragma unroll 4
    for (int i = 0; i < arrival.z; ++i, at += tile.y) {
      const float2 stats = __ldcg(args.partial_stats + at);
      const float sum =
          __ldcg(args.partial_sums + at * kMaxHeadDim + rank * kClusterColumns + thread % 16);
      all.add(sum, stats.y, stats.x, args.scale);
    }
    store_cluster_sum(args, tile.x, kv_head, pair, rank * kClusterColumns + thread % 16, all);
  }
}

__global__ void __launch_bounds__(kClusterThreads, ClusterLayout::kCtasPerSm)
    decode_cluster_kernel(const __grid_constant__ ClusterArgs args) {
  using Layout = ClusterLayout;
  cuda::allow_next_kernel();
  extern __shared__ __align__(256) unsigned char shared[];
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread % 32;
  const int slot = thread / 128, part = thread / 32 % 4;
  const int rank = blockIdx.x % kClusterCtas;
  const uint32_t keys = base + slot * kClusterStageBytes, values = keys + Layout::kValuesAt;
  const float scale = args.scale;

  // Copies: 16 chunks to a row.
  const int chunk = thread % 16, copy_row = thread / 16 % 8;
  const uint32_t copy_to = keys + copy_row * kClusterLineBytes + ((chunk ^ copy_row) * 16);

  // Fragments.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const uint32_t key_at = keys + (part * 16 + matrix / 2 * 8 + matrix_row) * kClusterLineBytes +
                          ((matrix % 2 ^ matrix_row) * 16);
  const uint32_t pair_in_tile = matrix % 2 * 8 + matrix_row;
  const uint32_t value_at =
      values + pair_in_tile * kClusterLineBytes + (((part * 4 + matrix / 2) ^ matrix_row) * 16);
  const uint32_t query_at = base + Layout::kQueriesAt + pair_in_tile * kClusterLineBytes +
                            ((matrix / 2 ^ matrix_row) * 16);
  const uint32_t weights = base + Layout::kWeightsAt + slot * Layout::kPairs * kBlockTokens * 2;
  const int row = lane / 4;  // and row + 8

  const uint32_t barrier = base + Layout::kBarrierAt;
  uint32_t parity = 0;
  // What the first job is read from. Known by its place alone.
  const int first_work = blockIdx.x / kClusterCtas;
  if (thread == 0) {
    cuda::init_barrier(barrier, 1);
    cuda::publish_barriers();
    cuda::fetch_to_cache(args.header);
    cuda::fetch_to_cache(
        args.items +
        static_cast<int>(
            uint64_t{static_cast<unsigned>(first_work)} * args.num_kv_heads_reciprocal >> 31) *
            kClusterCtas +
        rank);
  }

  bool is_early = args.is_early;
  if (!is_early) cuda::wait_for_previous_kernel();
  const int num_clusters = gridDim.x / kClusterCtas;
  // An item's share of a CTA, and one KV head.
  struct Job {
    const ClusterItem* item;
    int kv_head, kv_len;
    int4 tile, range, low_lines, high_lines;
  };
  const auto load_job = [&](int work) {
    Job job;
    const int index = static_cast<int>(
        uint64_t{static_cast<unsigned>(work)} * args.num_kv_heads_reciprocal >> 31);
    job.kv_head = work - index * args.num_kv_heads;
    job.item = args.items + index * kClusterCtas + rank;
    job.tile = load_now(job.item);
    job.range = load_now(reinterpret_cast<const int4*>(job.item) + 1);
    const int4* lines_at = reinterpret_cast<const int4*>(job.item->lines) + slot * 2;
    job.low_lines = load_now(lines_at);
    job.high_lines = load_now(lines_at + 1);
    job.kv_len = __ldcg(&job.item->kv_len);
    return job;
  };
  const int block_in_item = rank + slot * kClusterCtas;
  const auto start_copies = [&](const Job& job) {
    const bool is_active = block_in_item < job.range.y;
    const int lines[8] = {job.low_lines.x,  job.low_lines.y,  job.low_lines.z,  job.low_lines.w,
                          job.high_lines.x, job.high_lines.y, job.high_lines.z, job.high_lines.w};
    const int first = (job.range.x + block_in_item) * kBlockTokens + copy_row;
    const int num_visible = job.tile.w - first;
    const char* keys_from =
        args.kv +
        static_cast<int64_t>(job.kv_head * args.page_size + copy_row) * kClusterLineBytes +
        chunk * 16;
    const char* values_from =
        keys_from + static_cast<int64_t>(args.num_kv_heads) * args.page_size * kClusterLineBytes;
    // One multiply-add per address.
    asm volatile("" : "+l"(keys_from), "+l"(values_from));
    // Of the thread's rows of the block those from `begin` to `end`.
    const auto copy = [&](uint32_t to, const char* from, int begin, int end) {
      if (!is_active || begin >= end) return;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (8 * i < begin || 8 * i >= end) continue;
        copy_async(to + i * 8 * kClusterLineBytes,
                   from + uint64_t{static_cast<uint32_t>(lines[i])} * kClusterLineBytes,
                   8 * i < num_visible);
      }
    };
    // What was there before the step, the first time ahead of the wait; then all that is left.
    int begin = 0, end = is_early ? min(job.kv_len - first, kBlockTokens) : kBlockTokens;
#pragma unroll 1
    for (;;) {
      copy(copy_to, keys_from, begin, end);
      if (!is_early) {
        const int num_pairs = job.range.y > 0 ? job.tile.y : 0;
        if (num_pairs > 0) {
          const int pair = thread / 16, tile_pair = min(pair, num_pairs - 1);
          copy_async(
              base + Layout::kQueriesAt + pair * kClusterLineBytes + ((chunk ^ (pair % 8)) * 16),
              args.q + pair_at<kMaxHeadDim>(args, job.tile.x, job.kv_head, tile_pair) + chunk * 8,
              pair < num_pairs);
        }
        commit_copies();
      }
      copy(copy_to + Layout::kValuesAt, values_from, begin, end);
      if (!is_early) break;
      cuda::wait_for_previous_kernel();
      is_early = false;
      begin = max(end, 0);
      end = kBlockTokens;
    }
    commit_copies();
  };

  int work = first_work;
  const int4 header = load_now(args.header);
  Job job = load_job(work);  // exists, whether it is one of the step's or not
  const int num_works = header.x * args.num_kv_heads;
  if (work >= num_works) {
    if (is_early) cuda::wait_for_previous_kernel();
    return;
  }
  for (;; work += num_clusters) {
    const bool has_more = work + num_clusters < num_works;
    start_copies(job);
    const int4 tile = job.tile, range = job.range;
    const int kv_head = job.kv_head;
    const int tile_row = tile.x, num_pairs = tile.y, num_blocks = range.y;
    const int block = range.x + block_in_item;
    const bool is_active = block_in_item < num_blocks;
    wait_for_copies<1>();
    __syncthreads();

    if (num_blocks > 0) {
      if (thread == 0)
        cuda::expect_bytes(barrier, num_blocks * num_pairs * (kClusterColumns * 4 + 8));
      float maximum[2], total[4] = {}, scores[2][4] = {};
      float* maxima =
          reinterpret_cast<float*>(shared + Layout::kMaximaAt) + slot * 4 * Layout::kPairs + row;
      if (is_active) {
#pragma unroll
        for (int step = 0; step < 8; ++step) {
          // Bit 7 is no part of the swizzle.
          uint32_t key[4], query[4];
          load_matrices(key, (key_at ^ (step % 4 * 32)) + step / 4 * 128);
          load_matrices(query, (query_at ^ (step % 4 * 32)) + step / 4 * 128);
          multiply_add(scores[0], query, key[0], key[1]);
          multiply_add(scores[1], query, key[2], key[3]);
        }
        const int first_key = block * kBlockTokens + part * 16 + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int pair = min(row + half * 8, num_pairs - 1);
          const int in_tile = pair * args.group_reciprocal >> 16;
          const int num_visible = min(tile.z + in_tile, tile.w);
          const int seen = first_seen(args, job.kv_len, num_visible);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const int token = first_key + j * 8 + k;
              if (token >= num_visible || token < seen) {
                scores[j][2 * half + k] = -INFINITY;
              }
            }
          }
          float m = fmaxf(fmaxf(scores[0][2 * half], scores[0][2 * half + 1]),
                          fmaxf(scores[1][2 * half], scores[1][2 * half + 1]));
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
          maxima[part * Layout::kPairs + half * 8] = m;
        }
      }
      __syncthreads();
      cuda::arrive_in_cluster();  // this CTA has read its K and Q, and can be sent to
      if (is_active) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* others = maxima + half * 8;
          float m = others[0];
#pragma unroll
          for (int other = 1; other < 4; ++other) m = fmaxf(m, others[other * Layout::kPairs]);
          maximum[half] = m;
          const float offset = m == -INFINITY ? 0.0f : -__fmul_rn(m, scale);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint32_t to = weights + (row + half * 8) * kBlockTokens * 2 +
                                (((part * 2 + j) ^ row) * 16) + lane % 4 * 4;
            const uint32_t bits =
                pack_bf16(exp2_of(__fmaf_rn(scores[j][2 * half], scale, offset)),
                          exp2_of(__fmaf_rn(scores[j][2 * half + 1], scale, offset)));
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
          }
        }
      }
      wait_for_copies<0>();
      __syncthreads();

      float out[4][4] = {};
      if (is_active) {
        const uint32_t weights_at =
            weights + pair_in_tile * kBlockTokens * 2 + ((matrix / 2 ^ matrix_row) * 16);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          constexpr uint32_t kOnes = 0x3f803f80u;
          uint32_t weight[4];
          load_matrices(weight, weights_at ^ (step * 32));
          multiply_add(total, weight, kOnes, kOnes);
#pragma unroll
          for (int j = 0; j < 4; j += 2) {
            uint32_t value[4];
            load_matrices_transposed(value, (value_at ^ (j * 16)) + step * 16 * kClusterLineBytes);
            multiply_add(out[j], weight, value[0], value[1]);
            multiply_add(out[j + 1], weight, value[2], value[3]);
          }
        }
      }
      cuda::wait_for_cluster();
      if (is_active) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t to = cuda::address_in(base, part * 2 + i),
                         heard_by = to + Layout::kBarrierAt;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (row + half * 8 >= num_pairs) continue;
            const int at = block_in_item * Layout::kPairs + row + half * 8;
            const uint32_t sums_at =
                to + Layout::kSumsAt + at * (kClusterColumns * 4) + lane % 4 * 8;
            const float (&low)[4] = out[2 * i], (&high)[4] = out[2 * i + 1];
            cuda::send(sums_at, low[2 * half], low[2 * half + 1], heard_by);
            cuda::send(sums_at + 32, high[2 * half], high[2 * half + 1], heard_by);
            if (lane % 4 == 0) {
              cuda::send(to + Layout::kStatsAt + at * 8, maximum[half], total[2 * half], heard_by);
            }
          }
        }
      }
      cuda::wait_for_bytes(barrier, parity);
      parity ^= 1;

      // A thread has one pair and column; of the pair's 16 lanes each weighs one block.
      const int in_16 = thread % 16;
      ClusterMerge* merges =
          reinterpret_cast<ClusterMerge*>(shared + Layout::kMergeAt) + thread / 16 * kClusterBlocks;
#pragma unroll 1
      for (int first_pair = 0; first_pair < num_pairs; first_pair += Layout::kPairs) {
        const int pair = first_pair + thread / 16;
        float2 stats = make_float2(-INFINITY, 0.0f);
        if (in_16 < num_blocks && pair < num_pairs) {
          stats = reinterpret_cast<const float2*>(shared +
                                                  Layout::kStatsAt)[in_16 * Layout::kPairs + pair];
        }
        float running = stats.x;  // up to this block, in the segment
#pragma unroll
        for (int offset = 1; offset < kSegmentBlocks; offset *= 2) {
          const float before = __shfl_up_sync(0xffffffffu, running, offset, kSegmentBlocks);
          running = fmaxf(running, before);  // a lane without one gets its own
        }
        float before = __shfl_up_sync(0xffffffffu, running, 1, kSegmentBlocks);
        if (in_16 % kSegmentBlocks == 0) before = -INFINITY;
        const MergeWeights mine = merge_weights(before, stats.x, scale);
        *reinterpret_cast<float4*>(merges + in_16) =
            make_float4(mine.earlier, mine.later, stats.y, running);
        __syncwarp();

        const float* sums = reinterpret_cast<const float*>(shared + Layout::kSumsAt) +
                            pair * kClusterColumns + in_16;
        ClusterSum all;
#pragma unroll 1
        for (int first = 0; first < num_blocks; first += kSegmentBlocks) {
          ClusterSum segment;
#pragma unroll
          for (int i = 0; i < kSegmentBlocks; ++i) {
            const float4 merge = *reinterpret_cast<const float4*>(merges + first + i);
            const float later = first + i < num_blocks
                                    ? sums[(first + i) * Layout::kPairs * kClusterColumns]
                                    : 0.0f;
            segment.out = merged(segment.out, later, {merge.x, merge.y});
            segment.normaliser = merged(segment.normaliser, merge.z, {merge.x, merge.y});
            segment.maximum = merge.w;
          }
          if (range.z != 0) {
            if (pair >= num_pairs) continue;
            // Every CTA of the cluster writes the same maximum and normaliser.
            const int64_t at =
                range.w + pair +
                static_cast<int64_t>(kv_head * range.z + (range.x + first) / kSegmentBlocks) *
                    num_pairs;
            args.partial_sums[at * kMaxHeadDim + rank * kClusterColumns + in_16] = segment.out;
            if (in_16 == 0) {
              args.partial_stats[at] = make_float2(segment.maximum, segment.normaliser);
            }
          } else if (first == 0) {
            all = segment;  // as merged into nothing, save the sign of a zero
          } else {
            all.add(segment.out, segment.normaliser, segment.maximum, scale);
          }
        }
        if (range.z == 0 && pair < num_pairs) {
          store_cluster_sum(args, tile_row, kv_head, pair, rank * kClusterColumns + in_16, all);
        }
        __syncwarp();
      }
    }

    if (range.z != 0) merge_items(args, job.item, kv_head, rank);
    if (!has_more) return;
    __syncthreads();  // everyone is done with K, V and Q
    job = load_job(work + num_clusters);
  }
}

#else

__global__ void decode_cluster_kernel(const __grid_constant__ ClusterArgs) {}

#endif

}  // namespace openspec::span_attention
