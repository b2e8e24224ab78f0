#pragma once

/// The products of experts by streaming their weights through blocks of eight warps, as stream.cuh
/// does with those of one matrix: the same chains and the same sums. A block's items follow from
/// how rows are routed, which is known on the device alone.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/launch.cuh"
#include "kernels/experts/chain_rows.cuh"
#include "kernels/experts/segments.cuh"
#include "kernels/linear/linear_stack.h"
#include "kernels/linear/stream.cuh"

namespace openspec::cuda {

/// Gate and up read rows of the step and write rows of places; down reads these and writes a row
/// for each pair.
struct ExpertsJob {
  LinearStack weights;
  const __nv_bfloat16* x;
  __nv_bfloat16* out;
  const int32_t* expert;  // [num_rows, top_k]
  SortedPairs pairs;      // of more than kFewRows rows
  int num_rows, top_k;
  int num_slots = 0;    // of a warp's WeightRing
  int num_buffers = 0;  // of a warp's activations: with two, the next segment's come in time
  int chain_steps = 0;  // of the longest chain
  int num_scales = 0;   // of an expert
};

/// Scales of blocks for the slots of a warp's ring, which come with the slots' weights. Loaded when
/// a segment ends, they would be waited for longer than multiplying a unit takes.
template <WeightForm kForm>
class SlotScales {
 public:
  /// Of the blocks of a slot's first and last step, which are all that it has steps of: a scale for
  /// each half of a unit's outputs, copied by a lane.
  static constexpr int kCopiers = has_blocks(kForm) ? 4 : 0;
  static constexpr int kSlotBytes = kCopiers * sizeof(float);
  static_assert(kSlotSteps <= kBlockSteps);
  using Ring = WeightRing<kForm, kCopiers>;

  /// `shared`: of the warp, kSlotBytes for each slot.
  __device__ __forceinline__ SlotScales(uint32_t shared, int lane) : shared_(shared), lane_(lane) {}

  /// Starts to copy those of steps [step, step + num_steps), before the slot's weights.
  __device__ __forceinline__ void fill(const Ring& ring, int slot, const BlockScales& scales,
                                       int step, int num_steps) const {
    if (lane_ >= kCopiers) return;
    const unsigned block = scales.block(lane_ < 2 ? step : step + num_steps - 1);
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_ + slot * kSlotBytes + lane_ * 4),
        "l"(scales.first + lane_ % 2 * scales.num_blocks + block)
        : "memory");
    ring.add_copies(slot);
  }
  /// Of a step in a slot that has come.
  __device__ __forceinline__ void get(int slot, bool is_of_last_block, float (&scales)[2]) const {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(scales[0]), "=f"(scales[1])
                 : "r"(shared_ + slot * kSlotBytes + is_of_last_block * 8)
                 : "memory");
  }

 private:
  uint32_t shared_;
  int lane_;
};

/// Places of a block's shared memory, in bytes.
struct ExpertsShared {
  int scales, sums, barriers, table, activations, total;

  __host__ __device__ constexpr ExpertsShared(int slot_bytes, int scale_bytes, int sum_bytes,
                                              int num_tiles, const ExpertsJob& job)
      : scales(ring_bytes(slot_bytes, job.num_slots)),
        sums(scales + ring_bytes(scale_bytes, job.num_slots)),
        barriers(sums + sum_bytes),
        table(barriers + barrier_bytes(job.num_slots)),
        activations(table + static_cast<int>((sizeof(FewRowsTable) + 15) / 16 * 16)),
        total(activations +
              job.num_buffers * kStreamWarps * activation_bytes(num_tiles, job.chain_steps)) {}
};

/// A warp's activations: its chain's inputs of the rows of a segment.
template <int kTiles, bool kIsGateUp>
class ExpertActivations {
 public:
  /// `shared`: of the warp's first buffer.
  __device__ __forceinline__ ExpertActivations(const ExpertsJob& job, const Chain& chain,
                                               uint32_t shared, int lane)
      : job_(job), chain_(chain), shared_(shared), lane_(lane) {}

