#pragma once

/// Prompts and other long spans: a CTA has some columns of a head, and warps of four kinds that
/// work a block of 16 positions apart, with one barrier a block. At block b
///
///   state warps, 16 columns each, fold b - 1 and multiply with the rows of b + 1;
///   settling warps, a column a lane, make the deltas of b;
///   output warps make the outputs of b - 1 and the norms of b + 2;
///   aides load b + 4 and multiply k and q of b + 1 with each other.

#include "kernels/common/launch.cuh"
#include "kernels/delta_net/prompt_plan.cuh"
#include "kernels/delta_net/prompt_warps.cuh"

namespace openspec::gated_delta {

/// Spans of more than `step_rows` rows, their outputs before norm and gate. Parts of a head along
/// blockIdx.x, heads along y, spans along z.
template <int kColumns, int kMinBlocks>
__global__ void __launch_bounds__(PromptPlan<kColumns>::kThreads, kMinBlocks)
    run_prompts(const __grid_constant__ DeltaNetParams params, const Workspace workspace,
                int step_rows) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  using Plan = PromptPlan<kColumns>;
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int span = static_cast<int>(blockIdx.z);
  if (params.rows.span_begin[span + 1] - params.rows.span_begin[span] <= step_rows) return;
  const Plan plan(params, workspace, *reinterpret_cast<PromptShared<kColumns>*>(shared_bytes));
  const int warp = static_cast<int>(threadIdx.x) / 32;
  constexpr int kFirstPair = Plan::kStateWarps + kAides;
  if (warp < Plan::kStateWarps) {
    PromptState<kColumns>(plan, warp).run();
  } else if (warp < kFirstPair) {
    PromptAide<kColumns>(plan, warp - Plan::kStateWarps).run();
  } else if (warp < kFirstPair + Plan::kPairWarps) {
    PromptDeltas<kColumns>(plan, warp - kFirstPair).run();
  } else {
    PromptOutput<kColumns>(plan, warp - kFirstPair - Plan::kPairWarps).run();
  }
}

}  // namespace openspec::gated_delta
