#pragma once

/// What kernels for Hopper's own instructions have in common on the host: maps for tensor copies,
/// and whether the kernels are there.

#include <cuda.h>
#include <cuda_runtime.h>

namespace openspec::cuda {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// cuTensorMapEncodeTiled from the driver, without linking to it; null where it has none.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                               12000, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) entry = nullptr;
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return function;
}

/// Whether a kernel made of sm_90a's instructions is there and the current device runs it. A build
/// for other architectures, sm_90 among them, has it without a body, hence without the barriers in
/// static shared memory that all of these have.
template <typename Kernel>
bool has_hopper_kernel(Kernel* kernel) {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (major != 9 || minor != 0) return false;
  cudaFuncAttributes attributes = {};
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return attributes.sharedSizeBytes > 0 && encode_tiled() != nullptr;
}

}  // namespace openspec::cuda
