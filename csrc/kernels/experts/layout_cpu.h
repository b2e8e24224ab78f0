#pragma once

#include <cstddef>
#include <cstdint>

namespace openspec::experts {

inline constexpr size_t kAlignment = 64;

constexpr size_t area(size_t count, size_t bytes) {
  return (count * bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// Where things lie in the workspace of an aligned `experts`, in bytes; a linear's own begins at
/// `linear`. Those of fewer rows lie within those of more.
struct Layout {
  size_t first;  // [num_experts + 1] of an expert's pairs
  size_t pair;   // [num_rows * top_k] row * top_k + slot, by experts, rows rising
  size_t x;      // [num_rows, hidden_size] dtype: the rows of one expert
  size_t inner;  // [num_rows, intermediate_size] dtype
  size_t down;   // [num_rows, hidden_size] dtype
  size_t sums;   // [num_rows, hidden_size] fp32
  size_t linear;

  constexpr Layout(size_t num_rows, size_t hidden_size, size_t intermediate_size,
                   size_t num_experts, size_t top_k, size_t element)
      : first(0),
        pair(first + area(num_experts + 1, sizeof(int32_t))),
        x(pair + area(num_rows * top_k, sizeof(int32_t))),
        inner(x + area(num_rows * hidden_size, element)),
        down(inner + area(num_rows * intermediate_size, element)),
        sums(down + area(num_rows * hidden_size, element)),
        linear(sums + area(num_rows * hidden_size, sizeof(float))) {}
};

/// Bytes of a row's logits in the workspace of `route_experts`, which a linear's own follows.
constexpr size_t logits_bytes(size_t num_rows, size_t num_experts) {
  return area(num_rows * num_experts, sizeof(float));
}

}  // namespace openspec::experts
