#pragma once

/// linear_stream's kernel for any shape: the weights stream through blocks of eight warps. Warp c
/// computes chain c of one unit of 16 outputs after another; its ring of weights runs on across
/// units, and it is filled before the wait for the kernel before, whose end these reads overlap.
/// After each chain the eight sums meet in shared memory. stream_fixed.cuh does the same for
/// few rows and known lengths.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/exchange/exchange.cuh"
#include "kernels/linear/activations.cuh"
#include "kernels/linear/linear.h"
#include "kernels/linear/ring.cuh"
#include "kernels/linear/tiles.cuh"

namespace openspec::cuda {

inline constexpr int kStreamWarps = kLinearChains;
inline constexpr int kStreamThreads = 32 * kStreamWarps;
inline constexpr unsigned kAllLanes = 0xffffffffu;

/// Chosen on the host, from shape and device. A block is (stream, split if partials are wanted,
/// tile of rows), the last fastest: blocks that read the same weights for different rows run
/// together and find them in the second-level cache.
struct StreamGeometry {
  SplitRange splits;   // that are here
  int64_t row_stride;  // of the output, elements
  int num_row_tiles;
  int num_streams;  // blocks of a tile of rows
  int num_slots;    // of a warp's WeightRing
  int phase_steps;  // of SharedActivations

  /// Blocks that share the units of one of `num_splits`: of some splits one more than of others, so
  /// that every multiprocessor has a block.
  __device__ __forceinline__ int streams_of(int split, int num_splits) const {
    return (num_streams - split + num_splits - 1) / num_splits;
  }
};

/// The geometry of a kernel whose sums go to the inboxes of ranks. `partials` is then slot 0 of the
/// own inbox.
struct ExchangeGeometry : StreamGeometry {
  Outbox to;
};
template <typename Geometry>
inline constexpr bool kSends = std::is_same_v<Geometry, ExchangeGeometry>;

/// Whether the sums of splits stay apart.
template <typename Geometry>
__host__ __device__ bool are_apart(const LinearParams& params, const Geometry& geometry) {
  if constexpr (kSends<Geometry>) return !geometry.to.adds_splits();
  return params.partials != nullptr;
}

/// The chains' sums of a unit: [chain][buffer][row][kPitch]. With two buffers a unit's sums are
/// added up while the next unit's are written.
template <int kTiles, int kNumBuffers = kTiles <= 3 ? 2 : 1>
struct SumLayout {
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kBuffers = kNumBuffers;
  static constexpr int kPitch = kLinearUnit + 4;  // spreads the rows of a fragment over the banks
  static constexpr int kBufferFloats = kRows * kPitch;
  static constexpr int kChainFloats = kBuffers * kBufferFloats;
  static constexpr int kBytes = kLinearChains * kChainFloats * 4;
};

__host__ __device__ constexpr int ring_bytes(int slot_bytes, int num_slots) {
  return kStreamWarps * num_slots * slot_bytes;
}
__host__ __device__ constexpr int barrier_bytes(int num_slots) {
  return kStreamWarps * num_slots * kSlotBarrierBytes;
}

__device__ __forceinline__ Chain find_chain(const PackedLinear& weight, int split, int chain) {
  const StepRange steps = split_steps(weight, split);
  const int first_step = chain_begin(steps.begin, steps.end, chain);
  return {first_step, chain_begin(steps.begin, steps.end, chain + 1) - first_step};
}

/// What a block works on, in this order: the splits of a unit, then the next unit.
struct BlockItems {
  int first_unit, unit_stride, num_units;
  int first_split, last_split;
};

/// Where a warp's next weights come from: its chain of every item.
template <WeightForm kForm>
class WeightFeed {
 public:
  __device__ __forceinline__ WeightFeed(const PackedLinear& weight, const BlockItems& items,
                                        int chain)
      : unit_(items.first_unit), split_(items.first_split), chain_(chain) {
    find_weights(weight, items);
  }

  /// Starts to fill a slot with the next part of a chain, if there is one.
  __device__ __forceinline__ void fill(const PackedLinear& weight, const BlockItems& items,
                                       WeightRing<kForm>& ring, int slot) {
    if (steps_left_ == 0) return;
    const int num_steps = min(steps_left_, kSlotSteps);
    ring.fill(slot, at_, num_steps, /*is_read_once=*/false);  // blocks for other rows do, too
    at_ += num_steps * step_bytes(kForm);
    steps_left_ -= num_steps;
    if (steps_left_ > 0) return;
    next(items);
    find_weights(weight, items);
  }

 private:
  __device__ __forceinline__ void next(const BlockItems& items) {
    if (++split_ < items.last_split) return;
    split_ = items.first_split;
    unit_ += items.unit_stride;
  }

  /// At the current item or, a chain without steps having no weights, after it.
  __device__ __forceinline__ void find_weights(const PackedLinear& weight,
                                               const BlockItems& items) {
    for (; unit_ < items.num_units; next(items)) {
      const Chain chain = find_chain(weight, split_, chain_);
      if (chain.num_steps == 0) continue;
      const int64_t step =
          static_cast<int64_t>(unit_) * (weight.num_inputs / kLinearStep) + chain.first_step;
      at_ = static_cast<const uint8_t*>(weight.data) + step * step_bytes(kForm);
      steps_left_ = chain.num_steps;
      return;
    }
  }

