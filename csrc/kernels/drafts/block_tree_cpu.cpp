#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/drafts/block_tree.h"

namespace openspec {

namespace {

/// A node that may come next.
struct Candidate {
  float score;
  float above;  // its parent's score
  int parent, depth;
  int before;  // the parent's place among the tokens of its position
  int rank;    // among its siblings
  int token;   // its own place among the tokens of its position
};

/// Grows one tree; returns its number of nodes.
int grow(const BlockTreesParams& params, int seq) {
  const int64_t to = int64_t{seq} * params.max_drafts;
  const int most = std::min(params.num_wanted[seq], params.max_drafts);
  std::vector<Candidate> candidates;  // in the order in which they came up
  const auto add = [&](float above, int parent, int depth, int before, int rank) {
    if (depth == params.num_depths[seq] || rank == params.top_k) return;
    const int64_t sample = int64_t{params.first_sample[seq]} + depth;
    const int64_t pair = (sample * params.top_k + before) * params.top_k + rank;
    const bool has_pairs = params.pair_scores != nullptr;
    const float own =
        has_pairs ? params.pair_scores[pair] : params.scores[sample * params.top_k + rank];
    if (own == -std::numeric_limits<float>::infinity()) return;
    const int token = has_pairs ? params.pair_ranks[pair] : rank;
    candidates.push_back({above + own, above, parent, depth, before, rank, token});
  };
  add(0.0f, -1, 0, 0, 0);
  int count = 0;
  for (; count < most && !candidates.empty(); ++count) {
    const auto best =
        std::max_element(candidates.begin(), candidates.end(),
                         [](const Candidate& a, const Candidate& b) { return a.score < b.score; });
    const Candidate node = *best;
    candidates.erase(best);
    params.drafts[to + count] =
        params.tokens[int64_t{params.first_sample[seq] + node.depth} * params.top_k + node.token];
    params.parents[to + count] = node.parent;
    params.path_scores[to + count] = node.score;
    add(node.above, node.parent, node.depth, node.before, node.rank + 1);
    add(node.score, count, node.depth + 1, node.token, 0);
  }
  return count;
}

}  // namespace

void block_trees_cpu(const ExecContext&, const BlockTreesParams& params) {
  for (int i = 0; i < params.num_seqs; ++i) params.num_drafts[i] = grow(params, i);
}

}  // namespace openspec
