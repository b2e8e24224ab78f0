#include <bit>
#include <cmath>
#include <vector>

#include "core/check.h"
#include "kernels/drafts/pair_states.h"

namespace openspec {

namespace {

float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t to_bf16(float x) {  // to nearest, ties to even
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float sigma(float x) { return 1.0f / (1.0f + std::exp(-x)); }

/// One sequence's inputs in the order of the weight's columns, and its sums.
class Sums {
 public:
  explicit Sums(const PairStatesParams& params)
      : weight_(static_cast<const uint16_t*>(params.weight)), bias_(params.bias) {}

  void add_bf16(const uint16_t* values, int count) {
    for (int k = 0; k < count; ++k) inputs_.push_back(from_bf16(values[k]));
  }
  void add(const float* values, int count) {
    inputs_.insert(inputs_.end(), values, values + count);
  }
  void add(const void* values, DType dtype, int64_t at, int count) {
    if (dtype == DType::kF32) {
      add(static_cast<const float*>(values) + at, count);
    } else {
      add_bf16(static_cast<const uint16_t*>(values) + at, count);
    }
  }
  float of(int row) const {
    const uint16_t* weights = weight_ + static_cast<int64_t>(row) * std::ssize(inputs_);
    float sum = 0.0f;
    for (size_t k = 0; k < inputs_.size(); ++k) sum += from_bf16(weights[k]) * inputs_[k];
    return sum + bias_[row];
  }

 private:
  const uint16_t* weight_;
  const float* bias_;
  std::vector<float> inputs_;
};

}  // namespace

void pair_states_cpu(const ExecContext&, const PairStatesParams& params) {
  const TokenPairs& pairs = params.pairs;
  const int rank = pairs.rank;
  OPENSPEC_CHECK(rank > 0 && rank <= kMaxPairRank, "pairs of rank ", rank);
  for (int i = 0; i < params.num_seqs; ++i) {
    if (params.depth >= params.num_drafts[i]) continue;
    const int64_t sample = int64_t{params.first_sample[i]} + params.depth;
    const int32_t before =
        params.depth > 0 ? params.chosen[sample - 1] : last_token(params.table, params.seq[i]);
    const uint16_t* token = row_of(pairs.first, before, rank);
    const int64_t half = int64_t{params.num_seqs} * rank;
    const float nothing[kMaxPairRank] = {};
    const float* memory = nothing;
    float* next = nullptr;
    Sums sums(params);
    if (params.is_recurrent) {
      float* halves[] = {params.memory + int64_t{i} * rank,
                         params.memory + half + int64_t{i} * rank};
      if (params.depth > 0) memory = halves[params.depth % 2];
      next = halves[1 - params.depth % 2];
      sums.add(memory, rank);
      sums.add_bf16(token, rank);
      sums.add(params.outputs, params.dtype, sample * params.width, params.width);
    } else {
      sums.add(params.outputs, params.dtype, sample * params.width, params.width);
      sums.add_bf16(token, rank);
    }
    for (int r = 0; r < rank; ++r) {
      float state;
      if (params.is_recurrent) {
        const float gate = sigma(sums.of(r));
        next[r] = gate * memory[r] + (1.0f - gate) * std::tanh(sums.of(rank + r));
        state = std::tanh(sums.of(2 * rank + r));
      } else {
        state = sigma(sums.of(r)) * from_bf16(token[r]);
      }
      const int64_t at = int64_t{i} * rank + r;
      if (params.dtype == DType::kF32) {
        static_cast<float*>(params.states)[at] = state;
      } else {
        static_cast<uint16_t*>(params.states)[at] = to_bf16(state);
      }
    }
  }
}

}  // namespace openspec