  /// Of a segment that has kCount tiles, or the first ones.
  template <int kCount = kTiles>
  __device__ __forceinline__ ChainRows<kCount> rows(int buffer) const {
    const int buffer_bytes = kStreamWarps * activation_bytes(kTiles, job_.chain_steps);
    return {shared_ + buffer * buffer_bytes, job_.chain_steps, lane_};
  }
  /// Whether two segments' are the same.
  __device__ __forceinline__ bool are_same(const ExpertItem& a, const ExpertItem& b) const {
    return (kIsGateUp && job_.num_rows <= kFewRows) || a.first_place == b.first_place;
  }
  /// Starts to copy the step's rows, of which there are few.
  __device__ __forceinline__ void fetch_step() const {
    fetch(0, job_.num_rows, [](int row) -> int64_t { return row; });
  }
  /// Starts to copy a segment's rows.
  __device__ __forceinline__ void fetch(int buffer, const Segments& segments,
                                        const ExpertItem& item) const {
    fetch(buffer, item.num_rows, [&](int row) -> int64_t {
      const int place = item.first_place + row;
      if (kIsGateUp) return segments.pair(place) / job_.top_k;
      return segments.has_few_rows() && segments.pair(place) < 0 ? -1 : place;
    });
  }

 private:
  template <typename RowOf>
  __device__ __forceinline__ void fetch(int buffer, int num_rows, const RowOf& row_of) const {
    rows(buffer).fetch(job_.x, job_.weights.first.num_inputs, chain_, num_rows, row_of);
  }

  const ExpertsJob& job_;
  const Chain& chain_;
  uint32_t shared_;
  int lane_;
};

/// Where a warp's next weights come from: its chain of every unit of the block's items.
template <WeightForm kForm>
class ExpertFeed {
 public:
  using Ring = typename SlotScales<kForm>::Ring;

  __device__ __forceinline__ ExpertFeed(const ExpertsJob& job, const Segments& segments,
                                        const Chain& chain, const SlotScales<kForm>& slot_scales)
      : job_(job),
        weights_(job.weights),
        segments_(segments),
        chain_(chain),
        slot_scales_(slot_scales),
        scales_(weights_.first, 0),
        next_(segments.begin()) {
    begin_item();
  }

  /// Starts to fill a slot with the next part of a chain, if there is one.
  __device__ __forceinline__ void fill(Ring& ring, int slot) {
    if (steps_left_ == 0) return;
    const int num_steps = min(steps_left_, kSlotSteps);
    if constexpr (has_blocks(kForm)) {
      const int step = chain_.first_step + chain_.num_steps - steps_left_;
      slot_scales_.fill(ring, slot, scales_, step, num_steps);
    }
    ring.fill(slot, at_, num_steps);
    at_ += num_steps * step_bytes(kForm);
    steps_left_ -= num_steps;
    if (steps_left_ > 0) return;
    if (--units_left_ > 0) {
      at_ += (weights_.first.num_inputs / kLinearStep - chain_.num_steps) * step_bytes(kForm);
      if constexpr (has_blocks(kForm)) scales_.first += 2 * scales_.num_blocks;
      steps_left_ = chain_.num_steps;
    } else {
      begin_item();
    }
  }

 private:
  __device__ __forceinline__ void begin_item() {
    if (next_ >= segments_.end()) return;
    const ExpertItem item = segments_.item(next_);
    next_ += item.num_units();
    const int64_t step =
        static_cast<int64_t>(item.first_unit) * (weights_.first.num_inputs / kLinearStep) +
        chain_.first_step;
    at_ = static_cast<const uint8_t*>(weights_.first.data) + item.expert * weights_.bytes +
          step * step_bytes(kForm);
    if constexpr (has_blocks(kForm)) {
      scales_ = BlockScales(weights_.first, item.first_unit);
      scales_.first += int64_t{item.expert} * job_.num_scales;
    }
    units_left_ = item.num_units();
    steps_left_ = chain_.num_steps;
  }

  const ExpertsJob& job_;
  const LinearStack& weights_;
  const Segments& segments_;
  const Chain& chain_;
  const SlotScales<kForm>& slot_scales_;
  [[maybe_unused]] BlockScales scales_;  // of the unit that is under way
  int next_, units_left_ = 0, steps_left_ = 0;
  const uint8_t* at_ = nullptr;
};

