#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/common/per_device.h"
#include "kernels/experts/experts.h"
#include "kernels/experts/stream_experts.cuh"
#include "kernels/linear/stream_launch.cuh"

namespace openspec {
namespace {

using namespace cuda;

constexpr int kColumns = 8;  // of a thread
constexpr int kMaxThreads = 512;

/// A block for each row: its experts' rows, added in their order.
__global__ void __launch_bounds__(kMaxThreads)
    combine_kernel(const __nv_bfloat16* down, const float* weight, __nv_bfloat16* out, int width,
                   int top_k) {
  allow_next_kernel();
  const int64_t row = blockIdx.x;
  wait_for_previous_kernel();
  for (int column = threadIdx.x * kColumns; column < width; column += blockDim.x * kColumns) {
    FloatPack<kColumns> sum = {};
    for (int slot = 0; slot < top_k; ++slot) {
      const int64_t pair = row * top_k + slot;
      const float factor = weight[pair];
      const auto term = to_floats(load_pack<Bf16Pack<kColumns>>(down + pair * width + column));
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum.x[c] = __fmaf_rn(factor, term.x[c], sum.x[c]);
    }
    store_pack(out + row * width + column, to_bf16(sum));
  }
}

/// Where things lie in the workspace, in bytes.
struct Places {
  size_t first = 0, pair, inner, down, total;

  Places(size_t num_pairs, const LinearStack& matrices)
      : Places(num_pairs, static_cast<size_t>(matrices.first.num_outputs),
               static_cast<size_t>(matrices.first.num_inputs),
               static_cast<size_t>(matrices.count)) {}
  Places(size_t num_pairs, size_t hidden_size, size_t intermediate_size, size_t num_experts) {
    const auto area = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
    pair = first + area((num_experts + 1) * sizeof(int32_t));
    inner = pair + area(num_pairs * sizeof(int32_t));
    down = inner + area(num_pairs * intermediate_size * sizeof(__nv_bfloat16));
    total = down + area(num_pairs * hidden_size * sizeof(__nv_bfloat16));
  }
};

template <WeightForm kForm, int kTiles, bool kIsGateUp>
int launch_products(ExpertsJob job, void* stream) {
  constexpr auto kKernel = experts_kernel<kForm, kTiles, kIsGateUp>;
  const int error =
      per_device([] { return prepare_shared(kKernel, device_limits().shared_per_block); });
  if (error != cudaSuccess) return error;
  constexpr int kMaxSlots = 4, kMinSlots = 2;  // longer rings hold up the activations
  constexpr int kSlotBytes = WeightRing<kForm>::kSlotBytes;
  const PackedLinear& shape = job.weights.first;
  const int others =
      SumLayout<kTiles>::kBytes + (job.weights.count + 1) * static_cast<int>(sizeof(int32_t));
  const auto bytes = [&] {
    return others + ring_bytes(kSlotBytes, job.num_slots) + barrier_bytes(job.num_slots) +
           kStreamWarps * activation_bytes(kTiles, job.phase_steps);
  };
  job.num_slots = is_e4m3(kForm) ? 2 * kMaxSlots : kMaxSlots;
  job.phase_steps = std::max(1, ceil_div(longest_split(shape), kLinearChains));
  while (job.num_slots > kMinSlots && bytes() > shared_limit()) --job.num_slots;
  for (job.phase_steps = ceil_div(job.phase_steps, kSlotSteps) * kSlotSteps;
       job.phase_steps > kSlotSteps && bytes() > shared_limit();) {
    job.phase_steps -= kSlotSteps;
  }
  return launch(kKernel, dim3(num_sms()), dim3(kStreamThreads), bytes(), stream, job);
}

template <WeightForm kForm, bool kIsGateUp>
int launch_products(const ExpertsJob& job, int num_tiles, void* stream) {
  switch (num_tiles) {
    case 1:
      return launch_products<kForm, 1, kIsGateUp>(job, stream);
    case 2:
      return launch_products<kForm, 2, kIsGateUp>(job, stream);
    default:
      return launch_products<kForm, 3, kIsGateUp>(job, stream);
  }
}

template <bool kIsGateUp>
int launch_products(const ExpertsJob& job, int num_tiles, void* stream) {
  return with_form(job.weights.first, [&](auto form) {
    return launch_products<decltype(form)::value, kIsGateUp>(job, num_tiles, stream);
  });
}

/// It decides speed alone: tiles that hold about what an expert gets of so many rows.
int tiles_for(int num_rows) { return num_rows <= 16 ? 1 : num_rows <= 64 ? 2 : 3; }

}  // namespace

size_t experts_workspace_bytes_cuda(int max_num_rows, int hidden_size, int intermediate_size,
                                    int num_experts, int top_k) {
  return Places(static_cast<size_t>(max_num_rows) * static_cast<size_t>(top_k),
                static_cast<size_t>(hidden_size), static_cast<size_t>(intermediate_size),
                static_cast<size_t>(num_experts))
      .total;
}

int experts_cuda(const ExpertsParams& params, void* stream) {
  const PackedLinear& down = params.down.first;
  if (params.dtype != DType::kBF16 || params.down.count > kMaxExperts ||
      !are_aligned(params.x, params.out, params.workspace)) {
    return cudaErrorInvalidValue;
  }
  const int num_pairs = params.num_rows * params.top_k, width = down.num_outputs;
  const Places places(static_cast<size_t>(num_pairs), params.down);
  auto* const base = static_cast<uint8_t*>(params.workspace);
  const SortedPairs pairs = {reinterpret_cast<int32_t*>(base + places.first),
                             reinterpret_cast<int32_t*>(base + places.pair)};
  auto* const inner = reinterpret_cast<__nv_bfloat16*>(base + places.inner);
  auto* const rows = reinterpret_cast<__nv_bfloat16*>(base + places.down);
  int error = launch(sort_pairs_kernel, dim3(params.down.count), dim3(kSortThreads), 0, stream,
                     params.expert, num_pairs, pairs);
  if (error != cudaSuccess) return error;
  const int num_tiles = tiles_for(params.num_rows);
  ExpertsJob job = {.weights = params.gate_up,
                    .x = static_cast<const __nv_bfloat16*>(params.x),
                    .out = inner,
                    .pairs = pairs,
                    .top_k = params.top_k,
                    .chunk_units = params.num_rows == 1 ? 2 : 4};
  error = launch_products<true>(job, num_tiles, stream);
  if (error != cudaSuccess) return error;
  job.weights = params.down;
  job.x = inner;
  job.out = rows;
  job.chunk_units = params.num_rows == 1 ? 8 : 4;
  error = launch_products<false>(job, num_tiles, stream);
  if (error != cudaSuccess) return error;
  const int num_threads = std::min(kMaxThreads, (width / kColumns + 31) / 32 * 32);
  return launch(combine_kernel, dim3(params.num_rows), dim3(num_threads), 0, stream, rows,
                params.weight, static_cast<__nv_bfloat16*>(params.out), width, params.top_k);
}

}  // namespace openspec
