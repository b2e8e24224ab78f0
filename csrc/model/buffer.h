#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace openspec {

/// Host memory aligned for vector loads. Large buffers are touched by the operating system only
/// where they are used, so a pool sized for the worst case costs nothing while idle; they ask for
/// huge pages, since a decode step walks through all weights and would miss the TLB at every small
/// page.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    constexpr size_t kHugePage = size_t{2} << 20;
    const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
    const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, rounded)));
    if (!data_) throw std::bad_alloc();
#ifdef __linux__
    // A wish: where it is not granted, small pages serve as well.
    if (alignment == kHugePage) madvise(data_.get(), rounded, MADV_HUGEPAGE);
#endif
  }

  size_t bytes() const { return bytes_; }
  void* data() { return data_.get(); }
  const void* data() const { return data_.get(); }
  float* floats() { return reinterpret_cast<float*>(data_.get()); }
  const float* floats() const { return reinterpret_cast<const float*>(data_.get()); }
  std::byte* at(size_t offset) { return data_.get() + offset; }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t bytes_ = 0;
};

}  // namespace openspec
