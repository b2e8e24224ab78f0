#include <cuda_runtime.h>

#include "kernels/common/launch.cuh"
#include "kernels/steps/step_rows.h"

namespace openspec {
namespace {

constexpr int kThreads = 128;
constexpr unsigned kAllLanes = 0xffffffffu;

/// The sum over the drafts of a span, by one warp. All lanes get the same bits, and so do all
/// ranks.
__device__ float worth_of(int num_drafts, float acceptance, const float* scores, float price) {
  float worth = 0.0f;
  for (int i = threadIdx.x % 32; i < num_drafts; i += 32) {
    worth += worth_of_draft(i, acceptance, scores, price);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    worth += __shfl_xor_sync(kAllLanes, worth, offset);
  }
  return worth;
}

/// A warp for each span.
__global__ void __launch_bounds__(kThreads) choose_source_kernel(ChooseSourceParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int s = (blockIdx.x * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (s >= params.max_spans) return;
  const StepHeader header = *params.input.header;
  int num_drafts = 0, is_copied = 0, copied_class = -1;
  if (s < header.num_spans) {
    const StepSpan& span = params.input.spans[s];
    const int64_t first = static_cast<int64_t>(s) * params.max_drafts;
    const int64_t first_drafter = static_cast<int64_t>(s) * params.max_drafter_drafts;
    const int64_t first_copied = static_cast<int64_t>(s) * params.copied.max_drafts;
    if (params.num_drafter_drafts != nullptr) {
      num_drafts = max(0, min(params.num_drafter_drafts[s], params.max_drafter_drafts));
    }
    const float* scores =
        params.drafter_scores != nullptr ? params.drafter_scores + first_drafter : nullptr;
    const int match_len = params.copied.match_len[s];
    const CopyOpinion opinion = opinion_of(num_drafts, params.drafter_drafts + first_drafter,
                                           params.copied.drafts[first_copied]);
    if (match_len > 0) copied_class = copy_class(match_len, opinion);
    const int num_copied =
        params.takes_copies && copied_class >= 0 ? params.copied.num_drafts[s] : 0;
    const float acceptance = copied_class >= 0 ? span.copied_acceptance[copied_class] : 0.0f;
    const auto worth = [&](int count, float ratio, const float* by_scores) {
      return worth_of(min(count, header.row_share), ratio, by_scores, header.row_price);
    };
    is_copied = is_copy_better(worth(num_copied, acceptance, nullptr),
                               worth(num_drafts, span.acceptance, scores));
    if (is_copied) {
      num_drafts = num_copied;
      for (int i = lane; i < num_copied; i += 32) {
        params.drafts[first + i] = params.copied.drafts[first_copied + i];
        if (params.parents != nullptr) params.parents[first + i] = i - 1;
        if (params.scores != nullptr) {
          params.scores[first + i] = static_cast<float>(i + 1) * logf(acceptance);
        }
      }
      __syncwarp();
      if (lane == 0) params.spans[s].acceptance = acceptance;
    } else {
      for (int i = lane; i < num_drafts; i += 32) {
        params.drafts[first + i] = params.drafter_drafts[first_drafter + i];
        if (params.parents != nullptr) {
          params.parents[first + i] = params.drafter_parents[first_drafter + i];
        }
        if (params.scores != nullptr) params.scores[first + i] = scores[i];
      }
    }
  }
  if (lane == 0) {
    params.num_drafts[s] = num_drafts;
    params.is_copied[s] = is_copied;
    params.copy_class[s] = copied_class;
  }
}

}  // namespace

int choose_source_cuda(const ChooseSourceParams& params, void* stream) {
  const int num_blocks = (params.max_spans * 32 + kThreads - 1) / kThreads;
  return cuda::launch(choose_source_kernel, num_blocks, kThreads, 0, stream, params);
}

}  // namespace openspec
