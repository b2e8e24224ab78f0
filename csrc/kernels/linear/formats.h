#pragma once

#include <cstddef>
#include <cstdint>

namespace openspec {

/// How the numbers of a weight matrix lie in memory. Activations, norms and biases have a DType.
enum class MatrixFormat : uint8_t {
  kBF16,  // as published, without scales
  kE4M3,  // one byte, a finite code: its value times a scale
};

/// For which weights a scale of fp32 stands, if the format has any. What a scale multiplies is a
/// sum of products with codes, never a code: see linear.h.
enum class ScaleKind : uint8_t {
  kNone,
  kOutput,  // an output's, of all its inputs; a scale of a whole tensor is each of its outputs'
  kBlock,   // an output's, of a block of kScaleInputs inputs
};

inline constexpr int kScaleInputs = 128;   // blocks are counted from input 0 of the whole matrix
inline constexpr int kScaleOutputs = 128;  // of a published block, from output 0 of its tensor

/// Bytes of so many numbers of a row times so many rows, without their scales.
constexpr size_t format_bytes(MatrixFormat format, int num_rows, int width) {
  const size_t count = static_cast<size_t>(num_rows) * static_cast<size_t>(width);
  switch (format) {
    case MatrixFormat::kBF16:
      return 2 * count;
    case MatrixFormat::kE4M3:
      return count;
  }
  return 0;
}

}  // namespace openspec