  int unit_, split_, chain_;
  const uint8_t* at_ = nullptr;
  int steps_left_ = 0;
};

/// Has a unit's biases brought near, if there are any.
__device__ __forceinline__ void fetch_bias(const PackedLinear& weight, int unit) {
  if (weight.bias != nullptr && threadIdx.x == 0) fetch_to_cache(weight.bias + unit * kLinearUnit);
}
__device__ __forceinline__ float with_bias(float sum, const PackedLinear& weight, int unit,
                                           int output) {
  return weight.bias == nullptr ? sum
                                : __fadd_rn(sum, __ldg(weight.bias + unit * kLinearUnit + output));
}

/// A split's sum of an output of a unit, scaled.
template <WeightForm kForm>
__device__ __forceinline__ float with_scale(float sum, const PackedLinear& weight, int unit,
                                            int output) {
  if constexpr (!has_output_scales(kForm)) return sum;
  return __fmul_rn(sum, __ldg(weight.scales + unit * kLinearUnit + output));
}

/// Writes a thread's output of a unit to `at`. Thread t has output t % 16; a warp's 32 elements are
/// two rows. Of a SwiGLU unit, threads with up rows write nothing: is_written is false. All lanes
/// of the warp call it.
__device__ __forceinline__ void write_output(bool is_swiglu, bool is_f32, void* at, bool is_written,
                                             float sum) {
  float up_sum = 0.0f;
  if (is_swiglu) up_sum = __shfl_down_sync(kAllLanes, sum, kLinearGateRows);
  if (!is_written) return;
  if (is_f32) {
    *static_cast<float*>(at) = sum;
  } else {
    *static_cast<__nv_bfloat16*>(at) = is_swiglu ? swiglu(sum, up_sum) : __float2bfloat16_rn(sum);
  }
}

/// The outputs as bytes: where they are, how large a row and an element are.
struct OutputLayout {
  bool is_swiglu, is_f32;
  int element_bytes, unit_columns;
  int64_t row_stride;  // elements
  uint8_t* data;

  __device__ __forceinline__ OutputLayout(const LinearParams& params, int64_t row_stride)
      : is_swiglu(params.weight.epilogue == LinearEpilogue::kSwiGlu),
        is_f32(params.partials != nullptr || params.out_dtype == DType::kF32),
        element_bytes(is_f32 ? 4 : 2),
        unit_columns(is_swiglu ? kLinearGateRows : kLinearUnit),
        row_stride(row_stride),
        data(static_cast<uint8_t*>(params.partials != nullptr ? static_cast<void*>(params.partials)
                                                              : params.out)) {}

  /// Byte of an output of a unit; rows of partials come split by split.
  __device__ __forceinline__ int64_t at(int64_t row, int unit, int output) const {
    return (row * row_stride + unit * unit_columns + output) * element_bytes;
  }
  __device__ __forceinline__ bool has(int output) const { return output < unit_columns; }
};

/// Multiplies a chain of a unit; its weights come by `ring`, which `feed` keeps full.
template <WeightForm kForm, int kTiles>
__device__ __forceinline__ void multiply_chain(ChainSums<kForm, kTiles>& sums,
                                               const PackedLinear& weight, const BlockItems& items,
                                               const Chain& chain, int unit, int split,
                                               WeightRing<kForm>& ring, WeightFeed<kForm>& feed,
                                               SharedActivations<kTiles>& activations, int lane) {
#pragma unroll 1
  for (int begin = 0; begin < chain.num_steps; begin += kSlotSteps) {
    activations.begin_slot(split, chain, begin);
    const uint32_t from = ring.wait();
#pragma unroll
    for (int i = 0; i < kSlotSteps; ++i) {
      if (begin + i < chain.num_steps) {
        uint32_t weights[4], x[kTiles][2];
        load_weights<kForm>(weights, from, i, lane);
        activations.load(begin + i, x);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          multiply_add(sums.products[tile], weights, x[tile][0], x[tile][1]);
        }
        if constexpr (has_blocks(kForm)) {
          const BlockScales scales(weight, unit);
          const int step = chain.first_step + begin + i;
          if (scales.segment_end(step, chain.first_step + chain.num_steps) == step + 1) {
            float of_segment[2];
            scales.get(step, of_segment);
            sums.end_segment(of_segment);
          }
        }
      }
    }
    __syncwarp();  // every lane is done with the slot
    feed.fill(weight, items, ring, ring.slot());
    ring.advance();
  }
}

/// Puts a chain's sums where all add them up.
template <typename Sums, int kTiles>
__device__ __forceinline__ void store_sums(float* to, const float (&accumulators)[kTiles][4],
                                           int lane) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = tile * 8 + lane % 4 * 2 + i % 2;
      to[row * Sums::kPitch + lane / 4 + i / 2 * 8] = accumulators[tile][i];
    }
  }
}

