#pragma once

/// What the tests of the block drafter's ops share, on the CPU and on CUDA.

#include "kernels/block_tree.h"
#include "kernels/draft_block.h"
#include "kernels/draft_rows_testing.h"

namespace openspec::testing {

/// The best tokens of positions, in the order of sequences.
struct Marginals {
  int top_k = 0;
  std::vector<int32_t> tokens, first_sample, num_depths, num_wanted;
  std::vector<float> scores;
};

/// Log-probabilities of few values, so that paths tie; some tokens are not there.
inline Marginals random_marginals(Rng& rng, int num_seqs, int max_depth, int top_k,
                                  int max_wanted) {
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
  for (int i = 0; i < num_samples; ++i) {
    float score = -0.25f * static_cast<float>(rng.integer(0, 2));
    for (int k = 0; k < top_k; ++k) {
      made.tokens.push_back(rng.integer(0, 1000) * top_k + k);
      made.scores.push_back(
          k > 1 && rng.integer(0, 9) == 0 ? -std::numeric_limits<float>::infinity() : score);
      if (made.scores.back() < -1e30f) score = made.scores.back();
      score -= 0.25f * static_cast<float>(rng.integer(0, 4));
    }
  }
  return made;
}

}  // namespace openspec::testing
