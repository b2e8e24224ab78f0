#pragma once

/// Items as CTAs draw them, and results in the making: a warp's sums in registers, where they are
/// kept meanwhile, and the merge of a tile's partial results.

#include "kernels/attention/math.cuh"
#include "kernels/attention/work.cuh"

namespace openspec::span_attention {

struct AttentionArgs {
  const __nv_bfloat16* q;  // [num_rows, num_q_heads, head_dim]
  __nv_bfloat16* out;      // as q
  const char* kv;          // KvLayerView::data
  const int32_t* pages;    // PageTableView::pages
  int max_pages_per_seq;
  int num_q_heads, num_kv_heads, group;
  uint32_t group_reciprocal;  // 2^16 / group, rounded up: products shifted back are quotients
  int page_size;
  int page_shift;  // log2 of page_size; -1: no power of two
  // 2^34 / page_size, rounded up: a token's product with it, shifted back, is its page, up to 2^34
  // / page_size tokens.
  uint32_t page_reciprocal;
  float scale;      // c above
  int first_token;  // SpanAttentionParams::first_token
  int window;       // SpanAttentionParams::window; kNoWindow: none
  bool window_follows_rows;
  int hidden_end;  // blocks before it may hold tokens that a row does not see, for their distance
  bool is_early;   // SpanAttentionParams::is_behind_fence
  Workspace workspace;
};

// Of prefill_wgmma.cu.
/// Whether the code of sm_90a is there and the current device runs it.
bool has_wgmma();
/// Computes the plan's prefill items and their merges. Needs has_wgmma().
template <int kHeadDim>
int launch_prefill_wgmma(const AttentionArgs& args, void* stream);

inline constexpr int kNoWindow = 0x7fffffff;

/// The first token that a row sees which sees tokens up to `num_visible`, those before its span up
/// to `kv_len`. Computed here and not ahead of a loop: few blocks need it, and none where layers
/// have no window.
template <typename Args>
__device__ __forceinline__ int first_seen(const Args& args, int kv_len, int num_visible) {
  int end = args.window_follows_rows ? num_visible : kv_len;
  asm volatile("" : "+r"(end));
  return max(args.first_token, end - args.window);
}

/// Tokens that a row of a tree sees, windows aside.
__device__ __forceinline__ int num_seen_in_tree(const AttentionArgs& args, const WorkItem& item,
                                                int row) {
  const uint32_t* words = args.workspace.ancestors + static_cast<int64_t>(row) * kAncestorWords;
  int count = item.kv_len;
#pragma unroll
  for (int i = 0; i < kAncestorWords; ++i) count += __popc(words[i]);
  return count;
}

/// The pairs that an item computes at a time, those of rows from `first_row` on.
struct ItemPairs {
  const AttentionArgs& args;
  const WorkItem& item;
  int kv_head, first_row, num_pairs;
};

/// Where q and the output of a tile's pair begin, in elements.
template <int kHeadDim, typename Args>
__device__ __forceinline__ int64_t pair_at(const Args& args, int first_row, int kv_head, int pair) {
  const int row = pair * args.group_reciprocal >> 16;
  const int head = kv_head * args.group + pair - row * args.group;
  return (static_cast<int64_t>(first_row + row) * args.num_q_heads + head) * kHeadDim;
}

/// One warp's share of a tile: kRowTiles x 16 pairs, kDimTiles x 8 columns of the output. A thread
/// has rows lane / 4 and lane / 4 + 8 of each row tile, columns 2 (lane % 4) and the next of each
/// column tile.
template <int kHeadDim, int kRowTiles, int kDimTiles, int kCtaThreads = kPrefillThreads>
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
        __nv_bfloat16* to = args.out + pair_at<kHeadDim>(args, first_row, kv_head, row) + column;
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
        scratch[(tile * kDimTiles + i) * kCtaThreads + threadIdx.x] =
            make_float4(x[0], x[1], x[2], x[3]);
      }
      scratch[(kRowTiles * kDimTiles + tile) * kCtaThreads + threadIdx.x] =
          make_float4(maximum[tile][0], maximum[tile][1], normaliser[tile][0], normaliser[tile][1]);
    }
  }
  /// *this = kept + *this.
  __device__ __forceinline__ void merge_into_kept(const float4* scratch, float scale) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const float4 kept = scratch[(kRowTiles * kDimTiles + tile) * kCtaThreads + threadIdx.x];
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
        const float4 earlier = scratch[(tile * kDimTiles + i) * kCtaThreads + threadIdx.x];
        x[0] = merged(earlier.x, x[0], weights[0]);
        x[1] = merged(earlier.y, x[1], weights[0]);
        x[2] = merged(earlier.z, x[2], weights[1]);
        x[3] = merged(earlier.w, x[3], weights[1]);
      }
    }
  }
};

