#pragma once

/// What the tests of states behind pairs share, on the CPU and on CUDA.

#include <cmath>
#include <vector>

#include "kernels/drafts/pair_states.h"
#include "kernels/token_pairs_testing.h"

namespace openspec::testing {

/// Heads over the blocks of a PairsCase.
struct StatesCase {
  StatesCase(Rng& rng, int num_seqs, int rank, int width, bool is_recurrent)
      : blocks(rng, num_seqs, 200, rank, 1), width(width), is_recurrent(is_recurrent) {
    const int rows = is_recurrent ? 3 * rank : rank;
    const auto num_outputs = static_cast<size_t>(blocks.num_samples * width);
    const float gain = 2.0f / std::sqrt(static_cast<float>(num_inputs()));
    for (float x : rng.normals(num_outputs)) outputs.push_back(to_bf16(x));
    for (float x : rng.normals(static_cast<size_t>(rows * num_inputs()), gain)) {
      weight.push_back(to_bf16(x));
    }
    bias = rng.normals(static_cast<size_t>(rows));
  }

  int num_inputs() const { return width + (is_recurrent ? 2 : 1) * blocks.rank; }
  size_t num_states() const { return blocks.seq.size() * static_cast<size_t>(blocks.rank); }
  PairStatesParams params(int depth, std::vector<float>& memory,
                          std::vector<uint16_t>& states) const {
    return {.table = blocks.table.view(),
            .seq = blocks.seq.data(),
            .first_sample = blocks.first_sample.data(),
            .num_drafts = blocks.num_drafts.data(),
            .num_seqs = static_cast<int>(blocks.seq.size()),
            .depth = depth,
            .chosen = blocks.chosen.data(),
            .pairs = blocks.pairs(),
            .outputs = outputs.data(),
            .width = width,
            .is_recurrent = is_recurrent,
            .weight = weight.data(),
            .bias = bias.data(),
            .memory = memory.data(),
            .dtype = DType::kBF16,
            .states = states.data()};
  }

  PairsCase blocks;
  int width;
  bool is_recurrent;
  std::vector<uint16_t> outputs, weight;
  std::vector<float> bias;
};

}  // namespace openspec::testing
