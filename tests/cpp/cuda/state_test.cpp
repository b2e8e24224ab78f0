// Sequences with a running state on the GPU, with the host one step ahead: the text is that of
// plain evaluation whatever is drafted, accepted, given up, preempted or found in the prefix cache.

#include "cuda/cuda_testing.h"
#include "cuda/running_state_device.h"
#include "runtime/running_target.h"

using namespace openspec;

namespace {

testing::NeedsDevice needs_device;

const bool kHasKernels = [] {
  testing::running_kernels = {&testing::running_pass_cuda, &testing::running_logits_cuda,
                              &testing::running_guesses_cuda};
  return true;
}();

}  // namespace

TEST(text_is_that_of_plain_evaluation_under_chains) {
  CHECK(kHasKernels);
  testing::check_all_schedules(Device::kCuda, /*makes_trees=*/false, /*has_entries=*/false);
}

TEST(text_is_that_of_plain_evaluation_under_trees) {
  testing::check_all_schedules(Device::kCuda, /*makes_trees=*/true, /*has_entries=*/false);
}

TEST(text_is_that_of_plain_evaluation_where_the_last_cached_token_runs_again) {
  testing::check_all_schedules(Device::kCuda, /*makes_trees=*/true, /*has_entries=*/true);
}

TEST(text_is_that_of_plain_evaluation_where_sequences_sit_steps_out) {
  testing::check_holds(Device::kCuda, /*makes_trees=*/false);
  testing::check_holds(Device::kCuda, /*makes_trees=*/true);
}

TEST(every_part_of_chains_and_trees_of_every_length_may_be_accepted) {
  testing::check_every_acceptance(Device::kCuda, /*width=*/1);
  testing::check_every_acceptance(Device::kCuda, /*width=*/3);
}