/// One warp merges columns of a pair's partial results in order and writes its output: those from
/// `first_column` on, kMidHeadDim of them or all.
template <int kHeadDim>
__device__ __forceinline__ void merge_columns(const AttentionArgs& args, const WorkItem& item,
                                              int kv_head, int pair, int first_column) {
  constexpr int kLoads = 4;  // in flight together
  constexpr int kLanes = (kHeadDim < kMidHeadDim ? kHeadDim : kMidHeadDim) / 4;  // with columns
  const int lane = opaque_thread() % kLanes + first_column / 4;
  const int row = item.tile_row + pair / args.group;
  int num_visible = min(item.first_visible + pair / args.group, item.end);
  if (item.is_tree) num_visible = num_seen_in_tree(args, item, row);
  const int num_blocks = ceil_div(num_visible, kBlockTokens);
  const int num_shared = min(num_blocks, item.num_shared_blocks);
  const int num_shared_slots = num_slots_of(num_shared, item.range_blocks);
  const int num_slots = num_shared_slots + num_blocks - num_shared;

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
  int block = 0;  // first one of the slot
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
        if (block > 0 && block % kSegmentBlocks == 0) {
          add(total, total_max, total_sum, part, part_max, part_sum);
          part = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          part_max = -INFINITY;
          part_sum = 0.0f;
        }
        add(part, part_max, part_sum, sums[i], stats[i].x, stats[i].y);
        // Blocks that are not shared have one slot each.
        block =
            block >= num_shared || block % kSegmentBlocks != 0
                ? block + 1
                : min(block + first_run_of(block / kSegmentBlocks, item.range_blocks), num_shared);
      }
    }
  }
  add(total, total_max, total_sum, part, part_max, part_sum);

  const float reciprocal = __frcp_rn(total_sum);
  uint2 bits;
  bits.x = pack_bf16(finish(total.x, reciprocal), finish(total.y, reciprocal));
  bits.y = pack_bf16(finish(total.z, reciprocal), finish(total.w, reciprocal));
  if (kLanes == 32 || threadIdx.x % 32 < kLanes) {
    reinterpret_cast<uint2*>(args.out +
                             pair_at<kHeadDim>(args, item.tile_row, kv_head, pair))[lane] = bits;
  }
}
template <int kHeadDim>
__device__ __forceinline__ void merge_pair(const AttentionArgs& args, const WorkItem& item,
                                           int kv_head, int pair) {
#pragma unroll 1
  for (int column = 0; column < kHeadDim; column += kMidHeadDim) {
    merge_columns<kHeadDim>(args, item, kv_head, pair, column);
  }
}

/// Starts copying an item to shared memory.
__device__ __forceinline__ void fetch(WorkItem& to, const WorkItem* from) {
  constexpr int kChunks = sizeof(WorkItem) / 16;
  const int chunk = threadIdx.x;
  if (chunk < kChunks) {
    copy_async(shared_address(&to) + chunk * 16, reinterpret_cast<const uint4*>(from) + chunk,
               true);
  }
  commit_copies();
}
__device__ __forceinline__ void wait_for_fetch() {
  wait_for_copies<0>();
  __syncthreads();
}

/// Hands item indices to a CTA: its own first, `num_own` of them, then tickets.
class ItemQueue {
 public:
  __device__ ItemQueue(Tickets& tickets, int num_items, int num_own = 1)
      : tickets_(tickets),
        num_items_(num_items),
        first_ticket_(num_own * static_cast<int>(gridDim.x)),
        has_tickets_(num_items > first_ticket_) {}

  /// Draws the item after the present one; the answer is on its way while that is computed.
  __device__ void prefetch() {
    if (has_tickets_ && threadIdx.x == 0) ticket_ = atomicAdd(&tickets_.next, 1);
  }
  /// The next item, num_items if there is none. A barrier for the CTA.
  __device__ int next(int* shared) {
    if (!has_tickets_) return num_items_;
    __syncthreads();
    if (threadIdx.x == 0) *shared = first_ticket_ + ticket_;
    __syncthreads();
    return *shared;
  }
  __device__ void close() {
    if (!has_tickets_ || threadIdx.x != 0) return;
    if (atomicAdd(&tickets_.num_done, 1) != static_cast<int>(gridDim.x) - 1) return;
    tickets_.next = 0;
    tickets_.num_done = 0;
  }

 private:
  Tickets& tickets_;
  int num_items_, first_ticket_;
  bool has_tickets_;
  int ticket_ = 0;
};

/// A range of a tile's pairs.
struct PairRange {
  int begin, end;
};

/// Counts an item of a tile that is cut as done. Returns what the CTA is to merge of the tile: its
/// share, once all items are done, where their CTAs run at the same time; else everything, for the
/// last one.
__device__ inline PairRange arrive(const AttentionArgs& args, const WorkItem& item, int kv_head,
                                   bool merges_together, int* shared) {
  if (item.num_arrivals == 1) {
    __syncthreads();
    return {0, item.tile_rows * args.group};
  }
  const int counter = item.tile_index * args.num_kv_heads + kv_head;
  int32_t* num_arrived = args.workspace.num_arrived + counter;
  const int num_pairs = item.tile_rows * args.group, num_arrivals = item.num_arrivals;
  __syncthreads();
  if (threadIdx.x == 0) {
    const int num_before = add_and_order(num_arrived);
    *shared = num_before;
    if (merges_together) {
      // Seconds: a fault in the plan must not hang the device.
      for (int tries = 1 << 24; load_and_order(num_arrived) < num_arrivals; --tries) {
        if (tries == 0) __trap();
        __nanosleep(20);
      }
      int32_t* num_merged = args.workspace.num_merged + counter;
      if (atomicAdd(num_merged, 1) == num_arrivals - 1) {
        *num_arrived = 0;
        *num_merged = 0;
      }
    } else if (num_before == num_arrivals - 1) {
      *num_arrived = 0;
    }
  }
  __syncthreads();
  if (merges_together) {
    return {item.arrival * num_pairs / num_arrivals, (item.arrival + 1) * num_pairs / num_arrivals};
  }
  return {0, *shared == num_arrivals - 1 ? num_pairs : 0};
}

template <int kHeadDim>
__device__ __forceinline__ float4* scratch_of(const AttentionArgs& args) {
  constexpr int kPlaces = kHeadDim == kMaxHeadDim ? kDecodeCtasPerSm : 1;
  return args.workspace.scratch +
         static_cast<int64_t>(blockIdx.x) * kPlaces * kDecodeScratch * kDecodeCtaThreads;
}

}  // namespace openspec::span_attention
