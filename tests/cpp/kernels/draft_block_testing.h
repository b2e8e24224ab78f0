#pragma once

/// What the tests of the block drafter's ops share, on the CPU and on CUDA.

#include "kernels/draft_rows_testing.h"
#include "kernels/drafts/draft_block.h"

namespace openspec::testing {

/// The best tokens of positions, in the order of sequences.
struct Marginals {
  int top_k = 0;
  std::vector<int32_t> tokens, first_sample, num_depths, num_wanted;
  std::vector<float> scores;
  // Ranks and scores after each of the tokens before, if they are known.
  std::vector<int32_t> pair_ranks = {};
  std::vector<float> pair_scores = {};

  const int32_t* ranks_or_null() const { return pair_ranks.empty() ? nullptr : pair_ranks.data(); }
  const float* pairs_or_null() const { return pair_scores.empty() ? nullptr : pair_scores.data(); }
};

/// Log-probabilities of few values, so that paths tie; some tokens are not there.
inline Marginals random_marginals(Rng& rng, int num_seqs, int max_depth, int top_k, int max_wanted,
                                  bool has_pairs = false) {
  Marginals made;
  made.top_k = top_k;
  int num_samples = 0;
  for (int i = 0; i < num_seqs; ++i) {
    const int depth = i % 5 == 3 ? 0 : rng.integer(1, max_depth);
    made.first_sample.push_back(num_samples);
    made.num_depths.push_back(depth);
    made.num_wanted.push_back(rng.integer(1, max_wanted));
    num_samples += depth;
  }
  const auto add_falling = [&](std::vector<float>& scores) {
    float score = -0.25f * static_cast<float>(rng.integer(0, 2));
    for (int k = 0; k < top_k; ++k) {
      scores.push_back(k > 1 && rng.integer(0, 9) == 0 ? -std::numeric_limits<float>::infinity()
                                                       : score);
      if (scores.back() < -1e30f) score = scores.back();
      score -= 0.25f * static_cast<float>(rng.integer(0, 4));
    }
  };
  for (int i = 0; i < num_samples; ++i) {
    for (int k = 0; k < top_k; ++k) made.tokens.push_back(rng.integer(0, 1000) * top_k + k);
    add_falling(made.scores);
    for (int before = 0; has_pairs && before < top_k; ++before) {
      add_falling(made.pair_scores);
      const int shift = rng.integer(0, top_k - 1);
      for (int k = 0; k < top_k; ++k) made.pair_ranks.push_back((k + shift) % top_k);
    }
  }
  return made;
}

}  // namespace openspec::testing
