#pragma once

/// Tiles of 128 pairs on the warpgroup products of sm_90a: prompts, and chains of many pairs.
///
/// The arithmetic is that of math.cuh: a product of a warpgroup over 16 k adds up as
/// m16n8k16 does, so chains of them give the same bits. p . 1 is one more column tile of p . v,
/// over a V that is followed by ones.
///
/// A block of threads stays for many items. The warps of one warpgroup draw them and copy their K
/// and V into a ring (prefill_wgmma_copy.cuh); two warpgroups have 64 of the tile's pairs
/// each. The scores of a warpgroup's next block and p . v of the present one go to the matrix units
/// together; while it computes weights and merges, the other warpgroup has the matrix units.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/math.cuh"
#include "kernels/attention/prefill_wgmma_copy.cuh"
#include "kernels/attention/sums.cuh"
#include "kernels/attention/work.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/wgmma.cuh"

namespace openspec::span_attention {

#ifdef OPENSPEC_HAS_WGMMA

// Of every thread, once roles are known; it begins with 168.
inline constexpr int kCopyingRegisters = 40;
inline constexpr int kMultiplyingRegisters = 232;

/// A warpgroup that multiplies.
template <int kHeadDim>
class PairGroup {
  using Layout = WgmmaLayout<kHeadDim>;
  using Position = RingPosition<Layout::kStages>;
  static constexpr int kPanels = Layout::kPanels, kChunks = kHeadDim / 8;

 public:
  __device__ PairGroup(const AttentionArgs& args, const KvRing& ring, float4* scratch)
      : args_(args), ring_(ring) {
    // Not threadIdx.x itself: ptxas 13.0 takes (uniform(tid / 128) * 2048 + tid) * 16, where Sums
    // keeps what it keeps, for a uniform value and drops the thread.
    group_ = uniform(opaque_thread() / kGroupThreads);
    lane_ = threadIdx.x % 32;
    queries_ = ring.queries + group_ * kPanels * kPanelBytes;
    // Sums indexes it by the thread of the block.
    scratch_ = scratch + group_ * (Layout::kKept - 1) * kGroupThreads;
  }

  __device__ __forceinline__ void attend(const WorkItem& item, int kv_head) {
    const int num_pairs = item.tile_rows * args_.group, first_pair = group_ * kGroupPairs;
    const int first_visible = item.first_visible;
    int num_visible = 0;  // by any pair of the group
    if (first_pair < num_pairs) {
      const int last_row = (min(first_pair + kGroupPairs, num_pairs) - 1) / args_.group;
      num_visible = min(first_visible + last_row, item.end);
    }
    const int block_end = uniform(min(item.block_end, ceil_div(num_visible, kBlockTokens)));
    int block = uniform(item.block_begin);
    if (block < block_end) {
      load_queries(item, kv_head, num_pairs);
      attend_blocks(item, kv_head, num_pairs, first_visible, block, block_end);
      block = block_end;
    }
    for (; block < item.block_end; ++block) pass_block();
    if (item.num_slots > 0) arrive(item, kv_head);
  }

 private:
  __device__ __forceinline__ void load_queries(const WorkItem& item, int kv_head, int num_pairs) {
    const int thread = threadIdx.x % kGroupThreads;
    constexpr int kRows = kGroupThreads / kChunks;  // at a time
    const int chunk = thread % kChunks, row = thread / kChunks, first = group_ * kGroupPairs + row;
    const uint32_t to = queries_ + chunk / 8 * kPanelBytes + row * 128 + (chunk % 8 ^ row % 8) * 16;
    // The other warps are done with the tile before.
    wgmma::sync_group(group_);
#pragma unroll
    for (int i = 0; i < kGroupPairs / kRows; ++i) {
      const int pair = first + kRows * i;
      const int64_t from =
          pair_at<kHeadDim>(args_, item.tile_row, kv_head, min(pair, num_pairs - 1));
      copy_async(to + i * kRows * 128, args_.q + from + chunk * 8, pair < num_pairs);
    }
    commit_copies();
    wait_for_copies<0>();
    wgmma::publish_writes();
    wgmma::sync_group(group_);
  }

