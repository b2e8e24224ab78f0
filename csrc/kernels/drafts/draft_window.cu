#include <cuda_runtime.h>

#include "kernels/common/launch.cuh"
#include "kernels/drafts/draft_window.h"

namespace openspec {
namespace {

constexpr int kThreads = 128;

/// A block for each span.
__global__ void __launch_bounds__(kThreads) window_spans_kernel(WindowSpansParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int span = blockIdx.x;
  const int num_rows = params.span_begin[span + 1] - params.span_begin[span];
  const int kv_len = params.span_kv_len[span];
  const int begin = window_begin(kv_len, params.window, params.page_size);
  if (threadIdx.x == 0) {
    params.out_seq[span] = span;
    params.out_kv_len[span] = kv_len - begin;
  }
  if (num_rows == 0) return;
  const int first = begin / params.page_size;
  const int end = min((kv_len + num_rows + params.page_size - 1) / params.page_size,
                      params.from.max_pages_per_seq);
  const int32_t* pages =
      params.from.pages + int64_t{params.span_seq[span]} * params.from.max_pages_per_seq;
  int32_t* out = params.out_pages + int64_t{span} * params.max_pages;
  for (int i = threadIdx.x; i < end - first; i += kThreads) out[i] = pages[first + i];
}

}  // namespace

int window_spans_cuda(const WindowSpansParams& params, void* stream) {
  return cuda::launch(window_spans_kernel, dim3(params.num_spans), dim3(kThreads), 0, stream,
                      params);
}

}  // namespace openspec
