#include "model/weights/quantize.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/check.h"
#include "core/thread_pool.h"

namespace openspec {
namespace {

constexpr float kLargest = 448.0f;  // of e4m3
constexpr int64_t kBand = 128;      // outputs, and inputs, of a block
constexpr int32_t kSizeBits = 0x7fffffff;

int64_t num_bands(int64_t size) { return (size + kBand - 1) / kBand; }

/// Row `row` of the matrix from input `begin` on, as fp32. The data of a file may lie anywhere.
void read(const WideMatrix& matrix, int64_t row, int64_t begin, int64_t count, float* to) {
  const size_t bytes = dtype_bytes(matrix.dtype);
  const auto* from = static_cast<const std::byte*>(matrix.data) +
                     static_cast<size_t>(row * matrix.width + begin) * bytes;
  if (matrix.dtype == DType::kF32) {
    std::memcpy(to, from, static_cast<size_t>(count) * bytes);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t upper = 0;
    std::memcpy(&upper, from + 2 * i, 2);
    to[i] = std::bit_cast<float>(uint32_t{upper} << 16);
  }
}

/// The largest size, by its bits: without the sign they are in the order of the numbers, NaN above
/// all.
int32_t largest(const float* values, int64_t count) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    most = std::max(most, std::bit_cast<int32_t>(values[i]) & kSizeBits);
  }
  return most;
}

float scale_of(int32_t size) {
  const float scale = std::bit_cast<float>(size) / kLargest;
  OPENSPEC_CHECK_ARG(std::isfinite(scale), "holds NaN or infinity");
  return scale == 0.0f ? 1.0f : scale;
}

/// The nearest code to a value of at most 448, of two as near the even one. By integers and without
/// branches, as a compiler can do it for many values at once.
uint8_t nearest_code(float value) {
  constexpr int32_t kLeastNormal = 121 << 23;  // 2^-6
  constexpr float kSubnormals = 16384.0f;      // whose last bit is 2^-9, the least subnormal
  const auto bits = std::bit_cast<int32_t>(value);
  const int32_t size = std::min(bits & kSizeBits, std::bit_cast<int32_t>(kLargest));
  const int32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
  const int32_t subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(size) + kSubnormals) -
                            std::bit_cast<int32_t>(kSubnormals);
  const int32_t is_normal = -static_cast<int32_t>(size >= kLeastNormal);  // all bits, or none
  return static_cast<uint8_t>((normal & is_normal) | (subnormal & ~is_normal) |
                              (bits >> 24 & 0x80));
}

/// `values` are gone afterwards.
void fill_codes(float* values, int64_t count, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) values[i] /= scale;
  for (int64_t i = 0; i < count; ++i) codes[i] = nearest_code(values[i]);
}

/// 128 rows: their scales, unless the whole tensor has one, and their codes.
class Band {
 public:
  Band(const WideMatrix& matrix, int64_t band)
      : matrix_(matrix),
        index_(band),
        begin_(band * kBand),
        end_(std::min(matrix.num_rows, begin_ + kBand)),
        row_(static_cast<size_t>(matrix.width)) {}

  int32_t largest_size() {
    int32_t most = 0;
    for (int64_t row = begin_; row < end_; ++row) {
      read(matrix_, row, 0, matrix_.width, row_.data());
      most = std::max(most, largest(row_.data(), matrix_.width));
    }
    return most;
  }

  void fill_rows(const float* scale, uint8_t* codes) {
    for (int64_t row = begin_; row < end_; ++row) {
      read(matrix_, row, 0, matrix_.width, row_.data());
      fill_codes(row_.data(), matrix_.width, *scale, codes + row * matrix_.width);
    }
  }

  void fill_channels(float* scales, uint8_t* codes) {
    for (int64_t row = begin_; row < end_; ++row) {
      read(matrix_, row, 0, matrix_.width, row_.data());
      scales[row] = scale_of(largest(row_.data(), matrix_.width));
      fill_codes(row_.data(), matrix_.width, scales[row], codes + row * matrix_.width);
    }
  }

  void fill_blocks(float* scales, uint8_t* codes) {
    scales += index_ * num_bands(matrix_.width);
    for (int64_t first = 0; first < matrix_.width; first += kBand) {
      const int64_t count = std::min(kBand, matrix_.width - first);
      int32_t most = 0;
      for (int64_t row = begin_; row < end_; ++row) {
        read(matrix_, row, first, count, row_.data());
        most = std::max(most, largest(row_.data(), count));
      }
      const float scale = scales[first / kBand] = scale_of(most);
      for (int64_t row = begin_; row < end_; ++row) {
        read(matrix_, row, first, count, row_.data());
        fill_codes(row_.data(), count, scale, codes + row * matrix_.width + first);
      }
    }
  }

 private:
  const WideMatrix& matrix_;
  int64_t index_, begin_, end_;
  std::vector<float> row_;
};

}  // namespace

int64_t num_scales_of(const WideMatrix& matrix, TensorScale::Form form) {
  if (form == TensorScale::Form::kTensor) return 1;
  if (form == TensorScale::Form::kChannel) return matrix.num_rows;
  return num_bands(matrix.num_rows) * num_bands(matrix.width);
}

void quantize(const WideMatrix& matrix, TensorScale::Form form, int num_threads, uint8_t* codes,
              float* scales) {
  const int64_t count = num_bands(matrix.num_rows);
  ThreadPool pool(static_cast<int>(std::clamp<int64_t>(count, 1, num_threads)));
  const auto for_each_band = [&](const auto& body) {
    pool.try_parallel_for(static_cast<size_t>(count), [&](size_t i) {
      Band band(matrix, static_cast<int64_t>(i));
      body(band, i);
    });
  };
  switch (form) {
    case TensorScale::Form::kTensor: {
      std::vector<int32_t> sizes(static_cast<size_t>(count));
      for_each_band([&](Band& band, size_t i) { sizes[i] = band.largest_size(); });
      *scales = scale_of(sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end()));
      for_each_band([&](Band& band, size_t) { band.fill_rows(scales, codes); });
      break;
    }
    case TensorScale::Form::kChannel:
      for_each_band([&](Band& band, size_t) { band.fill_channels(scales, codes); });
      break;
    case TensorScale::Form::kBlock:
      for_each_band([&](Band& band, size_t) { band.fill_blocks(scales, codes); });
      break;
  }
}

}  // namespace openspec
