#pragma once

/// What the warps of the kernel in prefill_wgmma.cuh share, and those that copy.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/attention/math.cuh"
#include "kernels/attention/sums.cuh"
#include "kernels/attention/work.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/wgmma.cuh"

namespace openspec::span_attention {

inline constexpr int kGroupThreads = 128;
inline constexpr int kGroups = kPrefillTilePairs / 64;
inline constexpr int kGroupPairs = 64;
inline constexpr int kWgmmaThreads = (kGroups + 1) * kGroupThreads;
inline constexpr int kCopyWarps = kGroupThreads / 32;
inline constexpr int kItemSlots = 2;

// 64 rows of 64 columns in the swizzle of 128 bytes: a panel of a block's K, V or of a group's Q.
inline constexpr int kPanelBytes = kBlockTokens * 128;
inline constexpr int kWgmmaAlignment = 1024;      // of the swizzle
static_assert(kPrefillThreads == kGroupThreads);  // the stride of what Sums keeps

/// Shared memory: the ring, each group's Q, what each group keeps of the segments so far.
template <int kHeadDim>
struct WgmmaLayout {
  static constexpr int kPanels = kHeadDim / 64;
  static constexpr int kStages = kPanels == 2 ? 3 : 6;
  // K, V and, as a panel after those of V, ones.
  static constexpr int kStageBytes = (2 * kPanels + 1) * kPanelBytes;
  static constexpr int kQueriesAt = kStages * kStageBytes;
  static constexpr int kKept = kHeadDim / 8 + 1;  // float4 per thread: Sums::keep
  static constexpr int kScratchAt = kQueriesAt + kGroups * kPanels * kPanelBytes;
  static constexpr int kBytes = kWgmmaAlignment + kScratchAt + kGroups * kKept * kGroupThreads * 16;
};

struct WgmmaArgs {
  AttentionArgs attention;
  int box_lines;  // tokens of a tensor copy: 8, 16, 32 or 64; divides the page size
};

#ifdef OPENSPEC_HAS_WGMMA

namespace wgmma = cuda::wgmma;

/// Shared addresses. A full barrier's phase ends when its part of a stage has arrived, an empty
/// one's when all warps that multiply are done with it.
struct KvRing {
  uint32_t stages, queries;
  uint32_t full_keys, full_values, empty_keys, empty_values;  // of stage i: + 8 i
  uint32_t full_items, empty_items;
};

template <int kCount>
struct RingPosition {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ RingPosition next() const {
    return index + 1 == kCount ? RingPosition{0, parity ^ 1} : RingPosition{index + 1, parity};
  }
};

/// A value that all lanes of the warp have, so that the compiler knows: it leaves products in
/// flight across no branch that could part them.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

/// What the copying warp tells the others about an item.
struct Announcement {
  WorkItem item;
  int kv_head;     // -1: there are no more items
  int first_pair;  // of a merge; -1: the item is to be computed
};

/// One of the warps that copy: it copies one half of an item's K or V to the ring: a panel of two,
/// or every other box of the only one. (One warp for all would be late: each page is a copy of its
/// own.) With `is_early` it waits for the previous kernel before the first block that the step
/// writes to, and clears it.
template <int kHeadDim>
__device__ __forceinline__ void copy_blocks(const CUtensorMap& map, const WgmmaArgs& wgmma_args,
                                            const WorkItem& item, int kv_head, const KvRing& ring,
                                            RingPosition<WgmmaLayout<kHeadDim>::kStages>& at,
                                            bool& is_early) {
  using Layout = WgmmaLayout<kHeadDim>;
  constexpr bool kByPanels = Layout::kPanels == 2;
  const AttentionArgs& args = wgmma_args.attention;
  const int lane = threadIdx.x % 32;
  const int share = uniform(opaque_thread() / 32) % kCopyWarps;
  const bool is_value = share / 2 != 0;
  const int half = share % 2;
  const int box_lines = wgmma_args.box_lines, num_boxes = kBlockTokens / box_lines;
  const int32_t* pages = args.pages + static_cast<int64_t>(item.seq) * args.max_pages_per_seq;
  const int value_lines = args.num_kv_heads * args.page_size;
  const int first_line = kv_head * args.page_size + (is_value ? value_lines : 0);
  const int last_token = (item.end - 1) / box_lines * box_lines;
  // Of the block's box `lane`.
  const auto line_of = [&](int block) {
    // After the end: any lines that exist.
    const int token = min(block * kBlockTokens + lane * box_lines, last_token);
    const int index = args.page_shift >= 0 ? token >> args.page_shift : token / args.page_size;
    return pages[index] * 2 * value_lines + first_line + token - index * args.page_size;
  };
  const uint32_t full = is_value ? ring.full_values : ring.full_keys;
  const uint32_t empty = is_value ? ring.empty_values : ring.empty_keys;
  const int panel = kByPanels ? half : 0;
  const uint32_t to = ring.stages + (Layout::kPanels * is_value + panel) * kPanelBytes;
  const int first_box = kByPanels ? 0 : half, box_step = kByPanels ? 1 : 2;
  const int my_bytes = (num_boxes - first_box + box_step - 1) / box_step * box_lines * 128;
  const int end = uniform(item.block_end);
  int block = uniform(item.block_begin);
  // Those of the first block stand in the item: one dependent load less.
  const bool is_there = block * kBlockTokens + lane * box_lines <= last_token;
  int line =
      static_cast<int>(item.lines[is_there ? lane * box_lines / kLineRows % 8 : 0]) + first_line;
#pragma unroll 1
  for (; block < end; ++block) {
    const int line_after = lane < num_boxes && block + 1 < end ? line_of(block + 1) : 0;
    if (is_early && (block + 1) * kBlockTokens > item.kv_len) {
      cuda::wait_for_previous_kernel();
      is_early = false;
    }
    wgmma::wait(empty + at.index * 8, at.parity ^ 1);
    if (lane == 0) wgmma::expect_bytes(full + at.index * 8, my_bytes);
#pragma unroll 1
    for (int box = first_box; box < num_boxes; box += box_step) {
      const int box_line = __shfl_sync(0xffffffffu, line, box);
      if (lane == 0) {
        wgmma::copy_box(to + at.index * Layout::kStageBytes + box * box_lines * 128, map,
                        panel * 64, box_line, full + at.index * 8);
      }
    }
    line = line_after;
    at = at.next();
  }
}

/// The warps that copy. The first of them draws the items and announces them to all.
template <int kHeadDim>
__device__ __forceinline__ void copy_items(const CUtensorMap& map, const WgmmaArgs& wgmma_args,
                                           const KvRing& ring, Announcement* announcements) {
  const AttentionArgs& args = wgmma_args.attention;
  const int lane = threadIdx.x % 32;
  const bool draws = threadIdx.x / 32 == kGroups * 4;
  WorkHeader& header = *args.workspace.header;
  const int num_items = header.num_prefill_items * args.num_kv_heads;
  const int num_in_all = num_items + header.num_prefill_merges * args.num_kv_heads;
  const bool has_tickets = num_in_all > static_cast<int>(gridDim.x);
  RingPosition<WgmmaLayout<kHeadDim>::kStages> at;
  RingPosition<kItemSlots> slot;
  int index = blockIdx.x, ticket = 0;
  bool is_early = args.is_early, is_first = is_early;
  for (;;) {
    Announcement& announcement = announcements[slot.index];
    if (draws) {
      wgmma::wait(ring.empty_items + slot.index * 8, slot.parity ^ 1);
      if (index < num_in_all) {
        MergeItem merge = {index / args.num_kv_heads, -1};
        if (index >= num_items) {
          merge = args.workspace.prefill_merges[(index - num_items) / args.num_kv_heads];
        }
        if (lane < static_cast<int>(sizeof(WorkItem) / 16)) {
          reinterpret_cast<uint4*>(&announcement.item)[lane] =
              reinterpret_cast<const uint4*>(args.workspace.prefill_items + merge.item)[lane];
        }
        if (lane == 0) announcement.first_pair = merge.first_pair;
      }
      if (lane == 0) announcement.kv_head = index < num_in_all ? index % args.num_kv_heads : -1;
      __syncwarp();
      if (lane == 0) {
        wgmma::arrive(ring.full_items + slot.index * 8);
        // On its way while this item is copied; the first time it has to wait.
        if (has_tickets && index < num_in_all && !is_first) {
          ticket = atomicAdd(&header.prefill_tickets.next, 1);
        }
      }
    }
    wgmma::wait(ring.full_items + slot.index * 8, slot.parity);
    const int kv_head = announcement.kv_head;
    if (kv_head < 0) break;
    if (announcement.first_pair < 0) {
      copy_blocks<kHeadDim>(map, wgmma_args, announcement.item, kv_head, ring, at, is_early);
    }
    if (is_first) {
      if (is_early) cuda::wait_for_previous_kernel();
      is_first = is_early = false;
      if (draws && has_tickets && lane == 0) ticket = atomicAdd(&header.prefill_tickets.next, 1);
    }
    __syncwarp();
    if (lane == 0) wgmma::arrive(ring.empty_items + slot.index * 8);
    slot = slot.next();
    index = has_tickets ? uniform(ticket) + static_cast<int>(gridDim.x) : num_in_all;
  }
  if (draws && has_tickets && lane == 0 &&
      atomicAdd(&header.prefill_tickets.num_done, 1) == static_cast<int>(gridDim.x) - 1) {
    header.prefill_tickets.next = 0;
    header.prefill_tickets.num_done = 0;
  }
}

#endif  // OPENSPEC_HAS_WGMMA

}  // namespace openspec::span_attention
