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
#include "kernels/experts/expert_scales.cuh"
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
  int num_slots = 0;   // of a warp's ExpertRing
  int num_places = 0;  // for rows of a warp's activations, a multiple of 8: the next segment's come
                       // in time if they fit beside the current one's
  int chain_steps = 0;  // of the longest chain
};

template <WeightForm kForm, int kUnits>
using ExpertRing = WeightRing<kForm, kExpertSlotSteps<kForm>, kUnits>;

/// Places of a block's shared memory, in bytes. A tile of the last rows of activations reads what
/// comes behind them.
struct ExpertsShared {
  int ring, sums, barriers, table, total;

  __host__ __device__ constexpr ExpertsShared(int slot_bytes, int sum_bytes, const ExpertsJob& job)
      : ring(kStreamWarps * job.num_places * activation_pitch(job.chain_steps)),
        sums(ring + ring_bytes(slot_bytes, job.num_slots)),
        barriers(sums + sum_bytes),
        table(barriers + barrier_bytes(job.num_slots)),
        total(table + static_cast<int>(sizeof(FewRowsTable))) {}
};

/// A warp's activations: its chain's inputs of the rows of a segment, each in a place.
template <int kTiles, bool kIsGateUp>
class ExpertActivations {
 public:
  /// `shared`: of the warp's first place.
  __device__ __forceinline__ ExpertActivations(const ExpertsJob& job, const Chain& chain,
                                               uint32_t shared, int lane)
      : job_(job), chain_(chain), shared_(shared), lane_(lane) {}

  /// Of a segment that has kCount tiles, from a place on.
  template <int kCount = kTiles>
  __device__ __forceinline__ ChainRows<kCount> rows(int place) const {
    return {shared_ + place * activation_pitch(job_.chain_steps), job_.chain_steps, lane_};
  }
  /// Where a segment's fit beside those of another one, which begin at `place`; -1: nowhere.
  __device__ __forceinline__ int find_place(int place, const ExpertItem& other,
                                            const ExpertItem& item) const {
    const int behind = place + other.num_rows;
    if (behind + item.num_rows <= job_.num_places) return behind;
    return item.num_rows <= place ? 0 : -1;
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
  __device__ __forceinline__ void fetch(int place, const Segments& segments,
                                        const ExpertItem& item) const {
    fetch(place, item.num_rows, [&](int row) -> int64_t {
      const int of_all = item.first_place + row;
      if (kIsGateUp) return segments.pair(of_all) / job_.top_k;
      return segments.has_few_rows() && segments.pair(of_all) < 0 ? -1 : of_all;
    });
  }

 private:
  template <typename RowOf>
  __device__ __forceinline__ void fetch(int place, int num_rows, const RowOf& row_of) const {
    rows(place).fetch(job_.x, job_.weights.first.num_inputs, chain_, num_rows, row_of);
  }

  const ExpertsJob& job_;
  const Chain& chain_;
  uint32_t shared_;
  int lane_;
};

/// Where a warp's next weights come from: its chain of every unit of the block's items.
template <WeightForm kForm, int kUnits>
class ExpertFeed {
 public:
  __device__ __forceinline__ ExpertFeed(const LinearStack& weights, const Segments& segments,
                                        const Chain& chain)
      : weights_(weights), segments_(segments), chain_(chain), next_(segments.begin()) {
    begin_item();
  }

