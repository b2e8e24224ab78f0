// The target and the drafter of state_test.cpp on the device.

#include "cuda/running_state_device.h"
#include "kernels/common/launch.cuh"

namespace openspec::testing {
namespace {

constexpr int kThreads = 128;

__global__ void pass_kernel(RunningPass pass) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  run_span(pass, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
}

__global__ void logits_kernel(RunningLogits pass) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  for (int column = threadIdx.x; column < pass.vocab_size; column += kThreads) {
    run_logit(pass, static_cast<int>(blockIdx.x), column);
  }
}

__global__ void guess_kernel(RunningGuesses all) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  for (int i = threadIdx.x; i < all.num_seqs; i += kThreads) guess_of(all, i);
}

}  // namespace

int running_pass_cuda(const RunningPass& pass, void* stream) {
  return cuda::launch(pass_kernel, pass.rows.num_spans, kStateWords, 0, stream, pass);
}

int running_logits_cuda(const RunningLogits& pass, int count, void* stream) {
  return cuda::launch(logits_kernel, count, kThreads, 0, stream, pass);
}

int running_guesses_cuda(const RunningGuesses& all, void* stream) {
  return cuda::launch(guess_kernel, 1, kThreads, 0, stream, all);
}

}  // namespace openspec::testing
