#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/common/launch.cuh"
#include "kernels/common/per_device.h"
#include "kernels/linear/activations.cuh"
#include "kernels/linear/linear.h"
#include "kernels/linear/stream_fixed.cuh"
#include "kernels/linear/tiles.cuh"

namespace openspec {
namespace cuda {
namespace {

struct DeviceLimits {
  int shared_per_sm = 0;
  int shared_per_block = 0;
};

const DeviceLimits& device_limits() {
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

template <int kTiles, int kSteps, int kRecords, bool kHasBias, typename Geometry>
Variant<Geometry> fixed_variant() {
  constexpr auto kKernel = fixed_kernel<kTiles, kSteps, kRecords, kHasBias, Geometry>;
  const int error =
      per_device([] { return prepare_shared(kKernel, device_limits().shared_per_block); });
  return {kKernel, kTiles, fixed_shared_bytes<kTiles, kSteps, kRecords>(), 0, 0, error};
}

/// Where a matrix of the models has chains of so many steps.
template <typename GeometryOf>
struct Without {
  using Geometry = GeometryOf;
  template <int kTiles, int kSteps>
  static Variant<Geometry> variant(bool is_wide) {
    constexpr int kUsual = num_records<kTiles, kSteps>(false);
    constexpr int kWide = num_records<kTiles, kSteps>(true);
    return is_wide ? fixed_variant<kTiles, kSteps, kWide, false, Geometry>()
                   : fixed_variant<kTiles, kSteps, kUsual, false, Geometry>();
  }
};
struct WithBias {  // which is not split
  using Geometry = StreamGeometry;
  template <int kTiles, int kSteps>
  static Variant<Geometry> variant(bool) {
    return fixed_variant<kTiles, kSteps, num_records<kTiles, kSteps>(false), true, Geometry>();
  }
};

template <typename Bias, int kTiles, int... kSteps>
Variant<typename Bias::Geometry> variant_of(int num_steps, bool is_wide) {
  Variant<typename Bias::Geometry> found;
  (void)((num_steps == kSteps && (found = Bias::template variant<kTiles, kSteps>(is_wide), true)) ||
         ...);
  return found;
}

/// For the chains of the models that are read and of their draft models, as far as their
/// activations fit into registers; else none.
template <typename Geometry>
Variant<Geometry> fixed_variant(int num_tiles, int num_steps, bool is_wide) {
  using Without = Without<Geometry>;
  switch (num_tiles) {
    case 1:
      return variant_of<Without, 1, 4, 5, 6, 7, 8, 12, 14, 15, 16, 17, 19, 20, 24, 25, 27, 28, 30,
                        32, 34, 40>(num_steps, is_wide);
    case 2:
      return variant_of<Without, 2, 4, 5, 6, 7, 8, 12, 14, 15, 16, 17, 19, 20, 24, 25, 27, 28, 32,
                        40>(num_steps, is_wide);
    case 3:
      return variant_of<Without, 3, 4, 5, 6, 7, 8, 12, 14, 15, 16, 17, 19, 20>(num_steps, is_wide);
    case 4:
      return variant_of<Without, 4, 4, 5, 6, 8, 15, 16, 17, 19, 20>(num_steps, is_wide);
  }
  return {};
}
/// As dispatched, with the biases of q, k and v of Qwen2.5.
Variant<StreamGeometry> biased_variant(int num_tiles, int num_steps) {
  switch (num_tiles) {
    case 1:
      return variant_of<WithBias, 1, 7, 12, 16, 28, 40>(num_steps, false);
    case 2:
      return variant_of<WithBias, 2, 7, 12, 16, 28, 40>(num_steps, false);
    case 3:
      return variant_of<WithBias, 3, 7, 12, 16>(num_steps, false);
  }
  return {};
}

template <int kTiles, typename Geometry>
Variant<Geometry> shared_variant() {
  constexpr auto kKernel = stream_kernel<kTiles, Geometry>;
  const int error =
      per_device([] { return prepare_shared(kKernel, device_limits().shared_per_block); });
  return {kKernel,
          kTiles,
          SumLayout<kTiles>::kBytes,
          kSlotSteps,
          ring_bytes(WeightRing::kSlotBytes, 1) + barrier_bytes(1),
          error};
}

template <typename Geometry>
Variant<Geometry> shared_variant(int num_tiles) {
  switch (num_tiles) {
    case 1:
      return shared_variant<1, Geometry>();
    case 2:
      return shared_variant<2, Geometry>();
    case 3:
      return shared_variant<3, Geometry>();
    default:
      return shared_variant<4, Geometry>();
  }
}

/// Steps of the longest split that is here.
int longest_split(const PackedLinear& weight) {
  const SplitRange splits = weight.own_splits();
  int longest = 0;
  for (int split = splits.begin; split < splits.end; ++split) {
    longest = std::max(longest, split_steps(weight, split).size());
  }
  return longest;
}

constexpr int kReservedBytes = 1 << 10;  // of shared memory, that a block takes besides its own

/// Shared memory that a block can have.
int shared_limit() {
  return std::min(device_limits().shared_per_block, device_limits().shared_per_sm - kReservedBytes);
}

/// The kernel with activations in registers, if it does this: chains are all as long, and a block
/// has one split.
template <typename Geometry>
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
  Variant<Geometry> found;
  if (weight.bias == nullptr) {
    found = fixed_variant<Geometry>(num_tiles, chain_steps, is_wide);
  } else if constexpr (!kSends<Geometry>) {  // only sums without a bias are sent
    found = biased_variant(num_tiles, chain_steps);
  }
  return found.shared_bytes <= shared_limit() ? found : Variant<Geometry>{};
}

template <typename Geometry>
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
  Variant<Geometry> variant = fixed_variant<Geometry>(params);
  if (variant.kernel == nullptr) {
    // As many rows at once as fit; if not even eight do, all in phases.
    const int longest_chain = ceil_div(longest_split(weight), kLinearChains);
    for (int tiles = num_tiles; tiles > 0 && variant.kernel == nullptr; --tiles) {
      variant = shared_variant<Geometry>(tiles);
      geometry.phase_steps = std::max(longest_chain, 1);
      variant.shared_bytes += kStreamWarps * activation_bytes(tiles, geometry.phase_steps);
      if (variant.shared_bytes + kMinSlots * variant.bytes_per_slot > shared_limit()) variant = {};
    }
    if (variant.kernel == nullptr) {
      variant = shared_variant<Geometry>(num_tiles);
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
  geometry.num_streams = std::clamp(num_blocks / (geometry.num_row_tiles * num_splits_apart), 1,
                                    weight.num_outputs / kLinearUnit);
  return launch(variant.kernel,
                dim3(geometry.num_row_tiles * num_splits_apart * geometry.num_streams),
                dim3(kStreamThreads), shared_bytes, stream, params, geometry);
}

}  // namespace

bool linear_stream_has_registers(const LinearParams& params) {
  return fixed_variant<StreamGeometry>(params).kernel != nullptr;
}

int linear_stream(const LinearParams& params, void* stream, const StreamPlan& plan) {
  if (params.exchange == nullptr) return launch_stream(params, StreamGeometry{}, stream, plan);
  const PackedLinear& weight = params.weight;
  const ExchangeGeometry geometry = {
      {}, outbox_of(*params.exchange, weight.num_splits, params.num_rows, weight.num_outputs)};
  return launch_stream(params, geometry, stream, plan);
}

}  // namespace cuda

namespace {

/// Whether sums that are sent are those of whole rows, and a round of them fits.
bool has_legal_exchange(const LinearParams& params) {
  if (params.exchange == nullptr) return true;
  const PackedLinear& weight = params.weight;
  const Exchange& exchange = *params.exchange;
  if (params.partials != nullptr || !weight.has_all_outputs() ||
      !is_legal_round(exchange, weight.num_splits, params.num_rows, weight.num_outputs)) {
    return false;
  }
  // The first rank has those that are added before others'.
  const SplitRange own = weight.own_splits();
  const int first_sum =
      round_form(exchange.num_ranks, weight.num_splits, params.num_rows, weight.num_outputs)
          .first_sum;
  return first_sum == 0 ||
         (exchange.rank == 0 ? own.begin == 0 && own.end == first_sum + 1 : own.begin > first_sum);
}

int linear_bf16(const LinearParams& params, void* stream) {
  // Rows up to which nothing is faster than streaming with the activations in registers. For a
  // tile more there are registers too, but then no other block fits beside these.
  constexpr int kStreamRows = 24;
  const bool streams = params.num_rows <= kStreamRows && cuda::linear_stream_has_registers(params);
  if (!streams && cuda::linear_wgmma_takes(params.weight, params.num_rows)) {
    return cuda::linear_wgmma(params, stream);
  }
  return cuda::linear_stream(params, stream);
}

}  // namespace

int linear_cuda(const LinearParams& given, void* stream) {
  if (!has_legal_exchange(given)) return cudaErrorInvalidValue;
  LinearParams params = given;
  if (given.exchange != nullptr) params.partials = cuda::own_inbox(*given.exchange).words;
  const PackedLinear& weight = params.weight;
  const bool is_swiglu = weight.epilogue == LinearEpilogue::kSwiGlu;
  const auto row_bytes = linear_row_stride(params) * int64_t(dtype_bytes(params.out_dtype));
  if (weight.layout != LinearLayout::kTiles || params.dtype != DType::kBF16 ||
      weight.num_outputs % kLinearUnit != 0 || weight.num_inputs % cuda::kLinearStep != 0 ||
      !has_legal_bias(params) || !has_legal_shard(weight) || !has_legal_output(params) ||
      row_bytes % 16 != 0 || (is_swiglu && params.out_dtype != DType::kBF16)) {
    return cudaErrorInvalidValue;
  }
  if (params.num_rows == 0 || weight.num_outputs == 0) return cudaSuccess;
  switch (weight.format) {
    case MatrixFormat::kBF16:
      return linear_bf16(params, stream);
    case MatrixFormat::kE4M3:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace openspec
