#pragma once

#include <cstdint>

#include "kernels/common/exec.h"
#include "kernels/drafts/table_rows.h"

/// The rows of a drafter that drafts a whole block at once: after the context that it keeps in the
/// page pool stand the last known token and masks, and every row's output gives a draft.
///
/// A *sample* is a row whose output is asked for: one for each draft, those of a sequence one after
/// another.
namespace openspec {

/// A block for every sequence that wants drafts: the last known token at its own position, then
/// masks, each keeping its KV at the token index that is its position. Draft d (from 0) comes from
/// row d + first_draft_row of the block; its place in the sequence is one after row d's, by which
/// its noise is drawn.
///
/// A sequence gets as many drafts as it wants, but no more than `max_depth`, and where the blocks
/// of all would exceed out.num_rows, all are cut to one length; where not even blocks of one draft
/// fit, the first ones are served.
struct BlockRowsParams {
  TableView table;
  const int32_t* seq = nullptr;         // [num_seqs] slots
  const int32_t* num_wanted = nullptr;  // [num_seqs]
  int num_seqs = 0;
  int max_depth = 0;
  int first_draft_row = 0;  // 1: the last known token's row drafts nothing; 0: it does
  int32_t mask_token = 0;
  int mask_source = -1;  // `source` of masks; -1: the slot, as of the last known token's row
  int page_size = 0;
  DraftRows out;                  // num_spans = num_seqs; `source` is the slot
  int num_samples = 0;            // room, padding included
  int32_t* head_row = nullptr;    // out [num_samples] row whose output tells the draft; -1: padding
  int32_t* sample_row = nullptr;  // out [num_samples] row before the draft's place; -1: padding
  int32_t* first_sample = nullptr;  // out [num_seqs] of those that have drafts
  int32_t* num_drafts = nullptr;    // out [num_seqs]
};

void block_rows_cpu(const ExecContext& exec, const BlockRowsParams& params);
int block_rows_cuda(const BlockRowsParams& params, void* stream);

/// drafts[i] = the tokens chosen for the samples of sequence i. Where the drafter tells with what
/// confidence a draft is accepted if those before it were (as the argument of a logistic function),
/// the logarithms of the products are the drafts' scores.
struct StoreBlocksParams {
  const int32_t* chosen = nullptr;        // [num_samples]
  const float* confidence = nullptr;      // [num_samples] or null
  const int32_t* first_sample = nullptr;  // [num_seqs]
  const int32_t* num_drafts = nullptr;    // [num_seqs]
  int num_seqs = 0;
  int max_drafts = 0;
  int32_t* drafts = nullptr;  // out [num_seqs, max_drafts]
  float* scores = nullptr;    // out [num_seqs, max_drafts], with confidence
};

void store_blocks_cpu(const ExecContext& exec, const StoreBlocksParams& params);
int store_blocks_cuda(const StoreBlocksParams& params, void* stream);

/// How sure a drafter is of its drafts: confidence[s] = weight . [output of sample s, state of the
/// token before the draft] + bias, the argument of a logistic function.
struct BlockConfidenceParams {
  TableView table;
  const int32_t* seq = nullptr;           // [num_seqs] slots
  const int32_t* first_sample = nullptr;  // [num_seqs]
  const int32_t* num_drafts = nullptr;    // [num_seqs]
  int num_seqs = 0;
  const int32_t* chosen = nullptr;  // [num_samples] the drafts
  const void* outputs = nullptr;    // [num_samples, width] dtype
  const void* states = nullptr;     // [vocab_size, state_width] bf16, or null: not looked at
  const float* weight = nullptr;    // [width + state_width]
  const float* bias = nullptr;      // [1]
  int width = 0, state_width = 0;
  DType dtype = DType::kF32;
  float* confidence = nullptr;  // out [num_samples]
};

void block_confidence_cpu(const ExecContext& exec, const BlockConfidenceParams& params);
/// bf16; widths are multiples of 8. Another order of summation than the CPU's: only the number of
/// drafts hangs on it.
int block_confidence_cuda(const BlockConfidenceParams& params, void* stream);

// ---- Trees of blocks ----
//
// Trees of drafts from the marginals of a block: of every position the best tokens are known, but
// not which of them go together, so a path's score is the sum of its tokens' log-probabilities.
//
// Source: DDTree (Ringel and Romano, 2026); CAST (arXiv 2610.00321).

inline constexpr int kMaxBlockTreeNodes = 256;

/// The best nodes of the tree in which every node has the `top_k` tokens of the next position, or
/// the best `num_children` of them, as children: falling in score, of equal ones the one that came
/// up first, a node's next sibling and then its first child coming up with the node itself. So a
/// parent comes before its children and every beginning is a tree. Tokens at -inf have no node.
/// Where it is known how likely tokens are after each of those before them (token_pairs.h), these
/// are the scores that are added up.
struct BlockTreesParams {
  const int32_t* tokens = nullptr;  // [num_samples, top_k] best first
  const float* scores = nullptr;    // [num_samples, top_k] log-probabilities, falling, at most 0
  // [num_samples, top_k (token before), top_k] tokens and scores after each token before, best
  // first; a first position has the entries of token 0 alone. Null: `scores` after all of them.
  const int32_t* pair_ranks = nullptr;
  const float* pair_scores = nullptr;
  int top_k = 0;
  int num_children = 0;                   // 0: all
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
int block_trees_cuda(const BlockTreesParams& params, void* stream);

}  // namespace openspec
