#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/launch.cuh"
#include "kernels/linear.h"
#include "kernels/linear_activations.cuh"
#include "kernels/linear_ring.cuh"
#include "kernels/linear_tiles.cuh"

namespace openspec {
namespace cuda {
namespace {

// Streaming the weights through a block of eight warps. Warp c computes chain c of one unit of 16
// outputs after another; its ring of weights runs on across units, and it is filled before the wait
// for the kernel before, whose end these reads overlap. After each chain the eight sums meet in
// shared memory.

constexpr int kWarps = kLinearChains;
constexpr int kThreads = 32 * kWarps;
constexpr unsigned kAllLanes = 0xffffffffu;

/// Chosen on the host, from shape and device. A block is (stream, split if partials are wanted,
/// tile of rows), the last fastest: blocks that read the same weights for different rows run
/// together and find them in the second-level cache.
struct Geometry {
  int num_row_tiles;
  int num_streams;  // blocks that share the units
  int num_slots;    // of a warp's ring
  int phase_steps;  // of SharedActivations
};

/// The chains' sums of a unit: [chain][buffer][row][kSumPitch]. With two buffers a unit's sums are
/// added up while the next unit's are written.
template <int kTiles>
struct SumLayout {
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kBuffers = kTiles <= 2 ? 2 : 1;
  static constexpr int kPitch = kLinearUnit + 4;  // spreads the rows of a fragment over the banks
  static constexpr int kBufferFloats = kRows * kPitch;
  static constexpr int kChainFloats = kBuffers * kBufferFloats;
  static constexpr int kBytes = kLinearChains * kChainFloats * 4;
};

__host__ __device__ constexpr int ring_bytes(int slot_bytes, int num_slots) {
  return kWarps * num_slots * slot_bytes;
}
__host__ __device__ constexpr int barrier_bytes(int num_slots) { return kWarps * num_slots * 8; }

/// The steps of a chain; kSteps where that is known.
template <int kSteps>
__device__ __forceinline__ Chain find_chain(const PackedLinear& weight, int split, int chain) {
  const int num_steps = weight.num_inputs / kLinearStep;
  const int begin = split_begin(num_steps, weight.num_splits, split);
  const int end = split_begin(num_steps, weight.num_splits, split + 1);
  const int first_step = chain_begin(begin, end, chain);
  return {first_step, kSteps > 0 ? kSteps : chain_begin(begin, end, chain + 1) - first_step};
}

/// What a block works on, in this order: the splits of a unit, then the next unit.
struct BlockItems {
  int first_unit, unit_stride, num_units;
  int first_split, last_split;
};

/// Where a warp's next weights come from: its chain of every item. kSteps > 0: each has so many
/// steps, and there is one split.
template <int kSteps, int kSlotSteps>
class WeightFeed {
 public:
  __device__ __forceinline__ WeightFeed(const PackedLinear& weight, const BlockItems& items,
                                        int chain)
      : unit_(items.first_unit), split_(items.first_split), chain_(chain) {
    find_weights(weight, items);
  }

  /// Starts to fill a slot with the next part of a chain, if there is one.
  __device__ __forceinline__ void fill(const PackedLinear& weight, const BlockItems& items,
                                       WeightRing<kSlotSteps>& ring, int slot) {
    if (steps_left_ == 0) return;
    const int num_steps = min(steps_left_, kSlotSteps);
    ring.fill(slot, at_, num_steps);
    at_ += num_steps * kLinearStepBytes;
    steps_left_ -= num_steps;
    if (steps_left_ > 0) return;
    if constexpr (kSteps > 0) {
      unit_ += items.unit_stride;
      const int64_t unit_bytes = static_cast<int64_t>(weight.num_inputs) * (2 * kLinearUnit);
      at_ += items.unit_stride * unit_bytes - kSteps * kLinearStepBytes;
      if (unit_ < items.num_units) steps_left_ = kSteps;
    } else {
      next(items);
      find_weights(weight, items);
    }
  }

 private:
  __device__ __forceinline__ void next(const BlockItems& items) {
    if (++split_ < items.last_split) return;
    split_ = items.first_split;
    unit_ += items.unit_stride;
  }

  /// At the current item or, a chain without steps having no weights, behind it.
  __device__ __forceinline__ void find_weights(const PackedLinear& weight,
                                               const BlockItems& items) {
    for (; unit_ < items.num_units; next(items)) {
      const Chain chain = find_chain<kSteps>(weight, split_, chain_);
      if (chain.num_steps == 0) continue;
      const int64_t step =
          static_cast<int64_t>(unit_) * (weight.num_inputs / kLinearStep) + chain.first_step;
      at_ = static_cast<const uint8_t*>(weight.data) + step * kLinearStepBytes;
      steps_left_ = chain.num_steps;
      return;
    }
  }

