#pragma once

#include <cstdint>

namespace openspec {

/// Elements (4 bytes) of each of a thread's arrays over the vocabulary, and how many there are.
constexpr int64_t choose_array_floats(int64_t vocab_size) { return (vocab_size + 15) / 16 * 16; }
inline constexpr int kChooseArrays = 6;
constexpr int64_t choose_stripe_floats(int64_t vocab_size) {
  return kChooseArrays * choose_array_floats(vocab_size);
}

/// Elements (4 bytes) of a thread's arrays in the op that finds the best drafts.
constexpr int64_t top_drafts_stripe_floats(int64_t vocab_size) {
  return 4 * choose_array_floats(vocab_size);
}

}  // namespace openspec
