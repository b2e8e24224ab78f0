#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/exec.h"

namespace openspec {

/// Numbers in a row: `bytes` of bf16 or fp32, a multiple of 4.
struct NumberArea {
  const void* data = nullptr;
  size_t bytes = 0;
  DType dtype = DType::kBF16;
};

/// Whether none of the numbers is NaN or infinite.
bool is_finite_cpu(const NumberArea& area);
/// Sets *found, in device memory, to 1 if one of them is. Returns a cudaError_t.
int find_non_finite_cuda(const NumberArea& area, int32_t* found, void* stream);

namespace detail {

/// The exponent's bits of the number in the lower half of a word, if there is one.
constexpr uint32_t low_exponent(DType dtype) { return dtype == DType::kBF16 ? 0x7f80u : 0u; }

/// Whether a word of one or two numbers holds one with all exponent bits set.
constexpr bool is_non_finite(uint32_t word, uint32_t low) {
  constexpr uint32_t kHigh = 0x7f800000u;
  return (word & kHigh) == kHigh || (low != 0 && (word & low) == low);
}

}  // namespace detail
}  // namespace openspec