  __device__ __forceinline__ uint32_t keys_at(Position at) const {
    return ring_.stages + at.index * Layout::kStageBytes;
  }
  __device__ __forceinline__ uint32_t values_at(Position at) const {
    return keys_at(at) + kPanels * kPanelBytes;
  }

  /// Starts the scores of the block at `at`.
  __device__ __forceinline__ void start_scores(float (&scores)[32], Position at) {
    constexpr uint64_t kForm = wgmma::describe_form(1024, true);
    constexpr uint32_t kPanel = kPanelBytes / 16;
    const uint32_t keys = uniform(wgmma::describe_place(keys_at(at), 16));
    wgmma::wait(ring_.full_keys + at.index * 8, at.parity);
    wgmma::begin_products();
    const auto key = [&](int step) { return kForm | (keys + step / 4 * kPanel + step % 4 * 2); };
    const uint32_t queries = wgmma::describe_place(queries_, 16);
    const auto query = [&](int step) {
      return kForm | (queries + step / 4 * kPanel + step % 4 * 2);
    };
    wgmma::multiply_64<true>(scores, query(0), key(0));
#pragma unroll
    for (int step = 1; step < kHeadDim / 16; ++step) {
      wgmma::multiply_64<false>(scores, query(step), key(step));
    }
    wgmma::end_products();
  }

  /// Starts p . v and p . 1 of the stage at `values`.
  __device__ __forceinline__ void start_sums(float (&product)[kHeadDim / 2 + 4],
                                             uint32_t (&weights)[4][4], uint32_t values) {
    constexpr uint64_t kForm = wgmma::describe_form(1024, true);
    const uint32_t place = uniform(wgmma::describe_place(values, kPanelBytes));
    wgmma::begin_products();
    wgmma::multiply_along_rows<true>(product, weights[0], kForm | place);
#pragma unroll
    for (int step = 1; step < 4; ++step) {
      wgmma::multiply_along_rows<false>(product, weights[step], kForm | (place + step * 128));
    }
    wgmma::end_products();
  }

  /// Maxima of the scores, and p in their place.
  __device__ __forceinline__ void weigh(float (&scores)[32], float (&maximum)[2]) {
    float offset[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m[2] = {fmaxf(scores[2 * half], scores[2 * half + 1]),
                    fmaxf(scores[4 + 2 * half], scores[4 + 2 * half + 1])};
#pragma unroll
      for (int j = 2; j < 8; ++j) {
        m[j % 2] = fmaxf(m[j % 2], fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
      }
      maximum[half] = fmaxf(m[0], m[1]);
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[half] = fmaxf(maximum[half], __shfl_xor_sync(0xffffffffu, maximum[half], distance));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float m = maximum[half];
      offset[half] = m == -INFINITY ? 0.0f : -__fmul_rn(m, args_.scale);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      scores[i] = exp2_of(__fmaf_rn(scores[i], args_.scale, offset[i % 4 / 2]));
    }
  }
  /// p in the form of a left operand.
  __device__ __forceinline__ void pack(uint32_t (&weights)[4][4], const float (&p)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) weights[i / 4][i % 4] = pack_bf16(p[2 * i], p[2 * i + 1]);
  }

  /// V after the last token becomes zero: there may be anything.
  __device__ __forceinline__ void clear_values(uint32_t values, int first_row) {
    const int thread = threadIdx.x % kGroupThreads;
    const float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int row = thread / kChunks; row < kBlockTokens; row += kGroupThreads / kChunks) {
      if (row < first_row) continue;
      wgmma::store_floats(values + thread % kChunks / 8 * kPanelBytes + row * 128 + thread % 8 * 16,
                          zeros);
    }
    wgmma::publish_writes();
    wgmma::sync_group(group_);
  }