/// Geometry: StreamGeometry or ExchangeGeometry.
template <WeightForm kForm, int kTiles, typename Geometry>
__global__ void __maxnreg__(is_e4m3(kForm) ? 128 : 112)
    stream_kernel(LinearParams params, Geometry geometry) {
  allow_next_kernel();
  using Sums = SumLayout<kTiles>;
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);  // in a uniform register
  const int lane = threadIdx.x % 32;

  const PackedLinear& weight = params.weight;
  const bool is_apart = are_apart(params, geometry);
  const OutputLayout layout(params, geometry.row_stride);
  const int row_tile = blockIdx.x % geometry.num_row_tiles;
  const int stream = blockIdx.x / geometry.num_row_tiles;
  BlockItems items;
  const SplitRange& splits = geometry.splits;
  const int num_apart = is_apart ? splits.size() : 1;
  items.first_unit = stream / num_apart;
  items.unit_stride = geometry.streams_of(stream % num_apart, num_apart);
  items.num_units = weight.num_outputs / kLinearUnit;
  items.first_split = splits.begin + stream % num_apart;
  items.last_split = is_apart ? items.first_split + 1 : splits.end;

  constexpr int kSlotBytes = WeightRing<kForm>::kSlotBytes;
  extern __shared__ __align__(128) uint8_t shared[];
  float* const sums = reinterpret_cast<float*>(shared + ring_bytes(kSlotBytes, geometry.num_slots));
  float* const own_sums = sums + warp * Sums::kChainFloats;
  const uint32_t slots = shared_address(shared) + warp * geometry.num_slots * kSlotBytes;
  const uint32_t barriers = shared_address(sums) + Sums::kBytes;
  const uint32_t behind = barriers + barrier_bytes(geometry.num_slots);

  WeightRing<kForm> ring(slots, barriers + warp * geometry.num_slots * kSlotBarrierBytes,
                         geometry.num_slots, lane);
  WeightFeed<kForm> feed(weight, items, warp);
#pragma unroll 1
  for (int slot = 0; slot < geometry.num_slots; ++slot) feed.fill(weight, items, ring, slot);

  wait_for_previous_kernel();
  [[maybe_unused]] int64_t slot = 0;
  if constexpr (kSends<Geometry>) slot = begin_sending(geometry.to);
  const ActivationRows rows = {static_cast<const __nv_bfloat16*>(params.x), weight.num_inputs,
                               row_tile * Sums::kRows, params.num_rows};
  SharedActivations<kTiles> activations;
  activations.begin_block(rows, behind + warp * activation_bytes(kTiles, geometry.phase_steps),
                          geometry.phase_steps, lane);

  constexpr int kElements = Sums::kRows * kLinearUnit;
  constexpr int kPasses = (kElements + kStreamThreads - 1) / kStreamThreads;
  float totals[kPasses];
  int buffer = 0;
  for (int unit = items.first_unit; unit < items.num_units; unit += items.unit_stride) {
    fetch_bias(weight, unit);
    for (int split = items.first_split; split < items.last_split; ++split) {
      ChainSums<kForm, kTiles> chain_sums;
      const Chain chain = find_chain(weight, split, warp);
      multiply_chain(chain_sums, weight, items, chain, unit, split, ring, feed, activations, lane);
      store_sums<Sums>(own_sums + buffer * Sums::kBufferFloats, chain_sums.whole(), lane);
      __syncthreads();
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int element = pass * kStreamThreads + threadIdx.x;
        if (element >= kElements) break;  // the whole warp
        const int row = element / kLinearUnit;
        const int output = element % kLinearUnit;
        const bool is_row = rows.first_row + row < params.num_rows;
        float sum = 0.0f;
        if (is_row) {
          const float* from = sums + buffer * Sums::kBufferFloats + row * Sums::kPitch + output;
          sum = from[0];
#pragma unroll
          for (int c = 1; c < kLinearChains; ++c) sum += from[c * Sums::kChainFloats];
          sum = with_scale<kForm>(sum, weight, unit, output);
        }
        totals[pass] = split == items.first_split ? sum : totals[pass] + sum;
        if (split + 1 == items.last_split) {
          if constexpr (kSends<Geometry>) {
            const int of_all = rows.first_row + row;
            const RoundForm& form = geometry.to.form;
            const int64_t inbox_row =
                static_cast<int64_t>(split - form.first_sum) * form.inbox_rows +
                geometry.to.inbox_row(of_all);
            const int64_t at = layout.at(inbox_row, unit, output);
            float* own = reinterpret_cast<float*>(layout.data + at) + slot;
            if (is_row) send(geometry.to, of_all, own, word_of(totals[pass]));
          } else {
            const int64_t first_row =
                is_apart ? static_cast<int64_t>(split) * params.num_rows : int64_t{0};
            const int64_t at = layout.at(first_row + rows.first_row + row, unit, output);
            write_output(layout.is_swiglu, layout.is_f32, layout.data + at,
                         is_row && layout.has(output),
                         with_bias(totals[pass], weight, unit, output));
          }
        }
      }
      if constexpr (Sums::kBuffers == 1) {
        __syncthreads();
      } else {
        buffer ^= 1;
      }
    }
  }
}

}  // namespace openspec::cuda
