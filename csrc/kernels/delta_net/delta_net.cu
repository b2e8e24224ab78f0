#include "kernels/common/device.h"
#include "kernels/common/packs.cuh"
#include "kernels/common/per_device.h"
#include "kernels/delta_net/prompt.cuh"
#include "kernels/delta_net/rows.cuh"
#include "kernels/delta_net/step.cuh"

namespace openspec {

namespace {

using namespace gated_delta;
using Kernel = void (*)(DeltaNetParams, Workspace, int);

/// A kernel with its launch; null where a device has too little shared memory.
struct Launch {
  Kernel kernel = nullptr;
  int num_threads = 0;
  size_t shared_bytes = 0;
  int capacity = 0;  // rows of a step, columns of a prompt's CTA

  bool prepare(size_t most_bytes) {
    if (shared_bytes > most_bytes) kernel = nullptr;
    return kernel != nullptr && cuda::prepare_shared(kernel, shared_bytes) == cudaSuccess;
  }
};

template <int kGroups>
Launch step_launch() {
  return {run_steps<kGroups>, kStepThreads, sizeof(StepShared<kGroups>), 4 * kGroups};
}
template <int kColumns, int kMinBlocks>
Launch prompt_launch() {
  return {run_prompts<kColumns, kMinBlocks>, PromptPlan<kColumns>::kThreads,
          sizeof(PromptShared<kColumns>), kColumns};
}

/// What the current device runs.
struct Launches {
  Launch steps[3] = {step_launch<1>(), step_launch<2>(), step_launch<4>()};
  Launch prompts = prompt_launch<64, 1>();
  bool are_ready = true;

  Launches() {
    int device = 0, most = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const auto most_bytes = static_cast<size_t>(most);
    for (Launch& launch : steps) launch.prepare(most_bytes);
    if (!prompts.prepare(most_bytes)) {
      prompts = prompt_launch<32, 2>();
      are_ready = prompts.prepare(most_bytes);
    }
    are_ready = are_ready && steps[0].kernel != nullptr;
  }

  /// For spans of `num_rows` rows; the largest there is, where all have too little room.
  const Launch& step_for(int num_rows) const {
    const Launch* best = nullptr;
    for (const Launch& launch : steps) {
      if (launch.kernel == nullptr) break;
      best = &launch;
      if (launch.capacity >= num_rows) break;
    }
    return *best;
  }
};

size_t align(size_t bytes) { return (bytes + 255) / 256 * 256; }

bool is_legal(const DeltaNetParams& params) {
  const DeltaShape& shape = params.shape;
  return params.dtype == DType::kBF16 && shape.num_k_heads > 0 && shape.num_v_heads > 0 &&
         shape.num_v_heads % shape.num_k_heads == 0 && params.max_step_rows >= 1 &&
         params.max_step_rows <= kMaxDeltaStepRows && params.records.ring_size % kDeltaBlock == 0 &&
         params.records.ring_size >= 3 * kDeltaBlock &&
         params.conv_rows.ring_size >= params.max_step_rows + kDeltaTaps - 1 &&
         params.qkv_stride % 8 == 0 && params.z_stride % 8 == 0 &&
         (params.record_offset | params.conv_offset | params.records.record_bytes |
          params.conv_rows.record_bytes | params.states.page_stride | params.states.slice_stride) %
                 16 ==
             0 &&
         cuda::are_aligned(params.qkv, params.z, params.out, params.conv_weight, params.norm_weight,
                           params.records.data, params.conv_rows.data, params.states.data,
                           params.workspace);
}

}  // namespace

size_t delta_net_workspace_bytes_cuda(const DeltaShape& shape, int num_rows) {
  const auto rows = static_cast<size_t>(num_rows), heads = static_cast<size_t>(shape.num_v_heads);
  return align(rows * static_cast<size_t>(shape.conv_width()) * 2) +
         2 * align(rows * heads * sizeof(float2));
}

int delta_net_cuda(const DeltaNetParams& params, void* stream) {
  if (!is_legal(params)) return cudaErrorInvalidValue;
  if (params.rows.num_rows == 0 || params.rows.num_spans == 0) return cudaSuccess;
  const Launches launches = cuda::per_device([] { return Launches(); });
  if (!launches.are_ready) return cudaErrorNotSupported;
  const DeltaShape& shape = params.shape;
  const auto num_rows = static_cast<unsigned>(params.rows.num_rows);
  const auto num_spans = static_cast<unsigned>(params.rows.num_spans);
  const auto num_heads = static_cast<unsigned>(shape.num_v_heads);
  auto* memory = static_cast<std::byte*>(params.workspace);
  const size_t x_bytes = align(size_t{num_rows} * static_cast<size_t>(shape.conv_width()) * 2);
  const size_t gate_bytes = align(size_t{num_rows} * num_heads * sizeof(float2));
  const Workspace workspace = {reinterpret_cast<uint16_t*>(memory),
                               reinterpret_cast<float*>(memory + x_bytes),
                               reinterpret_cast<float2*>(memory + x_bytes + gate_bytes)};

  const Launch& steps = launches.step_for(params.max_step_rows);
  const int step_rows =
      params.max_step_rows < steps.capacity ? params.max_step_rows : steps.capacity;
  constexpr int kConvBlock = kConvThreads * kConvColumns;
  const auto conv_blocks =
      static_cast<unsigned>((shape.conv_width() + kConvBlock - 1) / kConvBlock);
  int error = cuda::launch(convolve, dim3(conv_blocks + 1, num_rows), dim3(kConvThreads), 0, stream,
                           params, workspace, step_rows);
  if (error != cudaSuccess) return error;
  error = cuda::launch(steps.kernel, dim3(num_heads, num_spans),
                       dim3(static_cast<unsigned>(steps.num_threads)), steps.shared_bytes, stream,
                       params, workspace, step_rows);
  if (error != cudaSuccess || (!params.may_have_prompts && step_rows == params.max_step_rows)) {
    return error;
  }
  const Launch& prompts = launches.prompts;
  const auto parts = static_cast<unsigned>(kDeltaHeadDim / prompts.capacity);
  error = cuda::launch(prompts.kernel, dim3(parts, num_heads, num_spans),
                       dim3(static_cast<unsigned>(prompts.num_threads)), prompts.shared_bytes,
                       stream, params, workspace, step_rows);
  if (error != cudaSuccess) return error;
  return cuda::launch(finish, dim3(num_rows, (num_heads + kFinishWarps - 1) / kFinishWarps),
                      dim3(kFinishWarps * 32), 0, stream, params, workspace, step_rows);
}

}  // namespace openspec