  /// Writes an item's sums: the tile's output where the item is the whole tile, else a partial
  /// result.
  __device__ __forceinline__ void store_sums(const WorkItem& item, int kv_head, int num_pairs,
                                             int pair, bool is_direct, bool has_kept,
                                             Sums<kHeadDim, 1, kHeadDim / 8>& sums) {
    const int column = lane_ % 4 * 2;
    if (is_direct) {
      if (has_kept) sums.merge_into_kept(scratch_, args_.scale);
      sums.store_output(args_, item.tile_row, kv_head, num_pairs, pair, column);
    } else {
      const int64_t pair_slot =
          item.slot_base +
          static_cast<int64_t>(kv_head * item.num_slots + item.first_slot) * num_pairs;
      sums.store_partial(args_.workspace, pair_slot, num_pairs, pair, column);
    }
  }

  __device__ __forceinline__ void attend_blocks(const WorkItem& item, int kv_head, int num_pairs,
                                                int first_visible, int block_begin, int block_end) {
    const float scale = args_.scale;
    const int pair = group_ * kGroupPairs + threadIdx.x % kGroupThreads / 32 * 16 + lane_ / 4;
    int num_visible[2];  // by the thread's pairs
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(pair + 8 * half, num_pairs - 1) / args_.group;
      num_visible[half] = min(first_visible + row, item.end);
    }
    const int end = uniform(item.end);
    const int all_visible = min(uniform(first_visible + group_ * kGroupPairs / args_.group), end);
    const bool is_direct = uniform(item.num_slots) == 0;

    Sums<kHeadDim, 1, kHeadDim / 8> sums;
    sums.clear();
    bool has_kept = false;
    float scores[32], maximum[2];
    uint32_t weights[4][4];
    float product[kHeadDim / 2 + 4];
    MergeWeights merge[2];

    const auto finish_scores = [&](int block, Position at) {
      wgmma::pin(scores);
      release(ring_.empty_keys, at.index);
      if ((block + 1) * kBlockTokens > all_visible || block * kBlockTokens < args_.hidden_end) {
        const int first = block * kBlockTokens + lane_ % 4 * 2;
        const int seen[2] = {first_seen(args_, item.kv_len, num_visible[0]),
                             first_seen(args_, item.kv_len, num_visible[1])};
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int token = first + i / 4 * 8 + i % 2;
          if (token >= num_visible[i % 4 / 2] || token < seen[i % 4 / 2]) scores[i] = -INFINITY;
        }
      }
      weigh(scores, maximum);
      wgmma::pin(scores);
      // Here for the sake of its loop: without one ptxas moves all of weigh() past the next wait
      // for products. (It still moves the exponentials there, among the merge's multiplications.)
      wgmma::wait(ring_.full_values + at.index * 8, at.parity);
    };
    const auto begin_sums = [&](Position at) {
      start_sums(product, weights, values_at(at));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        merge[half] = merge_weights(sums.maximum[0][half], maximum[half], scale);
      }
    };
    const auto finish_sums = [&](Position at) {
      wgmma::wait_products<0>();
      wgmma::pin(product);
#pragma unroll
      for (int step = 0; step < 4; ++step) wgmma::pin(weights[step]);
      release(ring_.empty_values, at.index);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& normaliser = sums.normaliser[0][half];
        normaliser = merged(normaliser, product[kHeadDim / 2 + 2 * half], merge[half]);
      }
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) {
        float& sum = sums.out[0][i / 4][i % 4];
        sum = merged(sum, product[i], merge[i % 4 / 2]);
      }
    };
    // Weights are a block ahead of sums, so that the warpgroup computes them while p . v of the
    // block before is on its way. ptxas leaves products in flight only if they end in the same
    // round of the loop and nothing writes their registers meanwhile, hence pack() by itself.
    int block = block_begin;
    start_scores(scores, at_);
    wgmma::wait_products<0>();
    finish_scores(block, at_);
    pack(weights, scores);
    while (block + 1 < block_end) {
      const Position next = at_.next();
      start_scores(scores, next);
      begin_sums(at_);
      wgmma::wait_products<1>();
      finish_scores(block + 1, next);
      finish_sums(at_);
      pack(weights, scores);
      at_ = next;
      ++block;
      if (block % kSegmentBlocks == 0) {
        if (has_kept) sums.merge_into_kept(scratch_, scale);
        sums.keep(scratch_);
        has_kept = true;
        sums.clear();
      }
    }
    if ((block + 1) * kBlockTokens > end) clear_values(values_at(at_), end - block * kBlockTokens);
    begin_sums(at_);
    finish_sums(at_);
    at_ = at_.next();

    store_sums(item, kv_head, num_pairs, pair, is_direct, has_kept, sums);
  }

  /// A block of the item of which the group sees nothing.
  __device__ __forceinline__ void pass_block() {
    wgmma::wait(ring_.full_keys + at_.index * 8, at_.parity);
    release(ring_.empty_keys, at_.index);
    wgmma::wait(ring_.full_values + at_.index * 8, at_.parity);
    release(ring_.empty_values, at_.index);
    at_ = at_.next();
  }

  __device__ __forceinline__ void release(uint32_t barriers, int index) {
    if (lane_ == 0) wgmma::arrive(barriers + index * 8);
  }

  __device__ __forceinline__ void arrive(const WorkItem& item, int kv_head) {
    wgmma::sync_group(group_);
    if (threadIdx.x % kGroupThreads == 0) {
      add_and_order(args_.workspace.num_arrived + item.tile_index * args_.num_kv_heads + kv_head);
    }
  }

  const AttentionArgs& args_;
  const KvRing& ring_;
  Position at_;
  int group_, lane_;
  uint32_t queries_;
  float4* scratch_;
};

