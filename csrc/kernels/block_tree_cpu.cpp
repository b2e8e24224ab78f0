#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/block_tree.h"

namespace openspec {

namespace {

/// A node that may come next.
struct Candidate {
  float score;
  float above;  // its parent's score
  int parent, depth, rank;
};

/// Grows one tree; returns its number of nodes.
int grow(const BlockTreesParams& params, int seq) {
  const int64_t to = int64_t{seq} * params.max_drafts;
  const int most = std::min(params.num_wanted[seq], params.max_drafts);
  std::vector<Candidate> candidates;  // in the order in which they came up
  const auto add = [&](float above, int parent, int depth, int rank) {
    if (depth == params.num_depths[seq] || rank == params.top_k) return;
    const float own =
        params.scores[int64_t{params.first_sample[seq] + depth} * params.top_k + rank];
    if (own == -std::numeric_limits<float>::infinity()) return;
    candidates.push_back({above + own, above, parent, depth, rank});
  };
  add(0.0f, -1, 0, 0);
  int count = 0;
  for (; count < most && !candidates.empty(); ++count) {
    const auto best =
        std::max_element(candidates.begin(), candidates.end(),
                         [](const Candidate& a, const Candidate& b) { return a.score < b.score; });
    const Candidate node = *best;
    candidates.erase(best);
    params.drafts[to + count] =
        params.tokens[int64_t{params.first_sample[seq] + node.depth} * params.top_k + node.rank];
    params.parents[to + count] = node.parent;
    params.path_scores[to + count] = node.score;
    add(node.above, node.parent, node.depth, node.rank + 1);
    add(node.score, count, node.depth + 1, 0);
  }
  return count;
}

}  // namespace

void block_trees_cpu(const ExecContext&, const BlockTreesParams& params) {
  for (int i = 0; i < params.num_seqs; ++i) params.num_drafts[i] = grow(params, i);
}

}  // namespace openspec
