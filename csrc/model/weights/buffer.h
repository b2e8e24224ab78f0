#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "kernels/common/device.h"
#include "kernels/common/exec.h"

namespace openspec {

enum class Memory : uint8_t { kHost, kPinned, kDevice };

/// Where a device's ops work.
constexpr Memory memory_of(Device device) {
  return device == Device::kCuda ? Memory::kDevice : Memory::kHost;
}

/// The size of an area of a buffer, such that the next starts on a cache line, and where CUDA's
/// copy engine can begin.
constexpr size_t area_bytes(size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Areas one after another, planned before there is a buffer.
struct AreaPlan {
  size_t bytes = 0;
  /// The place of an area of `count` entries of `entry_bytes` each.
  size_t take(int count, size_t entry_bytes) {
    const size_t place = bytes;
    bytes += area_bytes(static_cast<size_t>(count) * entry_bytes);
    return place;
  }
};

namespace detail {
struct FreeMemory {
  Memory memory = Memory::kHost;
  void operator()(std::byte* data) const {
    if (memory == Memory::kDevice) {
      device::release(data);
    } else if (memory == Memory::kPinned) {
      device::release_pinned(data);
    } else {
      std::free(data);
    }
  }
};
}  // namespace detail

/// Memory aligned for vector loads. Large host buffers are touched by the operating system only
/// where they are used, so a pool sized for the worst case costs nothing while idle; they ask for
/// huge pages, since a decode step walks through all weights and would miss the TLB at every small
/// page. Device buffers are taken in full at once: nothing can run out of memory later.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes, Memory memory = Memory::kHost)
      : data_(nullptr, detail::FreeMemory{memory}), bytes_(bytes) {
    if (bytes == 0) return;
    if (memory == Memory::kDevice) {
      data_.reset(static_cast<std::byte*>(device::allocate(bytes)));
    } else if (memory == Memory::kPinned) {
      data_.reset(static_cast<std::byte*>(device::allocate_pinned(bytes)));
    } else {
      data_.reset(allocate_host(bytes));
    }
  }

  size_t bytes() const { return bytes_; }
  void* data() { return data_.get(); }
  const void* data() const { return data_.get(); }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(data_.get());
  }
  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(data_.get());
  }
  float* floats() { return as<float>(); }
  const float* floats() const { return as<float>(); }
  std::byte* at(size_t offset) { return data_.get() + offset; }

 private:
  static std::byte* allocate_host(size_t bytes) {
    constexpr size_t kHugePage = size_t{2} << 20;
    const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
    const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    auto* data = static_cast<std::byte*>(std::aligned_alloc(alignment, rounded));
    if (data == nullptr) throw std::bad_alloc();
#ifdef __linux__
    // A wish: where it is not granted, small pages serve as well.
    if (alignment == kHugePage) madvise(data, rounded, MADV_HUGEPAGE);
#endif
    return data;
  }

  std::unique_ptr<std::byte, detail::FreeMemory> data_;
  size_t bytes_ = 0;
};

/// A copy on the host of `count` values that lie where the device's ops work.
template <typename T>
std::vector<T> copy_from(Device device, const T* values, size_t count, void* stream = nullptr) {
  if (device == Device::kCpu) return {values, values + count};
  std::vector<T> copy(count);
  device::copy_to_host(copy.data(), values, count * sizeof(T), stream);
  device::synchronize(stream);
  return copy;
}

/// Values of a type, on the host, as fp32.
inline std::vector<float> to_floats(const void* data, DType dtype, size_t count) {
  std::vector<float> values(count);
  if (dtype == DType::kF32) {
    std::memcpy(values.data(), data, count * sizeof(float));
    return values;
  }
  const auto* source = static_cast<const uint16_t*>(data);
  for (size_t i = 0; i < count; ++i) values[i] = std::bit_cast<float>(uint32_t{source[i]} << 16);
  return values;
}

/// A copy of `values` where the device's ops work.
inline Buffer copy_for(Device device, std::span<const float> values) {
  Buffer buffer(values.size_bytes(), memory_of(device));
  if (device == Device::kCuda) {
    device::copy_to_device(buffer.data(), values.data(), values.size_bytes(), nullptr);
  } else {
    std::copy(values.begin(), values.end(), buffer.floats());
  }
  return buffer;
}

}  // namespace openspec