/// Multiplies a chain of a unit; its weights come by `ring`, which `feed` keeps full.
template <WeightForm kForm, int kTiles>
__device__ __forceinline__ void multiply_chain(ChainSums<kForm, kTiles>& sums,
                                               const PackedLinear& weight, const Chain& chain,
                                               typename SlotScales<kForm>::Ring& ring,
                                               ExpertFeed<kForm>& feed,
                                               const SlotScales<kForm>& slot_scales,
                                               const ChainRows<kTiles>& rows, int lane) {
#pragma unroll 1
  for (int begin = 0; begin < chain.num_steps; begin += kSlotSteps) {
    const uint32_t from = ring.wait();
#pragma unroll
    for (int i = 0; i < kSlotSteps; ++i) {
      if (begin + i < chain.num_steps) {
        uint32_t weights[4], x[kTiles][2];
        load_weights<kForm>(weights, from, i, lane);
        rows.load(begin + i, x);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          multiply_add(sums.products[tile], weights, x[tile][0], x[tile][1]);
        }
        if constexpr (has_blocks(kForm)) {
          const BlockScales blocks(weight, 0);
          const int step = chain.first_step + begin + i;
          if (blocks.segment_end(step, chain.first_step + chain.num_steps) == step + 1) {
            float of_segment[2];
            slot_scales.get(ring.slot(), blocks.block(step) != blocks.block(step - i), of_segment);
            sums.end_segment(of_segment);
          }
        }
      }
    }
    __syncwarp();  // every lane is done with the slot
    feed.fill(ring, ring.slot());
    ring.advance();
  }
}

/// Calls run(n) with the number of tiles that so many rows take, at most kMost.
template <int kMost, typename Run>
__device__ __forceinline__ void with_tiles(int num_rows, const Run& run) {
  if constexpr (kMost > 1) {
    if (num_rows <= 8 * (kMost - 1)) return with_tiles<kMost - 1>(num_rows, run);
  }
  run(std::integral_constant<int, kMost>{});
}

/// The chains' sums of a unit; those of 8 kTiles rows have room.
template <int kTiles>
using ExpertSums = SumLayout<kTiles, 2>;

/// Rows that a thread writes an output of, one after the other: row thread / 16 and 16 rows on.
template <int kTiles>
inline constexpr int kWritePasses =
    (8 * kTiles * kLinearUnit + kStreamThreads - 1) / kStreamThreads;

/// The pairs of a thread's rows of an item; -1: none.
template <int kTiles>
__device__ __forceinline__ void find_pairs(int (&pairs)[kWritePasses<kTiles>],
                                           const Segments& segments, const ExpertItem& item) {
#pragma unroll
  for (int pass = 0; pass < kWritePasses<kTiles>; ++pass) {
    const int row = (pass * kStreamThreads + static_cast<int>(threadIdx.x)) / kLinearUnit;
    pairs[pass] = row < item.num_rows ? segments.pair(item.first_place + row) : -1;
  }
}

/// Adds up the chains' sums of a unit and writes its outputs; `scale`: of the thread's, if outputs
/// have scales.
template <WeightForm kForm, int kTiles, bool kIsGateUp>
__device__ __forceinline__ void write_unit(const ExpertsJob& job, const PackedLinear& weight,
                                           const ExpertItem& item, int unit,
                                           const int (&pairs)[kWritePasses<kTiles>], float scale,
                                           const float* sums) {
  using Sums = ExpertSums<kTiles>;
  constexpr int kPasses = kWritePasses<kTiles>;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int element = pass * kStreamThreads + threadIdx.x;
    const int row = element / kLinearUnit, output = element % kLinearUnit;
    if (row / 2 * 2 >= item.num_rows) break;  // the whole warp, which has two rows
    const int place = item.first_place + row;
    const int pair = pairs[pass];
    const float* from = sums + row * Sums::kPitch + output;
    float sum = from[0];
#pragma unroll
    for (int c = 1; c < kLinearChains; ++c) sum += from[c * Sums::kChainFloats];
    if constexpr (has_output_scales(kForm)) sum = __fmul_rn(sum, scale);
    if constexpr (kIsGateUp) {
      const float up = __shfl_down_sync(kAllLanes, sum, kLinearGateRows);
      if (pair >= 0 && output < kLinearGateRows) {
        const int64_t width = weight.num_outputs / 2;
        job.out[place * width + unit * kLinearGateRows + output] = swiglu(sum, up);
      }
    } else if (pair >= 0) {
      const int64_t width = weight.num_outputs;
      job.out[pair * width + unit * kLinearUnit + output] = __float2bfloat16_rn(sum);
    }
  }
}

