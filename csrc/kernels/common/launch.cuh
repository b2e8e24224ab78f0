#pragma once

/// Launching kernels so that the next one's set-up overlaps the end of the one before it.

#include <cuda_runtime.h>

#include <utility>

namespace openspec::cuda {

#ifdef __CUDACC__
/// Lets the next kernel of the stream start. At the very beginning of a kernel: a late trigger is
/// worse than none, for the next kernel's loads of weights then start late.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Waits until the kernel before this one is complete and its writes are visible. Every thread that
/// reads what an earlier kernel wrote, or writes at all, calls it first; and every kernel calls it,
/// so that completion carries over from kernel to kernel. A kernel that allows the next one only
/// after its wait is a *fence*: what comes after it starts when all that came before it is
/// complete, and may read what that wrote without a wait.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

/// Whether the current device overlaps kernels on request (compute capability 9.0 and newer).
inline bool overlaps_kernels() {
  static const bool does = [] {
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major >= 9;
  }();
  return does;
}

/// Multiprocessors of the current device; a process has devices of a kind.
inline int num_sms() {
  static const int count = [] {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device);
    return value;
  }();
  return count;
}

/// Launches `kernel`, which calls both functions above, in clusters of `cluster_size` blocks.
/// Returns a cudaError_t.
template <typename... Params, typename... Args>
int launch_clusters(int cluster_size, void (*kernel)(Params...), dim3 grid, dim3 block,
                    size_t shared_bytes, void* stream, Args&&... args) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (overlaps_kernels()) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster_size > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Args>(args))...);
}

/// Launches `kernel`, which calls both functions above, without clusters. Returns a cudaError_t.
template <typename... Params, typename... Args>
int launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
           Args&&... args) {
  return launch_clusters(1, kernel, grid, block, shared_bytes, stream, std::forward<Args>(args)...);
}

/// Raises a kernel's limit of dynamic shared memory; once per device, outside of graph capture too.
template <typename Kernel>
int allow_shared_bytes(Kernel* kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

/// Raises a kernel's limit of dynamic shared memory and gives it all of the memory as shared
/// memory, or blocks of another kernel would not start beside these.
template <typename Kernel>
int prepare_shared(Kernel* kernel, size_t bytes) {
  const int raised = allow_shared_bytes(kernel, bytes);
  if (raised != cudaSuccess) return raised;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

}  // namespace openspec::cuda