/// Waits until all items of a tile are done, which run already or are done: they were drawn before.
__device__ __forceinline__ void wait_for_tile(const AttentionArgs& args, const WorkItem& item,
                                              int kv_head) {
  if (threadIdx.x % 32 == 0) {
    const int32_t* num_arrived =
        args.workspace.num_arrived + item.tile_index * args.num_kv_heads + kv_head;
    // Seconds: a fault in the plan must not hang the device. (A trap here takes registers from the
    // products: ptxas no longer believes that the warps that multiply get theirs.)
    for (int tries = 1 << 24; tries > 0 && load_and_order(num_arrived) < item.num_arrivals;
         --tries) {
      __nanosleep(20);
    }
  }
  __syncwarp();
}
/// Counts a pair of a tile as merged. The last one clears the tile's counters.
__device__ __forceinline__ void count_merged(const AttentionArgs& args, const WorkItem& item,
                                             int kv_head) {
  if (threadIdx.x % 32 != 0) return;
  const int counter = item.tile_index * args.num_kv_heads + kv_head;
  if (atomicAdd(args.workspace.num_merged + counter, 1) == item.tile_rows * args.group - 1) {
    args.workspace.num_arrived[counter] = 0;
    args.workspace.num_merged[counter] = 0;
  }
}

template <int kHeadDim>
__device__ __forceinline__ void attend_items(const AttentionArgs& args, const KvRing& ring,
                                             const Announcement* announcements, float4* scratch) {
  PairGroup<kHeadDim> group(args, ring, scratch);
  const int lane = threadIdx.x % 32;
  RingPosition<kItemSlots> slot;
  const auto next_kv_head = [&] {
    wgmma::wait(ring.full_items + slot.index * 8, slot.parity);
    return announcements[slot.index].kv_head;
  };
  const auto finish_item = [&] {
    __syncwarp();
    if (lane == 0) wgmma::arrive(ring.empty_items + slot.index * 8);
    slot = slot.next();
  };
  for (;;) {
    const int kv_head = next_kv_head();
    const Announcement& announcement = announcements[slot.index];
    if (kv_head < 0 || announcement.first_pair >= 0) break;
    group.attend(announcement.item, kv_head);
    finish_item();
  }
  // Merges come last. A loop of their own, for they share no registers with the products.
  for (;;) {
    const int kv_head = next_kv_head();
    if (kv_head < 0) break;
    const Announcement& announcement = announcements[slot.index];
    const WorkItem& item = announcement.item;
    const int pair = announcement.first_pair + threadIdx.x / 32;
    if (pair < item.tile_rows * args.group) {
      wait_for_tile(args, item, kv_head);
      merge_pair<kHeadDim>(args, item, kv_head, pair);
      count_merged(args, item, kv_head);
    }
    finish_item();
  }
}