/// Gate and up is a fence, so that down may read how rows are routed, and fill its ring, before its
/// wait. A block of each fits a multiprocessor where rows are few.
template <WeightForm kForm, int kTiles, bool kIsGateUp>
__global__ void __launch_bounds__(kStreamThreads, kTiles == 1 ? 2 : 1)
    experts_kernel(ExpertsJob job) {
  if constexpr (!kIsGateUp) allow_next_kernel();
  using Sums = ExpertSums<kTiles>;
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);  // in a uniform register
  const int lane = threadIdx.x % 32;
  constexpr int kSlotBytes = WeightRing<kForm>::kSlotBytes;
  const ExpertsShared at(kSlotBytes, SlotScales<kForm>::kSlotBytes, Sums::kBytes, kTiles, job);
  extern __shared__ __align__(128) uint8_t shared[];
  float* const sums = reinterpret_cast<float*>(shared + at.sums);
  float* const own_sums = sums + warp * Sums::kChainFloats;
  auto& few = *reinterpret_cast<FewRowsTable*>(shared + at.table);
  const uint32_t base = shared_address(shared);
  typename SlotScales<kForm>::Ring ring(
      base + warp * job.num_slots * kSlotBytes,
      base + at.barriers + warp * job.num_slots * kSlotBarrierBytes, job.num_slots, lane);
  const SlotScales<kForm> slot_scales(
      base + at.scales + warp * job.num_slots * SlotScales<kForm>::kSlotBytes, lane);
  const PackedLinear& shape = job.weights.first;
  const Chain chain = find_chain(shape, 0, warp);
  ExpertActivations<kTiles, kIsGateUp> activations(
      job, chain, base + at.activations + warp * activation_bytes(kTiles, job.chain_steps), lane);
  const bool has_few_rows = job.num_rows <= kFewRows;
  if (has_few_rows) clear_few_rows(few);
  __syncthreads();

  if constexpr (kIsGateUp) {
    wait_for_previous_kernel();
    allow_next_kernel();
    if (has_few_rows) activations.fetch_step();  // ahead of the weights, which would delay it
  }
  if (has_few_rows && warp == 0) {
    sort_few_rows(few, job.expert, job.num_rows, job.top_k, job.weights.count, lane);
  }
  __syncthreads();
  const Segments segments(job.pairs, few, job.num_rows, Sums::kRows,
                          shape.num_outputs / kLinearUnit);
  ExpertFeed<kForm> feed(job, segments, chain, slot_scales);
#pragma unroll 1
  for (int slot = 0; slot < job.num_slots; ++slot) feed.fill(ring, slot);
  if constexpr (!kIsGateUp) wait_for_previous_kernel();
  if constexpr (kIsGateUp) {
    if (has_few_rows && job.pairs.counts != nullptr && blockIdx.x == 0 && warp == 0) {
      count_few_rows(job.pairs.counts, few, job.expert, job.num_rows * job.top_k, lane);
    }
  }

  int at_unit = segments.begin();
  if (at_unit >= segments.end()) return;
  ExpertItem item = segments.item(at_unit);
  if (!kIsGateUp || !has_few_rows) activations.fetch(0, segments, item);
  int sum_buffer = 0, buffer = 0;
  for (;;) {
    int pairs[kWritePasses<kTiles>];
    find_pairs<kTiles>(pairs, segments, item);
    wait_for_rows();
    at_unit += item.num_units();
    const bool has_next = at_unit < segments.end();
    ExpertItem next = item;
    if (has_next) next = segments.item(at_unit);
    const bool changes = has_next && !activations.are_same(item, next);
    if (changes && job.num_buffers > 1) activations.fetch(buffer ^ 1, segments, next);
    PackedLinear weight = shape;
    if constexpr (is_e4m3(kForm)) weight.scales += int64_t{item.expert} * job.num_scales;
#pragma unroll 1
    for (int unit = item.first_unit; unit < item.last_unit; ++unit) {
      float scale = 1.0f;  // there when the unit is multiplied
      if constexpr (has_output_scales(kForm)) {
        scale = __ldg(weight.scales + unit * kLinearUnit + threadIdx.x % kLinearUnit);
      }
      with_tiles<kTiles>(item.num_rows, [&](auto tiles) {
        constexpr int kCount = decltype(tiles)::value;
        ChainSums<kForm, kCount> chain_sums;
        multiply_chain(chain_sums, weight, chain, ring, feed, slot_scales,
                       activations.template rows<kCount>(buffer), lane);
        store_sums<Sums>(own_sums + sum_buffer * Sums::kBufferFloats, chain_sums.whole(), lane);
      });
      __syncthreads();
      write_unit<kForm, kTiles, kIsGateUp>(job, weight, item, unit, pairs, scale,
                                           sums + sum_buffer * Sums::kBufferFloats);
      sum_buffer ^= 1;
    }
    if (!has_next) return;
    if (changes) {
      if (job.num_buffers > 1) {
        buffer ^= 1;
      } else {
        activations.fetch(buffer, segments, next);
      }
    }
    item = next;
  }
}

}  // namespace openspec::cuda
