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
// Of heads of kMidHeadDim only.
constexpr int kClusterLineBytes = Lines<kMidHeadDim>::kLineBytes;
constexpr int kClusterStageBytes = Lines<kMidHeadDim>::kStageBytes;
constexpr int kClusterColumns = kMidHeadDim / kClusterCtas;
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
  args.out[pair_at<kMidHeadDim>(args, tile_row, kv_head, pair) + column] =
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
          __ldcg(args.partial_sums + at * kMidHeadDim + rank * kClusterColumns + thread % 16);
      all.add(sum, stats.y, stats.x, args.scale);
    }
    store_cluster_sum(args, tile.x, kv_head, pair, rank * kClusterColumns + thread % 16, all);
  }
}

/// A CTA's share of an item and one KV head.
struct ClusterJob {
  const ClusterItem* item;
  int kv_head, kv_len;
  int4 tile, range, low_lines, high_lines;
};

/// The results of a warp's quarter of a block: of rows lane / 4 and lane / 4 + 8.
struct ClusterResult {
  float maximum[2], total[4] = {}, out[4][4] = {};
};

/// One thread's view of a CTA: what it copies and multiplies of every job.
class ClusterCta {
  using Layout = ClusterLayout;

 public:
  __device__ __forceinline__ ClusterCta(const ClusterArgs& args, unsigned char* shared)
      : args_(args), shared_(shared) {
    base_ = shared_address(shared);
    thread_ = threadIdx.x, lane_ = thread_ % 32;
    slot_ = thread_ / 128, part_ = thread_ / 32 % 4;
    rank_ = blockIdx.x % kClusterCtas;
    const uint32_t keys = base_ + slot_ * kClusterStageBytes, values = keys + Layout::kValuesAt;
    scale_ = args.scale;

    // Copies: 16 chunks to a row.
    chunk_ = thread_ % 16, copy_row_ = thread_ / 16 % 8;
    copy_to_ = keys + copy_row_ * kClusterLineBytes + ((chunk_ ^ copy_row_) * 16);

    // Fragments.
    const int matrix = lane_ / 8, matrix_row = lane_ % 8;
    key_at_ = keys + (part_ * 16 + matrix / 2 * 8 + matrix_row) * kClusterLineBytes +
              ((matrix % 2 ^ matrix_row) * 16);
    const uint32_t pair_in_tile = matrix % 2 * 8 + matrix_row;
    value_at_ =
        values + pair_in_tile * kClusterLineBytes + (((part_ * 4 + matrix / 2) ^ matrix_row) * 16);
    query_at_ = base_ + Layout::kQueriesAt + pair_in_tile * kClusterLineBytes +
                ((matrix / 2 ^ matrix_row) * 16);
    weights_ = base_ + Layout::kWeightsAt + slot_ * Layout::kPairs * kBlockTokens * 2;
    row_ = lane_ / 4;
    barrier_ = base_ + Layout::kBarrierAt;
  }

  /// Asks for what the first job is read from, which is known by its place alone. Returns whether
  /// the previous kernel is still to be waited for.
  __device__ __forceinline__ bool begin(int first_work) {
    if (thread_ == 0) {
      cuda::init_barrier(barrier_, 1);
      cuda::publish_barriers();
      cuda::fetch_to_cache(args_.header);
      cuda::fetch_to_cache(args_.items + item_index(first_work) * kClusterCtas + rank_);
    }
    const bool is_early = args_.is_early;
    if (!is_early) cuda::wait_for_previous_kernel();
    block_in_item_ = rank_ + slot_ * kClusterCtas;
    return is_early;
  }

  __device__ __forceinline__ ClusterJob load(int work) const {
    ClusterJob job;
    const int index = item_index(work);
    job.kv_head = work - index * args_.num_kv_heads;
    job.item = args_.items + index * kClusterCtas + rank_;
    job.tile = load_now(job.item);
    job.range = load_now(reinterpret_cast<const int4*>(job.item) + 1);
    const int4* lines_at = reinterpret_cast<const int4*>(job.item->lines) + slot_ * 2;
    job.low_lines = load_now(lines_at);
    job.high_lines = load_now(lines_at + 1);
    job.kv_len = __ldcg(&job.item->kv_len);
    return job;
  }