#endif  // OPENSPEC_HAS_WGMMA

template <int kHeadDim>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    prefill_wgmma_kernel(const __grid_constant__ CUtensorMap map,
                         const __grid_constant__ WgmmaArgs args) {
#ifdef OPENSPEC_HAS_WGMMA
  cuda::allow_next_kernel();
  using Layout = WgmmaLayout<kHeadDim>;
  constexpr int kStages = Layout::kStages;
  // Their place in static shared memory also tells the host that the kernel has a body.
  __shared__ uint64_t barriers[4 * kStages + 2 * kItemSlots];
  __shared__ Announcement announcements[kItemSlots];
  extern __shared__ uint8_t dynamic_shared[];
  const uint32_t unaligned = wgmma::shared_address(dynamic_shared);
  const uint32_t base = (unaligned + kWgmmaAlignment - 1) / kWgmmaAlignment * kWgmmaAlignment;
  KvRing ring;
  ring.stages = base;
  ring.queries = base + Layout::kQueriesAt;
  ring.full_keys = wgmma::shared_address(barriers);
  ring.full_values = ring.full_keys + kStages * 8;
  ring.empty_keys = ring.full_values + kStages * 8;
  ring.empty_values = ring.empty_keys + kStages * 8;
  ring.full_items = ring.empty_values + kStages * 8;
  ring.empty_items = ring.full_items + kItemSlots * 8;
  if (threadIdx.x == 0) {
    wgmma::prefetch_map(map);
    for (int i = 0; i < 2 * kStages; ++i) {
      wgmma::init_barrier(ring.full_keys + i * 8, kCopyWarps / 2);
      wgmma::init_barrier(ring.empty_keys + i * 8, kGroups * 4);
    }
    for (int i = 0; i < kItemSlots; ++i) {
      wgmma::init_barrier(ring.full_items + i * 8, 1);
      wgmma::init_barrier(ring.empty_items + i * 8, kGroups * 4 + kCopyWarps);
    }
    wgmma::publish_barriers();
  }
  const float ones[4] = {__uint_as_float(0x3f803f80u), __uint_as_float(0x3f803f80u),
                         __uint_as_float(0x3f803f80u), __uint_as_float(0x3f803f80u)};
  for (int i = threadIdx.x; i < kStages * kPanelBytes / 16; i += kWgmmaThreads) {
    constexpr int kChunks = kPanelBytes / 16;
    wgmma::store_floats(ring.stages + i / kChunks * Layout::kStageBytes +
                            2 * Layout::kPanels * kPanelBytes + i % kChunks * 16,
                        ones);
  }
  wgmma::publish_writes();
  __syncthreads();
  const int warp = threadIdx.x / 32;
  // Warps that copy may begin with what was there before the step.
  if (warp < kGroups * 4 || !args.attention.is_early) cuda::wait_for_previous_kernel();
  if (warp >= kGroups * 4) {
    wgmma::give_registers<kCopyingRegisters>();
    copy_items<kHeadDim>(map, args, ring, announcements);
  } else {
    wgmma::take_registers<kMultiplyingRegisters>();
    float4* scratch =
        reinterpret_cast<float4*>(dynamic_shared + (base - unaligned) + Layout::kScratchAt);
    attend_items<kHeadDim>(args.attention, ring, announcements, scratch);
  }
#endif
}

}  // namespace openspec::span_attention