  int unit_, split_, chain_;
  const uint8_t* at_ = nullptr;
  int steps_left_ = 0;
};

/// Writes outputs of one unit for the rows of a block. Thread t has output t % 16; a warp's 32
/// elements are two rows.
__device__ __forceinline__ void write_output(const LinearParams& params, int unit, int split,
                                             int row, int output, bool is_row, float sum) {
  const PackedLinear& weight = params.weight;
  if (weight.epilogue == LinearEpilogue::kSwiGlu) {
    const float up_sum = __shfl_down_sync(kAllLanes, sum, kLinearGateRows);
    if (!is_row || output >= kLinearGateRows) return;
    const int64_t at =
        static_cast<int64_t>(row) * (weight.num_outputs / 2) + unit * kLinearGateRows + output;
    static_cast<__nv_bfloat16*>(params.out)[at] = swiglu(sum, up_sum);
    return;
  }
  if (!is_row) return;
  const int column = unit * kLinearUnit + output;
  const int64_t at = static_cast<int64_t>(row) * weight.num_outputs + column;
  if (params.partials != nullptr) {
    params.partials[partial_index(params.num_rows, weight.num_outputs, split, row, column)] = sum;
  } else if (params.out_dtype == DType::kF32) {
    static_cast<float*>(params.out)[at] = sum;
  } else {
    static_cast<__nv_bfloat16*>(params.out)[at] = __float2bfloat16_rn(sum);
  }
}

// Not more than 128 registers: the next linear's blocks are to start beside these.
template <typename Activations>
__device__ __forceinline__ void stream_weights(const LinearParams& params,
                                               const Geometry& geometry) {
  allow_next_kernel();
  constexpr int kTiles = Activations::kTiles;
  constexpr int kSteps = Activations::kSteps;
  constexpr int kSlotSteps = Activations::kSlotSteps;
  using Ring = WeightRing<kSlotSteps>;
  using Sums = SumLayout<kTiles>;
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);  // in a uniform register
  const int lane = threadIdx.x % 32;

  const PackedLinear& weight = params.weight;
  const bool is_apart = params.partials != nullptr;
  const int row_tile = blockIdx.x % geometry.num_row_tiles;
  const int stream = blockIdx.x / geometry.num_row_tiles;
  BlockItems items;
  items.first_unit = is_apart ? stream / weight.num_splits : stream;
  items.unit_stride = geometry.num_streams;
  items.num_units = weight.num_outputs / kLinearUnit;
  items.first_split = is_apart ? stream % weight.num_splits : 0;
  items.last_split = is_apart ? items.first_split + 1 : weight.num_splits;

  extern __shared__ __align__(128) uint8_t shared[];
  float* const sums =
      reinterpret_cast<float*>(shared + ring_bytes(Ring::kSlotBytes, geometry.num_slots));
  float* const own_sums = sums + warp * Sums::kChainFloats;
  const uint32_t slots = shared_address(shared) + warp * geometry.num_slots * Ring::kSlotBytes;
  const uint32_t barriers = shared_address(sums) + Sums::kBytes;
  const uint32_t behind = barriers + barrier_bytes(geometry.num_slots);

  Ring ring(slots, barriers + warp * geometry.num_slots * Ring::kBarrierBytes, geometry.num_slots,
            lane);
  WeightFeed<kSteps, kSlotSteps> feed(weight, items, warp);
#pragma unroll 1
  for (int slot = 0; slot < geometry.num_slots; ++slot) feed.fill(weight, items, ring, slot);

  wait_for_previous_kernel();
  const ActivationRows rows = {static_cast<const __nv_bfloat16*>(params.x), weight.num_inputs,
                               row_tile * Sums::kRows, params.num_rows};
  Activations activations;
  if constexpr (kSteps > 0) {
    const Chain chain = find_chain<kSteps>(weight, items.first_split, warp);
    activations.begin_block(rows, chain, shared_address(own_sums), lane);
  } else {
    activations.begin_block(rows, behind + warp * activation_bytes(kTiles, geometry.phase_steps),
                            geometry.phase_steps, lane);
  }

