#pragma once

/// What the tests of the CPU ops share.

#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check_test.h"
#include "core/check.h"
#include "core/thread_pool.h"
#include "kernels/isa_cpu.h"

namespace openspec::testing {

class Rng {
 public:
  explicit Rng(uint64_t seed) : engine_(seed) {}
  /// In [low, high].
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  float normal(float scale = 1.0f) { return std::normal_distribution<float>(0.0f, scale)(engine_); }
  std::vector<float> normals(size_t count, float scale = 1.0f) {
    std::vector<float> values(count);
    for (float& value : values) value = normal(scale);
    return values;
  }

 private:
  std::mt19937_64 engine_;
};

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

/// A buffer of either element type, read and written as fp32. It begins as NaN, so that whatever an
/// op fails to write, or reads without being given, shows; a guard behind it must stay untouched.
class Buffer {
 public:
  Buffer(size_t size, DType dtype) : size_(size), dtype_(dtype) {
    bytes_.assign((size + kGuard) * dtype_bytes(dtype), 0xff);
  }
  Buffer(const std::vector<float>& values, DType dtype) : Buffer(values.size(), dtype) {
    for (size_t i = 0; i < values.size(); ++i) set(i, values[i]);
  }
  void* data() { return bytes_.data(); }
  size_t size() const { return size_; }
  DType dtype() const { return dtype_; }
  size_t num_bytes() const { return size_ * dtype_bytes(dtype_); }

  float operator[](size_t i) const {
    if (dtype_ == DType::kBF16) {
      uint16_t bits;
      std::memcpy(&bits, &bytes_[2 * i], 2);
      return from_bf16(bits);
    }
    float value;
    std::memcpy(&value, &bytes_[4 * i], 4);
    return value;
  }
  void set(size_t i, float value) {
    if (dtype_ == DType::kBF16) {
      const uint16_t bits = to_bf16(value);
      std::memcpy(&bytes_[2 * i], &bits, 2);
    } else {
      std::memcpy(&bytes_[4 * i], &value, 4);
    }
  }
  /// Bitwise equality of `count` elements.
  bool same(size_t at, const Buffer& other, size_t other_at, size_t count) const {
    const size_t width = dtype_bytes(dtype_);
    return std::memcmp(&bytes_[at * width], &other.bytes_[other_at * width], count * width) == 0;
  }
  bool guard_is_whole() const {
    for (size_t i = num_bytes(); i < bytes_.size(); ++i) {
      if (bytes_[i] != 0xff) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
  size_t size_;
  DType dtype_;
  std::vector<uint8_t> bytes_;
};

/// Scratch full of NaN.
inline std::vector<float> poisoned_floats(size_t bytes) {
  return std::vector<float>(bytes / 4 + 1, std::numeric_limits<float>::quiet_NaN());
}

/// Calls body() once per instruction set that this machine has.
template <typename Body>
void for_each_isa(const Body& body) {
  const Isa best = cpu_isa();
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (!has_isa(isa)) continue;
    force_isa(isa);
    body();
  }
  force_isa(best);
}

inline const std::vector<DType>& both_dtypes() {
  static const std::vector<DType> dtypes = {DType::kF32, DType::kBF16};
  return dtypes;
}

/// Largest rounding error of a stored value of this size.
inline double tolerance(DType dtype, double magnitude, double fp32_error) {
  return magnitude * (dtype == DType::kBF16 ? 1.0 / 128 : 0.0) + fp32_error;
}

}  // namespace openspec::testing