  /// Starts to fill a slot with the next part of a chain, if there is one.
  __device__ __forceinline__ void fill(ExpertRing<kForm, kUnits>& ring, int slot) {
    if (steps_left_ == 0) return;
    const int64_t unit_bytes = int64_t{weights_.first.num_inputs / kLinearStep} * step_bytes(kForm);
    const int num_steps = min(steps_left_, kExpertSlotSteps<kForm>);
    ring.fill(slot, at_, num_steps, is_read_once_, min(units_left_, kUnits), unit_bytes);
    at_ += num_steps * step_bytes(kForm);
    steps_left_ -= num_steps;
    if (steps_left_ > 0) return;
    units_left_ -= kUnits;
    if (units_left_ > 0) {
      at_ += kUnits * unit_bytes - chain_.num_steps * step_bytes(kForm);
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
    units_left_ = item.num_units();
    steps_left_ = chain_.num_steps;
    is_read_once_ = item.is_read_once;
  }

  const LinearStack& weights_;
  const Segments& segments_;
  const Chain& chain_;
  int next_, units_left_ = 0, steps_left_ = 0;
  const uint8_t* at_ = nullptr;
  bool is_read_once_ = true;
};

/// Multiplies the steps of a slot up to step `last`, of which several's operands are under way
/// together. kIsWhole: those are all, of one block. `begin`: steps of the chain before them. For a
/// unit that the slot does not have the sums are of no use.
template <bool kIsWhole, WeightForm kForm, int kTiles, int kUnits>
__device__ __forceinline__ void multiply_slot(ChainSums<kForm, kTiles> (&sums)[kUnits],
                                              ExpertScales<kForm, kUnits>& scales, uint32_t slot,
                                              int begin, int last, const ChainRows<kTiles>& rows,
                                              int lane) {
  constexpr int kSteps = kExpertSlotSteps<kForm>, kAtOnce = kIsWhole ? 4 : 2;
  [[maybe_unused]] const unsigned ends = scales.ends(last);
  // Of the current segment and the next: a slot has steps of two blocks at most.
  [[maybe_unused]] float of_segments[kUnits][2][2];
  if constexpr (has_blocks(kForm)) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      scales.get(unit, 0, of_segments[unit][0]);
      if (!kIsWhole) scales.get(unit, 1, of_segments[unit][1]);
    }
  }
#pragma unroll
  for (int first = 0; first < kSteps; first += kAtOnce) {
    uint32_t weights[kAtOnce][kUnits][4], x[kAtOnce][kTiles][2];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        load_weights<kForm>(weights[i][unit], slot + unit * ExpertRing<kForm, kUnits>::kUnitBytes,
                            first + i, lane);
      }
      rows.load(begin + (kIsWhole ? first + i : min(first + i, last)), x[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int step = first + i;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          multiply_add(sums[unit].products[tile], weights[i][unit], x[i][tile][0], x[i][tile][1]);
        }
      }
      if constexpr (has_blocks(kForm)) {
        if (kIsWhole ? step + 1 == kSteps : (ends >> step & 1) != 0) {
#pragma unroll
          for (int unit = 0; unit < kUnits; ++unit) {
            sums[unit].end_segment(of_segments[unit][0]);
            of_segments[unit][0][0] = of_segments[unit][1][0];
            of_segments[unit][0][1] = of_segments[unit][1][1];
          }
          scales.end_segment();
          if (step == last) return;
        }
      } else if (!kIsWhole && step == last) {
        return;
      }
    }
  }
}

