#pragma once

#include <cstdint>

#include "kernels/common/exec.h"
#include "kernels/drafts/table_rows.h"
#include "kernels/drafts/token_pairs.h"

namespace openspec {

/// What stands in for the first tokens' side of pairs where it depends on more than the token: the
/// states of the drafts at `depth`, one for each sequence that has so many. With e the row of
/// `first` of the token before, h the draft's output, sigma the logistic function:
///
///   gated:      state = sigma(weight [h; e] + bias) * e
///   recurrent:  [g; c; o] = weight [m; e; h] + bias
///               m = sigma(g) * m + (1 - sigma(g)) * tanh(c), zero before the first draft
///               state = tanh(o)
///
/// Source: the gated and the RNN head of DSpark (DeepSpec; speculators 0.9).
struct PairStatesParams {
  TableView table;
  const int32_t* seq = nullptr;           // [num_seqs] slots
  const int32_t* first_sample = nullptr;  // [num_seqs]
  const int32_t* num_drafts = nullptr;    // [num_seqs]
  int num_seqs = 0;
  int depth = 0;
  const int32_t* chosen = nullptr;  // [num_samples] tokens of the drafts before
  TokenPairs pairs;
  const void* outputs = nullptr;  // [num_samples, width] dtype
  int width = 0;
  bool is_recurrent = false;
  const void* weight = nullptr;  // [rank, width + rank] bf16; recurrent: [3 rank, 2 rank + width]
  const float* bias = nullptr;   // [rank] or [3 rank]
  // In and out [2, num_seqs, rank], recurrent alone: those before an even depth in the first half.
  float* memory = nullptr;
  DType dtype = DType::kF32;
  void* states = nullptr;  // out [num_seqs, rank] dtype; of sequences without such a draft anything
};

void pair_states_cpu(const ExecContext& exec, const PairStatesParams& params);
/// bf16; `width` is a multiple of 8. Another order of summation than the CPU's; a state depends on
/// nothing but its own sequence.
int pair_states_cuda(const PairStatesParams& params, void* stream);

}  // namespace openspec
