#pragma once

/// The products of experts by streaming their weights, as stream.cuh does with those of one matrix:
/// the same chains, the same sums. What a block works on follows from how the pairs are sorted,
/// which is known on the device alone.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/experts/sorted_pairs.cuh"
#include "kernels/linear/linear_stack.h"
#include "kernels/linear/stream.cuh"

namespace openspec::cuda {

/// Gate and up read rows of the step and write rows of sorted pairs; down reads these and writes a
/// row for each pair.
struct ExpertsJob {
  LinearStack weights;
  const __nv_bfloat16* x;
  __nv_bfloat16* out;
  SortedPairs pairs;
  int top_k;
  int chunk_units;      // of an item
  int num_slots = 0;    // of a warp's WeightRing
  int phase_steps = 0;  // of SharedActivations
};

/// Rows of one expert, from first_row to before num_rows in the order of sorted pairs.
template <bool kIsGateUp>
struct ExpertRows {
  const __nv_bfloat16* x;
  const int32_t* pair;
  int num_inputs, top_k;
  int first_row, num_rows;

  /// As ActivationRows::load.
  __device__ __forceinline__ uint4 load(int row, int step, int octet) const {
    const int at = first_row + row;
    if (at >= num_rows) return make_uint4(0, 0, 0, 0);
    const int64_t from = kIsGateUp ? __ldcg(pair + at) / top_k : at;
    return __ldcg(reinterpret_cast<const uint4*>(x + from * num_inputs + step * kLinearStep) +
                  octet);
  }
};

/// Up to 8 kTiles rows of an expert, and some of its units.
struct ExpertItem {
  int expert, segment, first_unit, last_unit;
};

/// All items, an expert's together, and of these the segments that read the same weights.
struct ExpertItems {
  const int* segments;  // [num_experts + 1] before each expert's, in shared memory
  int num_experts, num_chunks, chunk_units, num_units;

  __device__ __forceinline__ int count() const { return segments[num_experts] * num_chunks; }
  __device__ __forceinline__ ExpertItem find(int id) const {
    int expert = 0;
    for (int end = num_experts; end - expert > 1;) {
      const int middle = (expert + end) / 2;
      if (segments[middle] * num_chunks <= id) {
        expert = middle;
      } else {
        end = middle;
      }
    }
    const int of_expert = segments[expert + 1] - segments[expert];
    const int local = id - segments[expert] * num_chunks;
    const int first_unit = local / of_expert * chunk_units;
    return {expert, local % of_expert, first_unit, min(first_unit + chunk_units, num_units)};
  }
};

/// Where a warp's next weights come from: its chain of every unit of the block's items.
template <WeightForm kForm>
class ExpertFeed {
 public:
  __device__ __forceinline__ ExpertFeed(const LinearStack& weights, const ExpertItems& items,
                                        const Chain& chain)
      : weights_(weights), chain_(chain), id_(blockIdx.x) {
    if (chain.num_steps == 0) return;
    begin_item(items);
  }

  /// Starts to fill a slot with the next part of a chain, if there is one.
  __device__ __forceinline__ void fill(const PackedLinear&, const ExpertItems& items,
                                       WeightRing<kForm>& ring, int slot) {
    if (steps_left_ == 0) return;
    const int num_steps = min(steps_left_, kSlotSteps);
    ring.fill(slot, at_, num_steps);
    at_ += num_steps * step_bytes(kForm);
    steps_left_ -= num_steps;
    if (steps_left_ > 0) return;
    if (--units_left_ > 0) {
      at_ += (weights_.first.num_inputs / kLinearStep - chain_.num_steps) * step_bytes(kForm);
      steps_left_ = chain_.num_steps;
    } else {
      id_ += gridDim.x;
      begin_item(items);
    }
  }

 private:
  __device__ __forceinline__ void begin_item(const ExpertItems& items) {
    if (id_ >= items.count()) return;
    const ExpertItem item = items.find(id_);
    const int64_t step =
        static_cast<int64_t>(item.first_unit) * (weights_.first.num_inputs / kLinearStep) +
        chain_.first_step;
    at_ = static_cast<const uint8_t*>(weights_.first.data) + item.expert * weights_.bytes +
          step * step_bytes(kForm);
    units_left_ = item.last_unit - item.first_unit;
    steps_left_ = chain_.num_steps;
  }

  const LinearStack& weights_;
  Chain chain_;
  int id_, units_left_ = 0, steps_left_ = 0;
  const uint8_t* at_ = nullptr;
};

/// segments[e] = of how many segments of `rows` rows the experts before e are.
__device__ __forceinline__ void count_segments(const SortedPairs& pairs, int num_experts, int rows,
                                               int* segments) {
  constexpr int kEach = 2;  // experts of a thread
  static_assert(kEach * kStreamThreads >= 512);
  __shared__ int totals[kStreamWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = static_cast<int>(threadIdx.x) * kEach;
  int own[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    own[i] = 0;
    if (first + i < num_experts) {
      const int32_t* at = pairs.first + first + i;
      own[i] = (__ldcg(at + 1) - __ldcg(at) + rows - 1) / rows;
    }
    sum += own[i];
  }
  int before = sum;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(kAllLanes, before, d);
    if (lane >= d) before += other;
  }
  if (lane == 31) totals[warp] = before;
  __syncthreads();
  for (int w = 0; w < warp; ++w) before += totals[w];
  before -= sum;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (first + i < num_experts) segments[first + i] = before;
    before += own[i];
    if (first + i + 1 == num_experts) segments[num_experts] = before;
  }
  __syncthreads();
}