  /// Starts copying K and Q, and then V. With `is_early` it waits for the previous kernel, and
  /// copies ahead of that what was there before the step.
  __device__ __forceinline__ void start_copies(const ClusterJob& job, bool& is_early) const {
    const int first = (job.range.x + block_in_item_) * kBlockTokens + copy_row_;
    const int num_visible = job.tile.w - first;
    const char* keys_from =
        args_.kv +
        static_cast<int64_t>(job.kv_head * args_.page_size + copy_row_) * kClusterLineBytes +
        chunk_ * 16;
    const char* values_from =
        keys_from + static_cast<int64_t>(args_.num_kv_heads) * args_.page_size * kClusterLineBytes;
    // One multiply-add per address.
    asm volatile("" : "+l"(keys_from), "+l"(values_from));
    // The first time ahead of the wait; then all that is left.
    int begin = 0, end = is_early ? min(job.kv_len - first, kBlockTokens) : kBlockTokens;
#pragma unroll 1
    for (;;) {
      copy_lines(job, copy_to_, keys_from, begin, end, num_visible);
      if (!is_early) {
        copy_query(job);
        commit_copies();
      }
      copy_lines(job, copy_to_ + Layout::kValuesAt, values_from, begin, end, num_visible);
      if (!is_early) break;
      cuda::wait_for_previous_kernel();
      is_early = false;
      begin = max(end, 0);
      end = kBlockTokens;
    }
    commit_copies();
  }

  /// Once K and Q of a job with blocks are there.
  __device__ __forceinline__ void attend(const ClusterJob& job) {
    const bool is_active = block_in_item_ < job.range.y;
    if (thread_ == 0) {
      cuda::expect_bytes(barrier_, job.range.y * job.tile.y * (kClusterColumns * 4 + 8));
    }
    ClusterResult result;
    float scores[2][4] = {};
    float* maxima =
        reinterpret_cast<float*>(shared_ + Layout::kMaximaAt) + slot_ * 4 * Layout::kPairs + row_;
    if (is_active) {
      multiply_keys(scores);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        hide_tokens(job, half, scores);
        share_maximum(scores, half, maxima);
      }
    }
    __syncthreads();
    cuda::arrive_in_cluster();  // this CTA has read its K and Q, and can be sent to
    if (is_active) soften(scores, maxima, result);
    wait_for_copies<0>();
    __syncthreads();
    if (is_active) weigh_values(result);
    cuda::wait_for_cluster();
    if (is_active) send(result, job.tile.y);
    cuda::wait_for_bytes(barrier_, parity_);
    parity_ ^= 1;
    merge(job);
  }

  __device__ __forceinline__ int rank() const { return rank_; }

 private:
  __device__ __forceinline__ int item_index(int work) const {
    return static_cast<int>(uint64_t{static_cast<unsigned>(work)} * args_.num_kv_heads_reciprocal >>
                            31);
  }

  /// Of the thread's rows of the block those from `begin` to `end`; zeros from `num_visible` on.
  __device__ __forceinline__ void copy_lines(const ClusterJob& job, uint32_t to, const char* from,
                                             int begin, int end, int num_visible) const {
    const int lines[8] = {job.low_lines.x,  job.low_lines.y,  job.low_lines.z,  job.low_lines.w,
                          job.high_lines.x, job.high_lines.y, job.high_lines.z, job.high_lines.w};
    if (block_in_item_ >= job.range.y || begin >= end) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (8 * i < begin || 8 * i >= end) continue;
      copy_async(to + i * 8 * kClusterLineBytes,
                 from + uint64_t{static_cast<uint32_t>(lines[i])} * kClusterLineBytes,
                 8 * i < num_visible);
    }
  }
  __device__ __forceinline__ void copy_query(const ClusterJob& job) const {
    const int num_pairs = job.range.y > 0 ? job.tile.y : 0;
    if (num_pairs <= 0) return;
    const int pair = thread_ / 16, tile_pair = min(pair, num_pairs - 1);
    copy_async(
        base_ + Layout::kQueriesAt + pair * kClusterLineBytes + ((chunk_ ^ (pair % 8)) * 16),
        args_.q + pair_at<kMidHeadDim>(args_, job.tile.x, job.kv_head, tile_pair) + chunk_ * 8,
        pair < num_pairs);
  }

  __device__ __forceinline__ void multiply_keys(float (&scores)[2][4]) const {
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      // Bit 7 is no part of the swizzle.
      uint32_t key[4], query[4];
      load_matrices(key, (key_at_ ^ (step % 4 * 32)) + step / 4 * 128);
      load_matrices(query, (query_at_ ^ (step % 4 * 32)) + step / 4 * 128);
      multiply_add(scores[0], query, key[0], key[1]);
      multiply_add(scores[1], query, key[2], key[3]);
    }
  }

  /// Scores of tokens that the pair of a half does not see become -infinity.
  __device__ __forceinline__ void hide_tokens(const ClusterJob& job, int half,
                                              float (&scores)[2][4]) const {
    const int block = job.range.x + block_in_item_;
    const int first_key = block * kBlockTokens + part_ * 16 + lane_ % 4 * 2;
    const int pair = min(row_ + half * 8, job.tile.y - 1);
    const int in_tile = pair * args_.group_reciprocal >> 16;
    const int num_visible = min(job.tile.z + in_tile, job.tile.w);
    const int seen = first_seen(args_, job.kv_len, num_visible);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int token = first_key + j * 8 + k;
        if (token >= num_visible || token < seen) scores[j][2 * half + k] = -INFINITY;
      }
    }
  }

  /// To `maxima` in shared memory, which begin with the lane's first pair.
  __device__ __forceinline__ void share_maximum(const float (&scores)[2][4], int half,
                                                float* maxima) const {
    float m = fmaxf(fmaxf(scores[0][2 * half], scores[0][2 * half + 1]),
                    fmaxf(scores[1][2 * half], scores[1][2 * half + 1]));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    maxima[part_ * Layout::kPairs + half * 8] = m;
  }

  /// The block's maxima, and p to shared memory.
  __device__ __forceinline__ void soften(const float (&scores)[2][4], const float* maxima,
                                         ClusterResult& result) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* others = maxima + half * 8;
      float m = others[0];
