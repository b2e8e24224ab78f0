#include <cuda_runtime.h>

#include "kernels/common/block_sum.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/common/packs.cuh"
#include "kernels/drafts/kept_rows.h"
#include "kernels/steps/step_rows.h"

namespace openspec {
namespace {

constexpr int kCopyThreads = 256;
constexpr int kThreads = kMaxStepSpans;  // a thread of the one block for each slot
static_assert(kThreads == 1024, "as block_exclusive_sum has it");

/// One span per blockIdx.x; blockIdx.y cuts wide rows into stripes.
__global__ void __launch_bounds__(kCopyThreads) keep_rows_kernel(KeepRowsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int span = blockIdx.x;
  if (params.num_computed[span] == 0) return;
  const int64_t num_chunks = params.kept.width_bytes / sizeof(uint4);
  const int64_t at = int64_t{blockIdx.y} * kCopyThreads + threadIdx.x;
  if (at >= num_chunks) return;
  const int64_t place = int64_t{params.rows.span_seq[span]} * kMaxKeptRows +
                        params.rows.span_kv_len[span] % kMaxKeptRows;
  const auto* from = static_cast<const uint4*>(params.features);
  auto* to = static_cast<uint4*>(params.kept.features);
  to[place * num_chunks + at] = from[params.rows.span_begin[span] * num_chunks + at];
}

__global__ void __launch_bounds__(kThreads) take_kept_rows_kernel(TakeKeptRowsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  __shared__ int warp_sums[kThreads / 32];
  const int i = threadIdx.x;
  const int most = min(kMaxKeptRows, params.num_rows / max(1, params.num_slots));
  int slot = 0, end = 0, count = 0;
  if (i < params.num_slots) {
    slot = params.slot[i];
    end = params.kv_len[slot];
    count = min(max(end - params.kept.begin[slot], 0), most);
    params.kept.begin[slot] = end;
  }
  int num_rows;
  const int begin = cuda::block_exclusive_sum(count, warp_sums, &num_rows);
  if (i < params.num_slots) {
    params.span_begin[i] = begin;
    params.span_kv_len[i] = end - count;
    params.num_computed[i] = count;
    for (int row = 0; row < count; ++row) {
      params.source[begin + row] = slot * kMaxKeptRows + (end - count + row) % kMaxKeptRows;
    }
  }
  if (i == 0) params.span_begin[params.num_slots] = num_rows;
  for (int row = num_rows + i; row < params.num_rows; row += kThreads) params.source[row] = -1;
}

}  // namespace

int keep_rows_cuda(const KeepRowsParams& params, void* stream) {
  const int64_t num_chunks = params.kept.width_bytes / static_cast<int64_t>(sizeof(uint4));
  if (num_chunks <= 0 || params.kept.width_bytes % static_cast<int64_t>(sizeof(uint4)) != 0 ||
      !cuda::are_aligned(params.features, params.kept.features)) {
    return cudaErrorInvalidValue;
  }
  const int64_t num_stripes = (num_chunks + kCopyThreads - 1) / kCopyThreads;
  return cuda::launch(keep_rows_kernel,
                      dim3(params.rows.num_spans, static_cast<unsigned>(num_stripes)), kCopyThreads,
                      0, stream, params);
}

int take_kept_rows_cuda(const TakeKeptRowsParams& params, void* stream) {
  if (params.num_slots > kThreads) return cudaErrorInvalidValue;
  return cuda::launch(take_kept_rows_kernel, dim3(1), dim3(kThreads), 0, stream, params);
}

}  // namespace openspec
