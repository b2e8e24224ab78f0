#include <algorithm>
#include <utility>

#include "kernels/draft_block_testing.h"
#include "kernels/drafts/draft_block.h"

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
                       .pair_ranks = marginals.ranks_or_null(),
                       .pair_scores = marginals.pairs_or_null(),
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

/// All paths with their scores, by brute force, best first.
std::vector<std::pair<float, Ids>> all_paths(const Marginals& marginals, size_t seq) {
  struct Path {
    float score = 0.0f;
    Ids tokens = {};
    int last = 0;  // among the tokens of its position
  };
  const int top_k = marginals.top_k;
  std::vector<std::pair<float, Ids>> paths;
  std::vector<Path> level(1);
  for (int depth = 0; depth < marginals.num_depths[seq]; ++depth) {
    std::vector<Path> next;
    const int sample = marginals.first_sample[seq] + depth;
    for (const Path& path : level) {
      for (int k = 0; k < top_k; ++k) {
        const bool has_pairs = marginals.pairs_or_null() != nullptr;
        const auto pair = static_cast<size_t>((sample * top_k + path.last) * top_k + k);
        const int token = has_pairs ? marginals.pair_ranks[pair] : k;
        const float own = has_pairs ? marginals.pair_scores[pair]
                                    : marginals.scores[static_cast<size_t>(sample * top_k + k)];
        next.push_back({path.score + own, path.tokens, token});
        next.back().tokens.push_back(marginals.tokens[static_cast<size_t>(sample * top_k + token)]);
        paths.emplace_back(next.back().score, next.back().tokens);
      }
    }
    level = next;
  }
  std::stable_sort(paths.begin(), paths.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  return paths;
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
  for (const bool has_pairs : {false, true}) {
    for (const int top_k : {1, 2, 4}) {
      constexpr int kMaxDrafts = 31;
      const Marginals marginals = random_marginals(rng, 20, 5, top_k, 40, has_pairs);
      const Trees trees = trees_of(marginals, kMaxDrafts);
      for (size_t seq = 0; seq < 20; ++seq) {
        std::vector<std::pair<float, Ids>> expected = all_paths(marginals, seq);
        while (!expected.empty() && expected.back().first < -1e30f) expected.pop_back();
        const auto most = static_cast<size_t>(std::min(kMaxDrafts, marginals.num_wanted[seq]));
        CHECK_EQ(static_cast<size_t>(trees.num_drafts[seq]), std::min(most, expected.size()));
        std::vector<Ids> found;
        for (size_t i = 0; i < static_cast<size_t>(trees.num_drafts[seq]); ++i) {
          const size_t at = seq * kMaxDrafts + i;
          const int parent = trees.parents[at];
          CHECK_EQ(trees.scores[at], expected[i].first);
          CHECK(parent >= -1 && parent < static_cast<int>(i));
          found.push_back(parent < 0 ? Ids{} : found[static_cast<size_t>(parent)]);
          found.back().push_back(trees.drafts[at]);
          // A path with its own score, and no path twice.
          const auto own = std::find(expected.begin(), expected.end(),
                                     std::pair{trees.scores[at], found.back()});
          CHECK(own != expected.end());
          CHECK(std::count(found.begin(), found.end(), found.back()) == 1);
        }
      }
    }
  }
}
