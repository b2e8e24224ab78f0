#pragma once

#include <cstddef>
#include <cstdint>

namespace openspec {

/// How the numbers of a weight matrix lie in memory. Activations, norms and biases have a DType.
enum class MatrixFormat : uint8_t {
  kBF16,  // as published, without scales
};

/// Bytes of so many numbers of a row times so many rows, without their scales.
constexpr size_t format_bytes(MatrixFormat format, int num_rows, int width) {
  const size_t count = static_cast<size_t>(num_rows) * static_cast<size_t>(width);
  switch (format) {
    case MatrixFormat::kBF16:
      return 2 * count;
  }
  return 0;
}

}  // namespace openspec
