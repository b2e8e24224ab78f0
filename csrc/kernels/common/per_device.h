#pragma once

#include <cuda_runtime.h>

#include <array>
#include <mutex>
#include <optional>

namespace openspec::cuda {

/// What `make`, a lambda, returns on the current device; it is called once on each. A kernel's
/// attributes, such as its limit of shared memory, belong to a device.
template <typename Make>
const auto& per_device(const Make& make) {
  constexpr size_t kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> flags;
  static std::array<std::optional<decltype(make())>, kMaxDevices> values;
  int current = 0;
  cudaGetDevice(&current);
  const auto device = static_cast<size_t>(current);
  std::call_once(flags.at(device), [&] { values[device].emplace(make()); });
  return *values[device];
}

}  // namespace openspec::cuda