#pragma unroll
      for (int other = 1; other < 4; ++other) m = fmaxf(m, others[other * Layout::kPairs]);
      result.maximum[half] = m;
      const float offset = m == -INFINITY ? 0.0f : -__fmul_rn(m, scale_);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t to = weights_ + (row_ + half * 8) * kBlockTokens * 2 +
                            (((part_ * 2 + j) ^ row_) * 16) + lane_ % 4 * 4;
        const uint32_t bits =
            pack_bf16(exp2_of(__fmaf_rn(scores[j][2 * half], scale_, offset)),
                      exp2_of(__fmaf_rn(scores[j][2 * half + 1], scale_, offset)));
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
      }
    }
  }

  /// p . 1 and p . v.
  __device__ __forceinline__ void weigh_values(ClusterResult& result) const {
    const int matrix = lane_ / 8, matrix_row = lane_ % 8;
    const uint32_t weights_at = weights_ + (matrix % 2 * 8 + matrix_row) * kBlockTokens * 2 +
                                ((matrix / 2 ^ matrix_row) * 16);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      constexpr uint32_t kOnes = 0x3f803f80u;
      uint32_t weight[4];
      load_matrices(weight, weights_at ^ (step * 32));
      multiply_add(result.total, weight, kOnes, kOnes);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        uint32_t value[4];
        load_matrices_transposed(value, (value_at_ ^ (j * 16)) + step * 16 * kClusterLineBytes);
        multiply_add(result.out[j], weight, value[0], value[1]);
        multiply_add(result.out[j + 1], weight, value[2], value[3]);
      }
    }
  }

  /// To the CTAs that merge the warp's columns.
  __device__ __forceinline__ void send(const ClusterResult& result, int num_pairs) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t to = cuda::address_in(base_, part_ * 2 + i),
                     heard_by = to + Layout::kBarrierAt;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row_ + half * 8 >= num_pairs) continue;
        const int at = block_in_item_ * Layout::kPairs + row_ + half * 8;
        const uint32_t sums_at = to + Layout::kSumsAt + at * (kClusterColumns * 4) + lane_ % 4 * 8;
        const float (&low)[4] = result.out[2 * i], (&high)[4] = result.out[2 * i + 1];
        cuda::send(sums_at, low[2 * half], low[2 * half + 1], heard_by);
        cuda::send(sums_at + 32, high[2 * half], high[2 * half + 1], heard_by);
        if (lane_ % 4 == 0) {
          cuda::send(to + Layout::kStatsAt + at * 8, result.maximum[half], result.total[2 * half],
                     heard_by);
        }
      }
    }
  }

  /// A thread has one pair and column; of the pair's 16 lanes each weighs one block.
  __device__ __forceinline__ void merge(const ClusterJob& job) const {
    const int in_16 = thread_ % 16;
    ClusterMerge* merges =
        reinterpret_cast<ClusterMerge*>(shared_ + Layout::kMergeAt) + thread_ / 16 * kClusterBlocks;
#pragma unroll 1
    for (int first_pair = 0; first_pair < job.tile.y; first_pair += Layout::kPairs) {
      const int pair = first_pair + thread_ / 16;
      weigh_block(job.range.y, job.tile.y, pair, in_16, merges);
      __syncwarp();
      const ClusterSum all = merge_blocks(job, pair, merges);
      if (job.range.z == 0 && pair < job.tile.y) {
        store_cluster_sum(args_, job.tile.x, job.kv_head, pair, rank_ * kClusterColumns + in_16,
                          all);
      }
      __syncwarp();
    }
  }

  /// How the lane's block enters the pair's segment.
  __device__ __forceinline__ void weigh_block(int num_blocks, int num_pairs, int pair, int in_16,
                                              ClusterMerge* merges) const {
    float2 stats = make_float2(-INFINITY, 0.0f);
    if (in_16 < num_blocks && pair < num_pairs) {
      stats = reinterpret_cast<const float2*>(shared_ +
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
    const MergeWeights mine = merge_weights(before, stats.x, scale_);
    *reinterpret_cast<float4*>(merges + in_16) =
        make_float4(mine.earlier, mine.later, stats.y, running);
  }

  /// The pair's column of all segments; those of a tile of several items become partial results.
  __device__ __forceinline__ ClusterSum merge_blocks(const ClusterJob& job, int pair,
                                                     const ClusterMerge* merges) const {
    const int in_16 = thread_ % 16, num_blocks = job.range.y;
    const float* sums =
        reinterpret_cast<const float*>(shared_ + Layout::kSumsAt) + pair * kClusterColumns + in_16;
    ClusterSum all;
#pragma unroll 1
    for (int first = 0; first < num_blocks; first += kSegmentBlocks) {
      ClusterSum segment;
#pragma unroll
      for (int i = 0; i < kSegmentBlocks; ++i) {
        const float4 merge = *reinterpret_cast<const float4*>(merges + first + i);
        const float later =
            first + i < num_blocks ? sums[(first + i) * Layout::kPairs * kClusterColumns] : 0.0f;
        segment.out = merged(segment.out, later, {merge.x, merge.y});
        segment.normaliser = merged(segment.normaliser, merge.z, {merge.x, merge.y});
        segment.maximum = merge.w;
      }
      if (job.range.z != 0) {
        if (pair >= job.tile.y) continue;
        // Every CTA of the cluster writes the same maximum and normaliser.
        const int64_t at = job.range.w + pair +
                           static_cast<int64_t>(job.kv_head * job.range.z +
                                                (job.range.x + first) / kSegmentBlocks) *
                               job.tile.y;
        args_.partial_sums[at * kMidHeadDim + rank_ * kClusterColumns + in_16] = segment.out;
        if (in_16 == 0) {
          args_.partial_stats[at] = make_float2(segment.maximum, segment.normaliser);
        }
      } else if (first == 0) {
        all = segment;  // as merged into nothing, save the sign of a zero
      } else {
        all.add(segment.out, segment.normaliser, segment.maximum, scale_);
      }
    }
    return all;
  }

  const ClusterArgs& args_;
  float scale_;
  unsigned char* shared_;
  uint32_t base_;  // of shared memory
  int thread_, lane_;
  int slot_, part_;  // of its CTA's two blocks, and of the block's four warps
  int rank_, block_in_item_;
  int chunk_, copy_row_;
  uint32_t copy_to_, key_at_, value_at_, query_at_;
  uint32_t weights_;  // p of the block
  int row_;           // pair of the results; the other one is 8 later
  uint32_t barrier_, parity_ = 0;
};

__global__ void __launch_bounds__(kClusterThreads, ClusterLayout::kCtasPerSm)
    decode_cluster_kernel(const __grid_constant__ ClusterArgs args) {
  cuda::allow_next_kernel();
  extern __shared__ __align__(256) unsigned char shared[];
  ClusterCta cta(args, shared);
  const int first_work = blockIdx.x / kClusterCtas;
  bool is_early = cta.begin(first_work);
  const int num_clusters = gridDim.x / kClusterCtas;

  int work = first_work;
  const int4 header = load_now(args.header);
  ClusterJob job = cta.load(work);  // exists, whether it is one of the step's or not
  const int num_works = header.x * args.num_kv_heads;
  if (work >= num_works) {
    if (is_early) cuda::wait_for_previous_kernel();
    return;
  }
  for (;; work += num_clusters) {
    const bool has_more = work + num_clusters < num_works;
    cta.start_copies(job, is_early);
    wait_for_copies<1>();
    __syncthreads();
    if (job.range.y > 0) cta.attend(job);
    if (job.range.z != 0) merge_items(args, job.item, job.kv_head, cta.rank());
    if (!has_more) return;
    __syncthreads();  // everyone is done with K, V and Q
    job = cta.load(work + num_clusters);
  }
}

#else

__global__ void decode_cluster_kernel(const __grid_constant__ ClusterArgs) {}

#endif

}  // namespace openspec::span_attention