/// Adds up the chains' sums of a unit and writes its outputs.
template <WeightForm kForm, int kTiles, bool kIsGateUp>
__device__ __forceinline__ void write_unit(const ExpertsJob& job, const PackedLinear& weight,
                                           const ExpertRows<kIsGateUp>& rows, int unit,
                                           const float* sums) {
  using Sums = SumLayout<kTiles>;
  constexpr int kElements = Sums::kRows * kLinearUnit;
  constexpr int kPasses = (kElements + kStreamThreads - 1) / kStreamThreads;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int element = pass * kStreamThreads + threadIdx.x;
    if (element >= kElements) break;  // the whole warp
    const int row = element / kLinearUnit, output = element % kLinearUnit;
    const int at = rows.first_row + row;
    const bool is_row = at < rows.num_rows;
    float sum = 0.0f;
    if (is_row) {
      const float* from = sums + row * Sums::kPitch + output;
      sum = from[0];
#pragma unroll
      for (int c = 1; c < kLinearChains; ++c) sum += from[c * Sums::kChainFloats];
      sum = with_scale<kForm>(sum, weight, unit, output);
    }
    if constexpr (kIsGateUp) {
      const float up = __shfl_down_sync(kAllLanes, sum, kLinearGateRows);
      if (is_row && output < kLinearGateRows) {
        const int64_t width = weight.num_outputs / 2;
        job.out[at * width + unit * kLinearGateRows + output] = swiglu(sum, up);
      }
    } else if (is_row) {
      const int64_t to = __ldcg(job.pairs.pair + at);
      job.out[to * weight.num_outputs + unit * kLinearUnit + output] = __float2bfloat16_rn(sum);
    }
  }
}

/// Gate and up is a fence, so that down may read how pairs are sorted before its wait.
template <WeightForm kForm, int kTiles, bool kIsGateUp>
__global__ void __maxnreg__(is_e4m3(kForm) ? 128 : 112) experts_kernel(ExpertsJob job) {
  if constexpr (!kIsGateUp) allow_next_kernel();
  using Sums = SumLayout<kTiles>;
  using Rows = ExpertRows<kIsGateUp>;
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);  // in a uniform register
  const int lane = threadIdx.x % 32;
  constexpr int kSlotBytes = WeightRing<kForm>::kSlotBytes;
  extern __shared__ __align__(128) uint8_t shared[];
  float* const sums = reinterpret_cast<float*>(shared + ring_bytes(kSlotBytes, job.num_slots));
  float* const own_sums = sums + warp * Sums::kChainFloats;
  const uint32_t barriers = shared_address(sums) + Sums::kBytes;
  const uint32_t behind = barriers + barrier_bytes(job.num_slots);
  auto* const segments = reinterpret_cast<int*>(
      shared + ring_bytes(kSlotBytes, job.num_slots) + Sums::kBytes + barrier_bytes(job.num_slots) +
      kStreamWarps * activation_bytes(kTiles, job.phase_steps));
  WeightRing<kForm> ring(shared_address(shared) + warp * job.num_slots * kSlotBytes,
                         barriers + warp * job.num_slots * kSlotBarrierBytes, job.num_slots, lane);
  if constexpr (kIsGateUp) {
    wait_for_previous_kernel();
    allow_next_kernel();
  }
  const PackedLinear& shape = job.weights.first;
  count_segments(job.pairs, job.weights.count, Sums::kRows, segments);
  const int num_units = shape.num_outputs / kLinearUnit;
  const ExpertItems items = {segments, job.weights.count,
                             (num_units + job.chunk_units - 1) / job.chunk_units, job.chunk_units,
                             num_units};
  const Chain chain = find_chain(shape, 0, warp);
  ExpertFeed<kForm> feed(job.weights, items, chain);
#pragma unroll 1
  for (int slot = 0; slot < job.num_slots; ++slot) feed.fill(shape, items, ring, slot);
  if constexpr (!kIsGateUp) wait_for_previous_kernel();

  SharedActivations<kTiles, Rows> activations;
  int buffer = 0;
  for (int id = blockIdx.x; id < items.count(); id += gridDim.x) {
    const ExpertItem item = items.find(id);
    const PackedLinear weight = job.weights.at(item.expert);
    const Rows rows = {job.x,
                       job.pairs.pair,
                       shape.num_inputs,
                       job.top_k,
                       __ldcg(job.pairs.first + item.expert) + item.segment * Sums::kRows,
                       __ldcg(job.pairs.first + item.expert + 1)};
    activations.begin_block(rows, behind + warp * activation_bytes(kTiles, job.phase_steps),
                            job.phase_steps, lane);
    for (int unit = item.first_unit; unit < item.last_unit; ++unit) {
      ChainSums<kForm, kTiles> chain_sums;
      multiply_chain(chain_sums, weight, items, chain, unit, /*split=*/id, ring, feed, activations,
                     lane);
      store_sums<Sums>(own_sums + buffer * Sums::kBufferFloats, chain_sums.whole(), lane);
      __syncthreads();
      write_unit<kForm, kTiles, kIsGateUp>(job, weight, rows, unit,
                                           sums + buffer * Sums::kBufferFloats);
      buffer ^= 1;
    }
  }
}

}  // namespace openspec::cuda