  constexpr int kElements = Sums::kRows * kLinearUnit;
  constexpr int kPasses = (kElements + kThreads - 1) / kThreads;
  float totals[kPasses];
  int buffer = 0;
  for (int unit = items.first_unit; unit < items.num_units; unit += items.unit_stride) {
    for (int split = items.first_split; split < items.last_split; ++split) {
      float accumulators[kTiles][4] = {};
      const Chain chain = find_chain<kSteps>(weight, split, warp);
#pragma unroll(kSteps > 0 ? kSteps : 1)
      for (int begin = 0; begin < (kSteps > 0 ? kSteps : chain.num_steps); begin += kSlotSteps) {
        activations.begin_slot(split, chain, begin);
        const uint32_t from = ring.wait() + lane * 16;
#pragma unroll
        for (int i = 0; i < kSlotSteps; ++i) {
          if (begin + i < (kSteps > 0 ? kSteps : chain.num_steps)) {
            uint32_t weights[4], x[kTiles][2];
            load_matrices(from + i * kLinearStepBytes, weights);
            activations.load(begin + i, x);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
              multiply_add(accumulators[tile], weights, x[tile]);
            }
          }
        }
        __syncwarp();  // every lane is done with the slot
        feed.fill(weight, items, ring, ring.slot());
        ring.advance();
      }

      float* const own = own_sums + buffer * Sums::kBufferFloats;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = tile * 8 + lane % 4 * 2 + i % 2;
          own[row * Sums::kPitch + lane / 4 + i / 2 * 8] = accumulators[tile][i];
        }
      }
      __syncthreads();
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int element = pass * kThreads + threadIdx.x;
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
        }
        totals[pass] = split == items.first_split ? sum : totals[pass] + sum;
        if (split + 1 == items.last_split) {
          write_output(params, unit, split, rows.first_row + row, output, is_row, totals[pass]);
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

// The fewer registers, the better: the blocks of the next linear, and of the small kernel between
// them, are to start beside these. Twice 80 leave room for any small kernel, twice 112 for 256
// threads of 32 registers. (__maxnreg__ takes no template's constant.)
template <typename Activations>
__global__ void __maxnreg__(80) stream_kernel_80(LinearParams params, Geometry geometry) {
  stream_weights<Activations>(params, geometry);
}
template <typename Activations>
__global__ void __maxnreg__(112) stream_kernel_112(LinearParams params, Geometry geometry) {
  stream_weights<Activations>(params, geometry);
}

template <typename Activations>
constexpr auto kernel_of() {
  if constexpr (Activations::kNeedsFewRegisters) {
    return stream_kernel_80<Activations>;
  } else {
    return stream_kernel_112<Activations>;
  }
}

struct DeviceLimits {
  int num_sms = 0;
  int shared_per_sm = 0;
  int shared_per_block = 0;
};

const DeviceLimits& device_limits() {
  static const DeviceLimits limits = [] {
    int device = 0;
    DeviceLimits found;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&found.num_sms, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&found.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                           device);
    cudaDeviceGetAttribute(&found.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                           device);
    return found;
  }();
  return limits;
}

/// One instance of the kernel.
struct Variant {
  void (*kernel)(LinearParams, Geometry) = nullptr;
  int num_tiles = 0;
  int slot_steps = 0;
  int sum_bytes = 0;
  int error = cudaSuccess;  // of preparing it

