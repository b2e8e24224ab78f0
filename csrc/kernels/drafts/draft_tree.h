#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/choose/sampling_params.h"
#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "kernels/drafts/table_rows.h"

/// Trees of drafts for a drafter that is a small model: level after level, the best `top_k` nodes
/// of a level (its frontier) get `top_k` children each; of all nodes ever made the best become the
/// drafts. A node's score is the sum of the log-probabilities on its path.
///
/// Source: EAGLE-2 (Li et al., arXiv 2406.16858).
namespace openspec {

inline constexpr int kMaxTreeTopK = 16;
inline constexpr int kMaxTopDrafts = 64;

/// The `top_k` most likely drafts after each row with their log-probabilities: those of the logits
/// where a sequence is greedy, else of logits / temperature plus the noise that the choice to be
/// guessed will be drawn with (see ChooseParams for the noise, the position, `token_of` and the
/// rows), among what the sequence's top_k, top_p and min_p leave, unless `ignores_filters`. Equal
/// values: the lower column first. Where there are fewer, columns that are not there follow with
/// -inf.
struct TopDraftsParams {
  RowBatch rows;
  const int32_t* sample_row = nullptr;  // [num_samples] row of each logits row; -1: padding
  int num_samples = 0;
  const float* logits = nullptr;      // [num_samples, vocab_size]
  int vocab_size = 0;                 // at least top_k
  const int32_t* token_of = nullptr;  // [vocab_size] or null
  const SamplingParams* sampling = nullptr;
  bool ignores_filters = false;
  int top_k = 0;              // at most kMaxTopDrafts
  int32_t* tokens = nullptr;  // out [num_samples, top_k]
  float* scores = nullptr;    // out [num_samples, top_k], falling, at most 0
  void* workspace = nullptr;  // top_drafts_workspace_bytes_cpu(...)
};

size_t top_drafts_workspace_bytes_cpu(int num_threads, int vocab_size);
void top_drafts_cpu(const ExecContext& exec, const TopDraftsParams& params);
/// The CPU's result. What the workspace holds before a call does not matter; it begins at a
/// multiple of 128 bytes.
size_t top_drafts_workspace_bytes_cuda(int max_num_samples, int vocab_size);
int top_drafts_cuda(const TopDraftsParams& params, void* stream);

/// Shape of the trees: levels 1 to `depth` of nodes, and a row of the drafter for each frontier
/// node of all levels but the last.
struct TreeShape {
  int depth = 0;
  int top_k = 0;

  constexpr int num_nodes() const { return top_k + (depth - 1) * top_k * top_k; }
  constexpr int num_rows() const { return (depth - 1) * top_k; }
  /// First of the nodes of a level; they follow in the order of the frontier before.
  constexpr int first_node(int level) const {
    return level == 1 ? 0 : top_k + (level - 2) * top_k * top_k;
  }
};

/// Trees in the making, one for each sequence that wants drafts, in the order of the sequences.
struct DraftTrees {
  TreeShape shape;
  int32_t* node_token = nullptr;   // [trees, num_nodes]
  int32_t* node_parent = nullptr;  // [trees, num_nodes] a node; -1: the last known token
  float* node_score = nullptr;     // [trees, num_nodes]
  int32_t* row_node = nullptr;     // [trees, num_rows] frontier nodes by level, best first
};

/// One level more: `tokens` and `scores` are the best drafts after the rows of the frontier before
/// (level 1: after the last known token) and become nodes. Below the last level the frontier's
/// nodes become rows. Out are all rows so far, a span for each tree: row i of a span keeps its KV
/// at token index num_tokens + i, after what is known, its position follows from its depth.
struct GrowTreesParams {
  TableView table;
  const int32_t* seq = nullptr;         // [num_seqs] slots
  const int32_t* num_wanted = nullptr;  // [num_seqs] 0: no tree
  int num_seqs = 0;
  int level = 0;
  int page_size = 0;
  const int32_t* tokens = nullptr;  // [trees * (level == 1 ? 1 : top_k), top_k]
  const float* scores = nullptr;    // the same
  DraftTrees trees;
  // out, below the last level. `source` is the tree for children of the last known token, else -1;
  // num_rows = num_seqs * level * top_k, num_spans = num_seqs, padding included.
  DraftRows out;
  int32_t* parent_row = nullptr;    // [num_rows] the parent's row at the level before, or -1
  int32_t* frontier_row = nullptr;  // [num_seqs * top_k] rows whose children are wanted next, or -1
};

void grow_trees_cpu(const ExecContext& exec, const GrowTreesParams& params);
int grow_trees_cuda(const GrowTreesParams& params, void* stream);

/// The best nodes as drafts: falling in score, of equal ones the earlier made first, so that a
/// parent comes before its children and every beginning is a tree. Nodes at -inf are left out.
struct PickDraftsParams {
  DraftTrees trees;
  const int32_t* num_wanted = nullptr;  // [num_seqs]
  int num_seqs = 0;
  int max_drafts = 0;
  int32_t* order = nullptr;       // workspace [num_nodes], on the CPU
  int32_t* drafts = nullptr;      // out [num_seqs, max_drafts]
  int32_t* parents = nullptr;     // out [num_seqs, max_drafts] a draft; -1: the last known token
  float* scores = nullptr;        // out [num_seqs, max_drafts]
  int32_t* num_drafts = nullptr;  // out [num_seqs]
};

void pick_drafts_cpu(const ExecContext& exec, const PickDraftsParams& params);
int pick_drafts_cuda(const PickDraftsParams& params, void* stream);

}  // namespace openspec
