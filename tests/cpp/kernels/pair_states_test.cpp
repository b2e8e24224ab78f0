#include "kernels/pair_states_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

double sigma(double x) { return 1.0 / (1.0 + std::exp(-x)); }

}  // namespace

TEST(states_are_those_of_the_formulas) {
  Rng rng(1);
  for (const bool is_recurrent : {false, true}) {
    const StatesCase c(rng, 6, 24, 40, is_recurrent);
    const PairsCase& blocks = c.blocks;
    const auto rank = static_cast<size_t>(blocks.rank), width = static_cast<size_t>(c.width);
    std::vector<float> memory(2 * c.num_states(), 9.0f);
    std::vector<std::vector<double>> remembered(blocks.seq.size(), std::vector<double>(rank, 0.0));
    for (int depth = 0; depth < PairsCase::kMaxDepth; ++depth) {
      std::vector<uint16_t> states(c.num_states(), to_bf16(7.0f));
      pair_states_cpu({}, c.params(depth, memory, states));
      for (size_t i = 0; i < blocks.seq.size(); ++i) {
        if (depth >= blocks.num_drafts[i]) {
          CHECK_EQ(states[i * rank], to_bf16(7.0f));
          continue;
        }
        const auto sample = static_cast<size_t>(blocks.first_sample[i] + depth);
        const int before = depth == 0 ? blocks.last_token(i) : blocks.chosen[sample - 1];
        std::vector<double> token, inputs;
        for (size_t k = 0; k < rank; ++k) {
          token.push_back(from_bf16(blocks.first[static_cast<size_t>(before) * rank + k]));
        }
        std::vector<double>& old = remembered[i];
        if (is_recurrent) {
          inputs = old;
          inputs.insert(inputs.end(), token.begin(), token.end());
        }
        for (size_t k = 0; k < width; ++k)
          inputs.push_back(from_bf16(c.outputs[sample * width + k]));
        if (!is_recurrent) inputs.insert(inputs.end(), token.begin(), token.end());
        const auto sum = [&](size_t row) {
          double total = static_cast<double>(c.bias[row]);
          for (size_t k = 0; k < inputs.size(); ++k) {
            total += static_cast<double>(from_bf16(c.weight[row * inputs.size() + k])) * inputs[k];
          }
          return total;
        };
        std::vector<double> next = old;
        for (size_t r = 0; r < rank; ++r) {
          double expected = sigma(sum(r)) * token[r];
          if (is_recurrent) {
            const double gate = sigma(sum(r));
            next[r] = gate * old[r] + (1.0 - gate) * std::tanh(sum(rank + r));
            expected = std::tanh(sum(2 * rank + r));
          }
          CHECK_NEAR(from_bf16(states[i * rank + r]), expected, 0.01 * std::abs(expected) + 1e-5);
        }
        old = next;
      }
    }
  }
}