  template <typename Activations>
  static Variant of() {
    constexpr auto kKernel = kernel_of<Activations>();
    // All of the memory as shared memory, or blocks of another kernel would not start beside these.
    static const int error = [] {
      const int raised = allow_shared_bytes(kKernel, device_limits().shared_per_block);
      if (raised != cudaSuccess) return raised;
      return static_cast<int>(cudaFuncSetAttribute(
          kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    }();
    return {kKernel, Activations::kTiles, Activations::kSlotSteps,
            SumLayout<Activations::kTiles>::kBytes, error};
  }
};

template <int kTiles, int... kSteps>
Variant register_variant(int num_steps) {
  Variant found;
  (void)((num_steps == kSteps &&
          (found = Variant::of<RegisterActivations<kTiles, kSteps>>(), true)) ||
         ...);
  return found;
}

/// For the chains of the Qwen3 models, as far as their activations fit into registers; else none.
Variant register_variant(int num_tiles, int num_steps) {
  if (num_tiles == 1) {
    return register_variant<1, 4, 6, 8, 16, 19, 20, 24, 25, 32, 34, 40>(num_steps);
  }
  if (num_tiles == 2) return register_variant<2, 4, 6, 8, 16, 19, 20>(num_steps);
  return {};
}

Variant shared_variant(int num_tiles) {
  switch (num_tiles) {
    case 1:
      return Variant::of<SharedActivations<1>>();
    case 2:
      return Variant::of<SharedActivations<2>>();
    case 3:
      return Variant::of<SharedActivations<3>>();
    default:
      return Variant::of<SharedActivations<4>>();
  }
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

int linear_stream(const LinearParams& params, void* stream, const StreamPlan& plan) {
  constexpr int kMaxTiles = 4;
  constexpr int kMinRingBytes = 32 << 10;
  constexpr int kReservedBytes = 1 << 10;  // that a block takes besides its own
  const PackedLinear& weight = params.weight;
  const DeviceLimits& device = device_limits();
  const bool is_apart = params.partials != nullptr;
  const int num_steps = weight.num_inputs / kLinearStep;
  const int num_chains = weight.num_splits * kLinearChains;
  const int num_tiles = std::min(kMaxTiles, ceil_div(params.num_rows, 8));
  const int shared_limit = std::min(device.shared_per_block, device.shared_per_sm - kReservedBytes);

  Geometry geometry = {};
  int x_bytes = 0;
  Variant variant;
  if (params.num_rows <= 16 && num_steps % num_chains == 0 &&
      (is_apart || weight.num_splits == 1)) {
    variant = register_variant(num_tiles, num_steps / num_chains);
  }
  if (variant.kernel == nullptr) {
    // As many rows at once as fit; if not even eight do, all in phases.
    const int longest_chain = ceil_div(ceil_div(num_steps, weight.num_splits), kLinearChains);
    for (int tiles = num_tiles; tiles > 0 && variant.kernel == nullptr; --tiles) {
      variant = shared_variant(tiles);
      geometry.phase_steps = std::max(longest_chain, 1);
      x_bytes = kWarps * activation_bytes(tiles, geometry.phase_steps);
      if (x_bytes + variant.sum_bytes + kMinRingBytes > shared_limit) variant = {};
    }
    if (variant.kernel == nullptr) {
      variant = shared_variant(num_tiles);
      const int row_bytes =
          (shared_limit - variant.sum_bytes - kMinRingBytes) / (kWarps * 8 * num_tiles);
      geometry.phase_steps = (row_bytes - activation_pitch(0)) / (2 * kLinearStep) /
                             variant.slot_steps * variant.slot_steps;
      x_bytes = kWarps * activation_bytes(num_tiles, geometry.phase_steps);
    }
  }
  if (variant.error != cudaSuccess) return variant.error;

  // Half of the memory: the next kernel's blocks are to start beside these.
  const int half_limit = std::min(shared_limit, device.shared_per_sm / 2 - kReservedBytes);
  const int other_bytes = x_bytes + variant.sum_bytes;
  const bool fits_half = other_bytes + kMinRingBytes <= half_limit;
  const int room = (fits_half ? half_limit : shared_limit) - other_bytes;
  const int slot_bytes = variant.slot_steps * kLinearStepBytes;
  geometry.num_slots =
      std::min(plan.ring_kib << 10, room) / (ring_bytes(slot_bytes, 1) + barrier_bytes(1));
  const int shared_bytes =
      ring_bytes(slot_bytes, geometry.num_slots) + barrier_bytes(geometry.num_slots) + other_bytes;

  geometry.num_row_tiles = ceil_div(params.num_rows, 8 * variant.num_tiles);
  const int num_splits_apart = is_apart ? weight.num_splits : 1;
  const int num_blocks = device.num_sms * (fits_half ? plan.blocks_per_sm : 1);
  geometry.num_streams = std::clamp(num_blocks / (geometry.num_row_tiles * num_splits_apart), 1,
                                    weight.num_outputs / kLinearUnit);
  return launch(variant.kernel,
                dim3(geometry.num_row_tiles * num_splits_apart * geometry.num_streams),
                dim3(kThreads), shared_bytes, stream, params, geometry);
}

}  // namespace cuda

int linear_num_splits_cuda(int num_outputs, int num_inputs) {
  constexpr int kItems = 600;                    // units times splits that fill the device evenly
  constexpr int kMinSteps = 4 * kLinearChains;   // of a split: a chain should outlast its latencies
  constexpr int kMaxSteps = 40 * kLinearChains;  // activations of longer chains need more registers
  const int num_units = num_outputs / kLinearUnit;
  const int num_steps = num_inputs / cuda::kLinearStep;
  if (num_inputs < 2048 || num_units >= kItems) return 1;
  int num_splits = 1;
  while (num_splits < 8 && num_steps / (2 * num_splits) >= kMinSteps &&
         (num_units * num_splits < kItems || num_steps > num_splits * kMaxSteps)) {
    num_splits *= 2;
  }
  return num_splits;
}

int linear_cuda(const LinearParams& params, void* stream) {
  const PackedLinear& weight = params.weight;
  const bool is_swiglu = weight.epilogue == LinearEpilogue::kSwiGlu;
  if (weight.layout != LinearLayout::kTiles || weight.dtype != DType::kBF16 ||
      params.dtype != DType::kBF16 || weight.num_outputs % kLinearUnit != 0 ||
      weight.num_inputs % cuda::kLinearStep != 0 || weight.num_splits < 1 ||
      (is_swiglu && (params.partials != nullptr || params.out_dtype != DType::kBF16))) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0 || weight.num_outputs == 0) return cudaSuccess;
  if (cuda::linear_wgmma_takes(weight, params.num_rows)) {
    return cuda::linear_wgmma(params, stream);
  }
  return cuda::linear_stream(params, stream);
}

}  // namespace openspec
