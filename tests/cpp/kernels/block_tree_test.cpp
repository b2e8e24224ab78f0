#include "kernels/block_tree.h"

#include <algorithm>

#include "kernels/draft_block_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

using Ids = std::vector<int32_t>;

struct Trees {
  Ids drafts, parents, num_drafts;
  std::vector<float> scores;
};

Trees trees_of(const Marginals& marginals, int max_drafts) {
  const size_t seqs = marginals.num_wanted.size(), count = seqs * static_cast<size_t>(max_drafts);
  Trees trees{Ids(count, -7), Ids(count, -7), Ids(seqs, -7), std::vector<float>(count, 7.0f)};
  block_trees_cpu({}, {.tokens = marginals.tokens.data(),
                       .scores = marginals.scores.data(),
                       .top_k = marginals.top_k,
                       .first_sample = marginals.first_sample.data(),
                       .num_depths = marginals.num_depths.data(),
                       .num_wanted = marginals.num_wanted.data(),
                       .num_seqs = static_cast<int>(seqs),
                       .max_drafts = max_drafts,
                       .drafts = trees.drafts.data(),
                       .parents = trees.parents.data(),
                       .path_scores = trees.scores.data(),
                       .num_drafts = trees.num_drafts.data()});
  return trees;
}

/// Scores of all paths, by brute force, best first.
std::vector<float> all_scores(const Marginals& marginals, size_t seq) {
  std::vector<float> scores, level = {0.0f};
  for (int depth = 0; depth < marginals.num_depths[seq]; ++depth) {
    std::vector<float> next;
    const int at = (marginals.first_sample[seq] + depth) * marginals.top_k;
    for (float above : level) {
      for (int k = 0; k < marginals.top_k; ++k) {
        next.push_back(above + marginals.scores[static_cast<size_t>(at + k)]);
      }
    }
    scores.insert(scores.end(), next.begin(), next.end());
    level = next;
  }
  std::sort(scores.begin(), scores.end(), std::greater<>());
  return scores;
}

}  // namespace

TEST(a_small_tree) {
  const Marginals marginals = {.top_k = 2,
                               .tokens = {10, 11, 20, 21},
                               .first_sample = {0},
                               .num_depths = {2},
                               .num_wanted = {9},
                               .scores = {-1.0f, -1.5f, -0.25f, -2.0f}};
  const Trees trees = trees_of(marginals, 8);
  CHECK_EQ(trees.num_drafts, (Ids{6}));
  CHECK_EQ((Ids(trees.drafts.begin(), trees.drafts.begin() + 6)), (Ids{10, 20, 11, 20, 21, 21}));
  CHECK_EQ((Ids(trees.parents.begin(), trees.parents.begin() + 6)), (Ids{-1, 0, -1, 2, 0, 2}));
  CHECK_EQ(trees.scores[1], -1.25f);
  CHECK_EQ(trees.scores[5], -3.5f);
  CHECK_EQ(trees.drafts[6], -7);
}

TEST(the_best_paths_are_found) {
  Rng rng(5);
  for (const int top_k : {1, 2, 4}) {
    constexpr int kMaxDrafts = 31;
    const Marginals marginals = random_marginals(rng, 20, 5, top_k, 40);
    const Trees trees = trees_of(marginals, kMaxDrafts);
    for (size_t seq = 0; seq < 20; ++seq) {
      std::vector<float> expected = all_scores(marginals, seq);
      while (!expected.empty() && expected.back() < -1e30f) expected.pop_back();
      const auto most = static_cast<size_t>(std::min(kMaxDrafts, marginals.num_wanted[seq]));
      if (expected.size() > most) expected.resize(most);
      CHECK_EQ(trees.num_drafts[seq], static_cast<int32_t>(expected.size()));
      for (size_t i = 0; i < expected.size(); ++i) {
        const size_t at = seq * kMaxDrafts + i;
        CHECK_EQ(trees.scores[at], expected[i]);
        CHECK(trees.parents[at] >= -1 && trees.parents[at] < static_cast<int32_t>(i));
      }
    }
  }
}
