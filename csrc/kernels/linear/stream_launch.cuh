#pragma once

/// Which instance of a streaming kernel a product gets, and how it occupies the device. Included
/// where the instances of a form are made.

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/common/launch.cuh"
#include "kernels/common/per_device.h"
#include "kernels/linear/activations.cuh"
#include "kernels/linear/linear.h"
#include "kernels/linear/stream_fixed.cuh"
#include "kernels/linear/tiles.cuh"

namespace openspec::cuda {

struct DeviceLimits {
  int shared_per_sm = 0;
  int shared_per_block = 0;
};

inline const DeviceLimits& device_limits() {
  static const DeviceLimits limits = [] {
    int device = 0;
    DeviceLimits found;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&found.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                           device);
    cudaDeviceGetAttribute(&found.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                           device);
    return found;
  }();
  return limits;
}

/// One instance of a kernel.
template <typename Geometry>
struct Variant {
  void (*kernel)(LinearParams, Geometry) = nullptr;
  int num_tiles = 0;
  int shared_bytes = 0;     // without the ring, where that is not fixed
  int slot_steps = 0;       // 0: the ring is fixed
  int bytes_per_slot = 0;   // of every warp's ring, with its barrier
  int error = cudaSuccess;  // of preparing it
};

template <WeightForm kForm, int kTiles, int kSteps, int kRecords, bool kHasBias, typename Geometry>
Variant<Geometry> fixed_variant() {
  constexpr auto kKernel = fixed_kernel<kForm, kTiles, kSteps, kRecords, kHasBias, Geometry>;
  const int error =
      per_device([] { return prepare_shared(kKernel, device_limits().shared_per_block); });
  return {kKernel, kTiles, fixed_shared_bytes<kForm, kTiles, kSteps, kRecords>(), 0, 0, error};
}

template <int... kNumbers>
constexpr bool is_one_of(int number) {
  return ((number == kNumbers) || ...);
}

/// Whether chains of so many steps have a kernel. The sums of splits, of o and down, may be sent;
/// a matrix without splits may have a bias, in bf16 q, k and v of Qwen2.5. Draft models, whose fc
/// has other chains, are of bf16.
template <WeightForm kForm, bool kHasBias, typename Geometry>
constexpr bool has_kernel(int num_steps) {
  if (kSends<Geometry> || (is_e4m3(kForm) && !kHasBias)) {
    return is_one_of<4, 5, 6, 7, 8, 16, 17, 19, 24, 25, 27, 28>(num_steps);
  }
  if (is_e4m3(kForm)) return is_one_of<7, 8, 12, 16, 20, 24, 28, 32, 40>(num_steps);
  return !kHasBias || is_one_of<7, 12, 16, 28, 40>(num_steps);
}

/// Of `kSteps` the variant whose chains have `num_steps` steps, if there is one. kHasBias: not
/// split.
template <WeightForm kForm, bool kHasBias, typename Geometry, int kTiles, int... kSteps>
Variant<Geometry> variant_of(int num_steps, bool is_wide) {
  Variant<Geometry> found;
  const auto take = [&](auto steps) {
    constexpr int kOf = decltype(steps)::value;
    constexpr int kUsual = num_records<kForm, kTiles, kOf>(false);
    constexpr int kWide = num_records<kForm, kTiles, kOf>(!kHasBias);
    if constexpr (has_kernel<kForm, kHasBias, Geometry>(kOf)) {
      found = is_wide ? fixed_variant<kForm, kTiles, kOf, kWide, kHasBias, Geometry>()
                      : fixed_variant<kForm, kTiles, kOf, kUsual, kHasBias, Geometry>();
    }
    return true;
  };
  (void)((num_steps == kSteps && take(std::integral_constant<int, kSteps>{})) || ...);
  return found;
}

