#pragma once

#include <cstddef>
#include <cstdint>

namespace openspec::attention {

/// Sizes that the CPU attention and its workspace agree on.

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxGroup = 64;      // q heads per KV head
inline constexpr int kBlockTokens = 128;  // the KV split: results of blocks are merged in order
inline constexpr int kPanelTokens = 32;
inline constexpr int kMaxQueries = 64;  // (row, q head) pairs that share the reading of K and V
// A row of scores: a block, and what a panel that starts inside the block writes beyond it.
inline constexpr int kScoreStride = kBlockTokens + kPanelTokens;

/// Floats of one block's result: sums, then maximum and normaliser of every query.
constexpr int64_t partial_floats(int64_t num_queries, int64_t head_dim) {
  return num_queries * (head_dim + 2);
}

/// One thread's scratch.
struct Scratch {
  alignas(64) float queries[kMaxQueries * kMaxHeadDim];
  alignas(64) float keys[kPanelTokens * kMaxHeadDim];  // transposed: [head_dim][kPanelTokens]
  alignas(64) float scores[kMaxQueries * kScoreStride];
  alignas(64) float values[kScoreStride * kMaxHeadDim];  // of bf16 pages, as fp32
  alignas(64) float block[partial_floats(kMaxQueries, kMaxHeadDim)];
  alignas(64) float total[partial_floats(kMaxQueries, kMaxHeadDim)];
};

/// Floats for the results of single blocks, where one sequence's blocks go to several threads.
constexpr int64_t shared_partial_floats(int64_t num_q_heads, int64_t max_tokens) {
  constexpr int64_t kCap = int64_t{4} << 20;
  const int64_t row = (max_tokens / kBlockTokens + 1) * partial_floats(num_q_heads, kMaxHeadDim);
  return 16 * row <= kCap ? 16 * row : (row > kCap ? row : kCap);
}

}  // namespace openspec::attention
