#pragma once

#include <cstdint>

#include "kernels/common/exec.h"

/// Trees of drafts from the marginals of a block: of every position the best tokens are known, but
/// not which of them go together, so a path's score is the sum of its tokens' log-probabilities.
///
/// Source: DDTree (Ringel and Romano, 2026); CAST (arXiv 2610.00321).
namespace openspec {

inline constexpr int kMaxBlockTreeNodes = 256;

/// The best nodes of the tree in which every node has the `top_k` tokens of the next position as
/// children: falling in score, of equal ones the one that came up first, a node's next sibling and
/// then its first child coming up with the node itself. So a parent comes before its children and
/// every beginning is a tree. Tokens at -inf have no node. Where it is known how likely tokens are
/// behind each of those before them (token_pairs.h), these are the scores that are added up.
struct BlockTreesParams {
  const int32_t* tokens = nullptr;  // [num_samples, top_k] best first
  const float* scores = nullptr;    // the same: log-probabilities, falling, at most 0
  // [num_samples, top_k (token before), top_k] tokens and scores behind each token before, best
  // first; a first position has the entries of token 0 alone. Null: `scores` behind all of them.
  const int32_t* pair_ranks = nullptr;
  const float* pair_scores = nullptr;
  int top_k = 0;
  const int32_t* first_sample = nullptr;  // [num_seqs] sample of the first position
  const int32_t* num_depths = nullptr;    // [num_seqs] positions; 0: no tree
  const int32_t* num_wanted = nullptr;    // [num_seqs]
  int num_seqs = 0;
  int max_drafts = 0;             // at most kMaxBlockTreeNodes
  int32_t* drafts = nullptr;      // out [num_seqs, max_drafts]
  int32_t* parents = nullptr;     // out [num_seqs, max_drafts] a draft; -1: the last known token
  float* path_scores = nullptr;   // out [num_seqs, max_drafts]
  int32_t* num_drafts = nullptr;  // out [num_seqs]
};

void block_trees_cpu(const ExecContext& exec, const BlockTreesParams& params);
#ifdef OPENSPEC_CUDA
int block_trees_cuda(const BlockTreesParams& params, void* stream);
#endif

}  // namespace openspec