/// For the chains of the models that are read and of their draft models, as far as their
/// activations fit into registers; else none.
template <WeightForm kForm, bool kHasBias, typename Geometry>
Variant<Geometry> fixed_variant(int num_tiles, int num_steps, bool is_wide) {
  switch (num_tiles) {
    case 1:
      return variant_of<kForm, kHasBias, Geometry, 1, 4, 5, 6, 7, 8, 12, 14, 15, 16, 17, 19, 20, 24,
                        25, 27, 28, 30, 32, 34, 40>(num_steps, is_wide);
    case 2:
      return variant_of<kForm, kHasBias, Geometry, 2, 4, 5, 6, 7, 8, 12, 14, 15, 16, 17, 19, 20, 24,
                        25, 27, 28, 32, 40>(num_steps, is_wide);
    case 3:
      return variant_of<kForm, kHasBias, Geometry, 3, 4, 5, 6, 7, 8, 12, 14, 15, 16, 17, 19, 20>(
          num_steps, is_wide);
    case 4:
      if constexpr (!is_e4m3(kForm)) {
        return variant_of<kForm, kHasBias, Geometry, 4, 4, 5, 6, 8, 15, 16, 17, 19, 20>(num_steps,
                                                                                        is_wide);
      }
  }
  return {};
}

template <WeightForm kForm, int kTiles, typename Geometry>
Variant<Geometry> shared_variant() {
  constexpr auto kKernel = stream_kernel<kForm, kTiles, Geometry>;
  const int error =
      per_device([] { return prepare_shared(kKernel, device_limits().shared_per_block); });
  return {kKernel,
          kTiles,
          SumLayout<kTiles>::kBytes,
          kSlotSteps,
          ring_bytes(WeightRing<kForm>::kSlotBytes, 1) + barrier_bytes(1),
          error};
}

template <WeightForm kForm, typename Geometry>
Variant<Geometry> shared_variant(int num_tiles) {
  switch (num_tiles) {
    case 1:
      return shared_variant<kForm, 1, Geometry>();
    case 2:
      return shared_variant<kForm, 2, Geometry>();
    case 3:
      return shared_variant<kForm, 3, Geometry>();
    default:
      return shared_variant<kForm, 4, Geometry>();
  }
}

/// Steps of the longest split that is here.
inline int longest_split(const PackedLinear& weight) {
  const SplitRange splits = weight.own_splits();
  int longest = 0;
  for (int split = splits.begin; split < splits.end; ++split) {
    longest = std::max(longest, split_steps(weight, split).size());
  }
  return longest;
}

inline constexpr int kReservedBytes =
    1 << 10;  // of shared memory, that a block takes besides its own

/// Shared memory that a block can have.
inline int shared_limit() {
  return std::min(device_limits().shared_per_block, device_limits().shared_per_sm - kReservedBytes);
}

/// The kernel with activations in registers, if it does this: chains are all as long, and a block
/// has one split.
template <WeightForm kForm, typename Geometry>
Variant<Geometry> fixed_variant(const LinearParams& params) {
  const PackedLinear& weight = params.weight;
  const SplitRange splits = weight.own_splits();
  const int split_size = split_steps(weight, splits.begin).size();
  if (params.partials == nullptr && splits.size() > 1) return {};
  if (split_size % kLinearChains != 0 || longest_split(weight) != split_size ||
      split_size * splits.size() * kLinearStep != weight.num_inputs) {
    return {};
  }
  const bool is_wide = params.partials != nullptr &&
                       device_limits().shared_per_sm - 2 * kReservedBytes >= kWideSharedBytes;
  const int num_tiles = ceil_div(params.num_rows, 8), chain_steps = split_size / kLinearChains;
  if (has_blocks(kForm) && scale_phase(weight) % chain_grain(chain_steps) != 0) return {};
  const bool may_have_bias = is_e4m3(kForm) ? params.partials == nullptr : weight.bias != nullptr;
  Variant<Geometry> found;
  if (!may_have_bias) {
    found = fixed_variant<kForm, false, Geometry>(num_tiles, chain_steps, is_wide);
  } else if constexpr (!kSends<Geometry>) {
    found = fixed_variant<kForm, true, Geometry>(num_tiles, chain_steps, is_wide);
  }
  return found.shared_bytes <= shared_limit() ? found : Variant<Geometry>{};
}

