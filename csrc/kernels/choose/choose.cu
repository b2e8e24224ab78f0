#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/choose/choose.h"
#include "kernels/choose/finish.cuh"
#include "kernels/choose/row.cuh"
#include "kernels/common/launch.cuh"

// Compile with -fmad=false (sample_math.h): the CPU's bits are promised.

namespace openspec {
namespace {

using namespace choosing;  // NOLINT

/// One pass over the logits, a warp per group of a row: decides argmax and unfiltered draws up to
/// the best of the groups, finds the groups' largest logits for the rest, and copies rows that are
/// to be edited.
template <bool kIsDraft>
__global__ void __launch_bounds__(kScanThreads)
    choose_scan_kernel(const __grid_constant__ ChooseParams params) {
  cuda::allow_next_kernel();
  const int turn = static_cast<int>(blockIdx.y);
  const int group = static_cast<int>(blockIdx.x) * kScanWarps + warp_index();
  const int lane = lane_index();
  const int32_t* token_of = kIsDraft ? params.token_of : nullptr;
  if (token_of != nullptr) {
    // A table that never changes: on its way to L2 while the kernel before this one finishes.
    const int32_t column = group * kChunk + lane * (kChunk / kWarp);
    if (column < params.vocab_size) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(token_of + column));
    }
  }
  cuda::wait_for_previous_kernel();
  const RowWorkspace workspace = row_workspace<true>(params, turn);
  const int sample = sample_at(params, turn);
  const int row = sample < 0 ? -1 : params.sample_row[sample];
  const bool has_no_choice = !kIsDraft && row >= 0 && is_held(params, sample);
  if (row < 0 || has_no_choice) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      *workspace.plan = {};
      if (has_no_choice) params.chosen[sample] = kNoChoice;
    }
    return;
  }
  // The logits are on their way while the plan follows its pointers.
  const View raw{row_logits(params, sample), params.vocab_size, 1.0f};
  Batch batch;
  batch.load(raw.values, raw.size, group, lane);
  const RowPlan plan = plan_row<kIsDraft>(params, sample, row);
  const SamplingParams& sampling = params.sampling[plan.slot];

  constexpr int32_t kDecidedLater = RowPlan::kIsScored | RowPlan::kIsEdited | RowPlan::kIsFiltered;
  const bool is_drawn = plan.has(RowPlan::kIsDrawn) && !plan.has(kDecidedLater);
  GroupWalk walk{raw, nullptr, plan.position + 1, nullptr, false, token_of};
  if (is_drawn) {
    walk.view.scale = 1.0f / sampling.temperature;
    walk.noise = &sampling;
    if (kIsDraft && params.has_own_noise) walk.other_noise = sm::kDraftNoise;
  }
  if (plan.has(RowPlan::kIsEdited)) {
    walk.copy = workspace.edited;
    walk.copies_nothing = sampling.num_allowed > 0;
    walk.mask = row_mask_of(params, sample);
  }
  const GroupBest result = walk.run(batch, group, lane);
  if (lane == 0) {
    workspace.best[group] = result.best;
    workspace.largest[group] = result.largest;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *workspace.plan = plan;
}

/// A cluster per row. Two CTAs fit an SM, so that one computes while the other waits.
template <bool kHasDrafts>
__global__ void __launch_bounds__(kThreads, 2)
    choose_finish_kernel(const __grid_constant__ ChooseParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  __shared__ Shared shared;
  const int turn = static_cast<int>(blockIdx.x) / cluster_size();
  const RowWorkspace workspace = row_workspace<true>(params, turn);
  const RowPlan plan = *workspace.plan;
  if (!plan.has(RowPlan::kIsReal)) return;
  const int sample = sample_at(params, turn);
  constexpr int32_t kIsUnfinished = RowPlan::kIsScored | RowPlan::kIsEdited | RowPlan::kIsFiltered |
                                    RowPlan::kIsReported | RowPlan::kHasDraft;
  if (!plan.has(kIsUnfinished)) {
    if (cluster_rank() != 0 || warp_index() != 0) return;
    const uint64_t best = RowFinisher<kHasDrafts>::best_of_groups(workspace.best);
    if (lane_index() == 0) params.chosen[sample] = token_of_column(params.token_of, id_of(best));
    return;
  }
  RowFinisher<kHasDrafts>(params, sample, plan, workspace, shared).run();
}

}  // namespace

size_t choose_workspace_bytes_cuda(int max_num_samples, int vocab_size) {
  return static_cast<size_t>(max_num_samples) * row_workspace_bytes(vocab_size, true);
}

int choose_cuda(const ChooseParams& params, void* stream) {
  const bool is_for_drafts = params.token_of != nullptr || params.samples != nullptr;
  if (is_for_drafts && !params.is_draft) return cudaErrorInvalidValue;
  if (params.drafts.logits.vocab_size > params.vocab_size) return cudaErrorInvalidValue;
  if (params.num_samples == 0) return cudaSuccess;
  const dim3 grid(kGroups / kScanWarps, static_cast<unsigned>(params.num_samples));
  auto* scan = params.is_draft ? choose_scan_kernel<true> : choose_scan_kernel<false>;
  const int error = cuda::launch(scan, grid, dim3(kScanThreads), 0, stream, params);
  const bool has_drafts = params.drafts.logits.values != nullptr;
  auto* finish = has_drafts ? choose_finish_kernel<true> : choose_finish_kernel<false>;
  return error != cudaSuccess ? error : launch_clusters(finish, params.num_samples, params, stream);
}

}  // namespace openspec
