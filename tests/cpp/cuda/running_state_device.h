#pragma once

#include "runtime/running_state.h"

namespace openspec::testing {

// Each returns a cudaError_t.
int running_pass_cuda(const RunningPass& pass, void* stream);
int running_logits_cuda(const RunningLogits& pass, int count, void* stream);
int running_guesses_cuda(const RunningGuesses& all, void* stream);

}  // namespace openspec::testing