template <WeightForm kForm, typename Geometry>
int launch_stream(const LinearParams& params, Geometry geometry, void* stream,
                  const StreamPlan& plan) {
  constexpr int kMaxTiles = 4;
  constexpr int kMinSlots = 2;
  const PackedLinear& weight = params.weight;
  const DeviceLimits& device = device_limits();
  const bool is_apart = are_apart(params, geometry);
  const int num_tiles = std::min(kMaxTiles, ceil_div(params.num_rows, 8));

  geometry.splits = weight.own_splits();
  geometry.row_stride = linear_row_stride(params);
  Variant<Geometry> variant = fixed_variant<kForm, Geometry>(params);
  if (variant.kernel == nullptr) {
    // As many rows at once as fit; if not even eight do, all in phases.
    const int longest_chain = ceil_div(longest_split(weight), kLinearChains);
    for (int tiles = num_tiles; tiles > 0 && variant.kernel == nullptr; --tiles) {
      variant = shared_variant<kForm, Geometry>(tiles);
      geometry.phase_steps = std::max(longest_chain, 1);
      variant.shared_bytes += kStreamWarps * activation_bytes(tiles, geometry.phase_steps);
      if (variant.shared_bytes + kMinSlots * variant.bytes_per_slot > shared_limit()) variant = {};
    }
    if (variant.kernel == nullptr) {
      variant = shared_variant<kForm, Geometry>(num_tiles);
      const int row_bytes =
          (shared_limit() - variant.shared_bytes - kMinSlots * variant.bytes_per_slot) /
          (kStreamWarps * 8 * num_tiles);
      const int fitting_steps = (row_bytes - activation_pitch(0)) / (2 * kLinearStep);
      geometry.phase_steps = fitting_steps / variant.slot_steps * variant.slot_steps;
      variant.shared_bytes += kStreamWarps * activation_bytes(num_tiles, geometry.phase_steps);
    }
  }
  if (variant.error != cudaSuccess) return variant.error;

  // Half of the memory: the next kernel's blocks are to start beside these.
  const int half_limit = std::min(shared_limit(), device.shared_per_sm / 2 - kReservedBytes);
  const int min_bytes = variant.shared_bytes + kMinSlots * variant.bytes_per_slot;
  const bool fits_half = min_bytes <= half_limit;
  int shared_bytes = variant.shared_bytes;
  if (variant.bytes_per_slot > 0) {
    const int ring_limit = (fits_half ? half_limit : shared_limit()) - variant.shared_bytes;
    geometry.num_slots =
        std::max(kMinSlots, std::min(plan.ring_kib << 10, ring_limit) / variant.bytes_per_slot);
    shared_bytes += geometry.num_slots * variant.bytes_per_slot;
  }

  // Matrices whose splits stay apart take more than half of an SM's shared memory, the others less.
  // In a model they alternate, so wherever a block of one kind lives, another of its kind does not
  // fit and one of the next kernel does: every kernel gets one block on every SM, and its weights
  // are under way before the kernel ahead of it is done. Where two blocks of one matrix share an SM
  // another SM has none, and a step takes a quarter longer.
  const int more_than_half = device.shared_per_sm / 2 - kReservedBytes + 128;
  if (is_apart && fits_half && more_than_half <= device.shared_per_block) {
    shared_bytes = std::max(shared_bytes, more_than_half);
  }

  geometry.num_row_tiles = ceil_div(params.num_rows, 8 * variant.num_tiles);
  const int num_splits_apart = is_apart ? geometry.splits.size() : 1;
  const int num_blocks = num_sms() * (fits_half ? plan.blocks_per_sm : 1);
  geometry.num_streams = std::clamp(num_blocks / geometry.num_row_tiles, num_splits_apart,
                                    num_splits_apart * (weight.num_outputs / kLinearUnit));
  return launch(variant.kernel, dim3(geometry.num_row_tiles * geometry.num_streams),
                dim3(kStreamThreads), shared_bytes, stream, params, geometry);
}

template <WeightForm kForm>
bool stream_has_registers(const LinearParams& params) {
  return fixed_variant<kForm, StreamGeometry>(params).kernel != nullptr;
}

template <WeightForm kForm>
int stream_as(const LinearParams& params, void* stream, const StreamPlan& plan) {
  if (params.exchange == nullptr) {
    return launch_stream<kForm>(params, StreamGeometry{}, stream, plan);
  }
  const PackedLinear& weight = params.weight;
  const ExchangeGeometry geometry = {
      {}, outbox_of(*params.exchange, weight.num_splits, params.num_rows, weight.num_outputs)};
  return launch_stream<kForm>(params, geometry, stream, plan);
}

}  // namespace openspec::cuda