/// Multiplies a chain of some units; its weights come by `ring`, which `feed` keeps full.
template <WeightForm kForm, int kTiles, int kUnits>
__device__ __forceinline__ void multiply_chain(ChainSums<kForm, kTiles> (&sums)[kUnits],
                                               const Chain& chain,
                                               ExpertScales<kForm, kUnits>& scales,
                                               ExpertRing<kForm, kUnits>& ring,
                                               ExpertFeed<kForm, kUnits>& feed,
                                               const ChainRows<kTiles>& rows, int lane) {
  constexpr int kSteps = kExpertSlotSteps<kForm>;
#pragma unroll 1
  for (int begin = 0; begin < chain.num_steps; begin += kSteps) {
    const uint32_t slot = ring.wait();
    const int last = chain.num_steps - 1 - begin;
    if (last >= kSteps - 1 && scales.end_with_slots()) {
      multiply_slot<true>(sums, scales, slot, begin, last, rows, lane);
    } else {
      multiply_slot<false>(sums, scales, slot, begin, last, rows, lane);
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

/// The chains' sums of 8 kTiles rows. Of one tile, those of a unit are added up while the next
/// unit's are written, unless these are multiplied at once.
template <int kTiles>
using ExpertSums = SumLayout<kTiles, kTiles == 1 ? 2 : 1>;

/// Outputs of kUnits units that a thread writes, one after the other. Rows are counted through,
/// unit by unit: the thread's are row thread / 16 and each 16 rows on.
template <int kTiles, int kUnits>
inline constexpr int kWritePasses =
    (8 * kTiles * kUnits * kLinearUnit + kStreamThreads - 1) / kStreamThreads;

/// The pairs of a thread's rows of an item; -1: none.
template <int kTiles, int kPasses>
__device__ __forceinline__ void find_pairs(int (&pairs)[kPasses], const Segments& segments,
                                           const ExpertItem& item) {
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row =
        (pass * kStreamThreads + static_cast<int>(threadIdx.x)) / kLinearUnit % (8 * kTiles);
    pairs[pass] = row < item.num_rows ? segments.pair(item.first_place + row) : -1;
  }
}

/// Adds up the chains' sums of the units from `first_unit` on and writes their outputs.
template <WeightForm kForm, int kTiles, bool kIsGateUp, int kUnits, int kPasses>
__device__ __forceinline__ void write_units(const ExpertsJob& job,
                                            const ExpertScales<kForm, kUnits>& scales,
                                            const ExpertItem& item, int first_unit,
                                            const int (&pairs)[kPasses], const float* sums) {
  using Sums = ExpertSums<kTiles>;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int element = pass * kStreamThreads + threadIdx.x;
    const int output = element % kLinearUnit, row = element / kLinearUnit % Sums::kRows;
    const int own_unit = element / kLinearUnit / Sums::kRows, unit = first_unit + own_unit;
    // The whole warp, which has two rows of a unit.
    if (own_unit >= kUnits || unit >= item.last_unit) continue;
    if (row / 2 * 2 >= item.num_rows) continue;
    const int place = item.first_place + row;
    const int pair = pairs[pass];
    const float* from = sums + element / kLinearUnit * Sums::kPitch + output;
    float sum = from[0];
#pragma unroll
    for (int c = 1; c < kLinearChains; ++c) sum += from[c * Sums::kChainFloats];
    sum = scales.of_output(sum, own_unit, output);
    if constexpr (kIsGateUp) {
      const float up = __shfl_down_sync(kAllLanes, sum, kLinearGateRows);
      if (pair >= 0 && output < kLinearGateRows) {
        const int64_t width = job.weights.first.num_outputs / 2;
        job.out[place * width + unit * kLinearGateRows + output] = swiglu(sum, up);
      }
    } else if (pair >= 0) {
      const int64_t width = job.weights.first.num_outputs;
      job.out[pair * width + unit * kLinearUnit + output] = __float2bfloat16_rn(sum);
    }
  }
}

/// Gate and up is a fence, so that down, and the norm after it, may read how rows are routed before
/// their wait; down fills its ring then. Two blocks are to fit a multiprocessor: while one waits
/// for itself, the other multiplies.
template <WeightForm kForm, int kTiles, bool kIsGateUp>
__global__ void __launch_bounds__(kStreamThreads, 2) experts_kernel(ExpertsJob job) {
  if constexpr (!kIsGateUp) allow_next_kernel();
  constexpr int kUnits = units_at_once(kForm, kTiles);
  using Sums = ExpertSums<kTiles>;
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);  // in a uniform register
  const int lane = threadIdx.x % 32;
  constexpr int kSlotBytes = ExpertRing<kForm, kUnits>::kSlotBytes;
  const ExpertsShared at(kSlotBytes, Sums::kBytes, job);
  extern __shared__ __align__(128) uint8_t shared[];
  float* const sums = reinterpret_cast<float*>(shared + at.sums);
  float* const own_sums = sums + warp * Sums::kChainFloats;
  auto& few = *reinterpret_cast<FewRowsTable*>(shared + at.table);
  const uint32_t base = shared_address(shared);
  ExpertRing<kForm, kUnits> ring(base + at.ring + warp * job.num_slots * kSlotBytes,
                                 base + at.barriers + warp * job.num_slots * kSlotBarrierBytes,
                                 job.num_slots, lane);
  const PackedLinear& shape = job.weights.first;
  const Chain chain = find_chain(shape, 0, warp);
  ExpertActivations<kTiles, kIsGateUp> activations(
      job, chain, base + warp * job.num_places * activation_pitch(job.chain_steps), lane);
  const bool has_few_rows = job.num_rows <= kFewRows;
  if (has_few_rows) clear_few_rows(few);
  __syncthreads();

  if constexpr (kIsGateUp) {
    wait_for_previous_kernel();
    allow_next_kernel();
    if (has_few_rows) activations.fetch_step();
  }
  if (has_few_rows && warp == 0) {
    sort_few_rows(few, job.expert, job.num_rows, job.top_k, job.weights.count, lane);
  }
  __syncthreads();
  const Segments segments(job.pairs, few, job.num_rows, Sums::kRows,
                          shape.num_outputs / kLinearUnit);
  int at_unit = segments.begin();
  const bool has_items = at_unit < segments.end();
  ExpertItem item = {};
  ExpertScales<kForm, kUnits> scales(shape, chain, job.chain_steps, lane);
  if (has_items) {
    item = segments.item(at_unit);
    scales.begin(item);
  }
  // Ahead of the weights, which would delay it.
  if (kIsGateUp && !has_few_rows && has_items) activations.fetch(0, segments, item);
  ExpertFeed<kForm, kUnits> feed(job.weights, segments, chain);
#pragma unroll 1
  for (int slot = 0; slot < job.num_slots; ++slot) feed.fill(ring, slot);
  if constexpr (!kIsGateUp) wait_for_previous_kernel();
  if constexpr (kIsGateUp) {
    if (has_few_rows && job.pairs.counts != nullptr && blockIdx.x == 0 && warp == 0) {
      count_few_rows(job.pairs.counts, few, job.expert, job.num_rows * job.top_k, lane);
    }
  }

  if (!has_items) return;
  if (!kIsGateUp) activations.fetch(0, segments, item);
  constexpr bool kAlternates = Sums::kBuffers > kUnits;
  int sum_buffer = 0, place = 0;
  for (;;) {
    int pairs[kWritePasses<kTiles, kUnits>];
    find_pairs<kTiles>(pairs, segments, item);
    at_unit += item.num_units();
    const bool has_next = at_unit < segments.end();
    ExpertItem next = item;
    if (has_next) next = segments.item(at_unit);
    const bool changes = has_next && !activations.are_same(item, next);
    const int next_place = changes ? activations.find_place(place, item, next) : place;
    const bool comes_now = changes && next_place >= 0;
    if (comes_now) activations.fetch(next_place, segments, next);
    wait_for_rows(comes_now);
#pragma unroll 1
    for (int unit = item.first_unit; unit < item.last_unit; unit += kUnits) {
      scales.begin_units(item, unit, next);
      with_tiles<kTiles>(item.num_rows, [&](auto tiles) {
        constexpr int kCount = decltype(tiles)::value;
        ChainSums<kForm, kCount> chain_sums[kUnits];
        multiply_chain(chain_sums, chain, scales, ring, feed,
                       activations.template rows<kCount>(place), lane);
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          store_sums<Sums>(own_sums + (sum_buffer + i) * Sums::kBufferFloats, chain_sums[i].whole(),
                           lane);
        }
      });
      __syncthreads();
      write_units<kForm, kTiles, kIsGateUp>(job, scales, item, unit, pairs,
                                            sums + sum_buffer * Sums::kBufferFloats);
      if constexpr (kAlternates) {
        sum_buffer ^= 1;
      } else {
        __syncthreads();
      }
    }
    if (!has_next) return;
    place = max(next_place, 0);
    if (next_place < 0) activations.fetch(place, segments, next);
    item = next;
  }
}

}  // namespace openspec::cuda
