#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/launch.cuh"
#include "kernels/linear.h"
#include "kernels/linear_activations.cuh"
#include "kernels/linear_stream.cuh"
#include "kernels/linear_tiles.cuh"

namespace openspec {
namespace cuda {
namespace {

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
  void (*kernel)(LinearParams, StreamGeometry) = nullptr;
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
  /// Of every warp's ring, with its barrier.
  int bytes_per_slot() const {
    return ring_bytes(slot_steps * kLinearStepBytes, 1) + barrier_bytes(1);
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
  constexpr int kMinSlots = 2;
  constexpr int kReservedBytes = 1 << 10;  // that a block takes besides its own
  const PackedLinear& weight = params.weight;
  const DeviceLimits& device = device_limits();
  const bool is_apart = params.partials != nullptr;
  const int num_steps = weight.num_inputs / kLinearStep;
  const int num_chains = weight.num_splits * kLinearChains;
  const int num_tiles = std::min(kMaxTiles, ceil_div(params.num_rows, 8));
  const int shared_limit = std::min(device.shared_per_block, device.shared_per_sm - kReservedBytes);

  StreamGeometry geometry = {};
  Variant variant;
  int other_bytes = 0;  // shared memory besides the ring
  if (params.num_rows <= 16 && num_steps % num_chains == 0 &&
      (is_apart || weight.num_splits == 1)) {
    variant = register_variant(num_tiles, num_steps / num_chains);
    other_bytes = variant.sum_bytes;
  }
  if (variant.kernel == nullptr) {
    // As many rows at once as fit; if not even eight do, all in phases.
    const int longest_chain = ceil_div(ceil_div(num_steps, weight.num_splits), kLinearChains);
    for (int tiles = num_tiles; tiles > 0 && variant.kernel == nullptr; --tiles) {
      variant = shared_variant(tiles);
      geometry.phase_steps = std::max(longest_chain, 1);
      other_bytes =
          variant.sum_bytes + kStreamWarps * activation_bytes(tiles, geometry.phase_steps);
      if (other_bytes + kMinSlots * variant.bytes_per_slot() > shared_limit) variant = {};
    }
    if (variant.kernel == nullptr) {
      variant = shared_variant(num_tiles);
      const int row_bytes =
          (shared_limit - variant.sum_bytes - kMinSlots * variant.bytes_per_slot()) /
          (kStreamWarps * 8 * num_tiles);
      const int fitting_steps = (row_bytes - activation_pitch(0)) / (2 * kLinearStep);
      geometry.phase_steps = fitting_steps / variant.slot_steps * variant.slot_steps;
      other_bytes =
          variant.sum_bytes + kStreamWarps * activation_bytes(num_tiles, geometry.phase_steps);
    }
  }
  if (variant.error != cudaSuccess) return variant.error;

  // Half of the memory: the next kernel's blocks are to start beside these.
  const int half_limit = std::min(shared_limit, device.shared_per_sm / 2 - kReservedBytes);
  const bool fits_half = other_bytes + kMinSlots * variant.bytes_per_slot() <= half_limit;
  const int ring_limit = (fits_half ? half_limit : shared_limit) - other_bytes;
  geometry.num_slots =
      std::max(kMinSlots, std::min(plan.ring_kib << 10, ring_limit) / variant.bytes_per_slot());
  const int shared_bytes = geometry.num_slots * variant.bytes_per_slot() + other_bytes;

  geometry.num_row_tiles = ceil_div(params.num_rows, 8 * variant.num_tiles);
  const int num_splits_apart = is_apart ? weight.num_splits : 1;
  const int num_blocks = device.num_sms * (fits_half ? plan.blocks_per_sm : 1);
  geometry.num_streams = std::clamp(num_blocks / (geometry.num_row_tiles * num_splits_apart), 1,
                                    weight.num_outputs / kLinearUnit);
  return launch(variant.kernel,
                dim3(geometry.num_row_tiles * num_splits_apart * geometry.num_streams),
                dim3(kStreamThreads), shared_bytes, stream, params, geometry);
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
