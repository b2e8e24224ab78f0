#pragma once

/// What the tests of the CUDA ops share. They run on a machine with a GPU; elsewhere they say so
/// and pass nothing off as tested (exit status 77, which ctest reports as skipped).

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/kernel_testing.h"

namespace openspec::testing {

inline void check_cuda(int error, const char* what) {
  if (error != cudaSuccess) {
    throw check_test::Failure(std::string(what) + ": " +
                              cudaGetErrorString(static_cast<cudaError_t>(error)));
  }
}
#define CHECK_CUDA(call) ::openspec::testing::check_cuda((call), #call)

/// Ends the process as skipped where there is no device; define one at namespace scope.
struct NeedsDevice {
  NeedsDevice() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      std::printf("skipped: no CUDA device\n");
      std::exit(77);
    }
  }
};

/// Device memory that begins as 0xff bytes (NaN), with a guard behind it that must stay so.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) {
    CHECK_CUDA(cudaMalloc(&data_, bytes + kGuard));
    poison();
  }
  template <typename T>
  explicit DeviceBuffer(const std::vector<T>& values) : DeviceBuffer(values.size() * sizeof(T)) {
    upload(values);
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }
  void poison() { CHECK_CUDA(cudaMemset(data_, 0xff, bytes_ + kGuard)); }

  template <typename T>
  void upload(const std::vector<T>& values) {
    CHECK_CUDA(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  /// Waits for the device.
  template <typename T>
  std::vector<T> download() const {
    std::vector<T> values(bytes_ / sizeof(T));
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemcpy(values.data(), data_, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  bool guard_is_whole() const {
    std::vector<unsigned char> guard(kGuard);
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemcpy(guard.data(), static_cast<char*>(data_) + bytes_, kGuard,
                          cudaMemcpyDeviceToHost));
    for (unsigned char byte : guard) {
      if (byte != 0xff) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 256;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

inline std::vector<uint16_t> to_bf16(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  for (size_t i = 0; i < values.size(); ++i) bits[i] = to_bf16(values[i]);
  return bits;
}

}  // namespace openspec::testing
