#include <cuda_runtime.h>

#include "kernels/common/block_sum.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/drafts/draft_rows.h"
#include "kernels/steps/step_rows.h"

namespace openspec {
namespace {

constexpr int kThreads = kMaxStepSpans;  // a thread of the one block for each span
static_assert(kThreads == 1024, "as block_exclusive_sum has it");

__global__ void __launch_bounds__(kThreads) extend_rows_kernel(ExtendRowsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  __shared__ int begin_of[kThreads + 1];
  __shared__ int warp_sums[kThreads / 32];
  const RowBatch& step = params.step;
  const TableView& table = params.table;
  const DraftRows& out = params.out;
  const int thread = threadIdx.x;
  if (params.last_row != nullptr) {
    for (int slot = thread; slot < table.max_num_seqs; slot += kThreads) params.last_row[slot] = -1;
  }

  const int count =
      thread < step.num_spans ? params.num_computed[thread] + params.num_before(thread) : 0;
  int num_rows;
  const int begin = cuda::block_exclusive_sum(count, warp_sums, &num_rows);
  begin_of[thread] = begin;
  if (thread == 0) begin_of[kThreads] = num_rows;
  if (thread < step.num_spans) {
    const int kv_len =
        count > 0 ? step.span_kv_len[thread] + params.shift - params.num_before(thread) : 0;
    out.set_span(thread, begin, kv_len, step.span_seq[thread]);
  }
  __syncthreads();
  for (int row = thread; row < num_rows; row += kThreads) {
    int span = 0;
    for (int width = kThreads / 2; width > 0; width /= 2) {
      if (begin_of[span + width] <= row) span += width;
    }
    const int i = row - begin_of[span];
    const int slot = step.span_seq[span];
    const int before = params.num_before(span);
    const int position = step.span_kv_len[span] + params.shift - before + i;
    out.row_token[row] = table.tokens[slot * table.tokens_stride + position];
    out.row_position[row] = position;
    out.row_span[row] = span;
    out.row_parent[row] = i == 0 ? -1 : row - 1;
    out.row_kv_slot[row] = kv_slot_of(table, slot, position, params.page_size);
    const int source = step.span_begin[span] + i - before;
    if (i < before) {
      out.source[row] = -1;
    } else {
      out.source[row] = params.committed_row != nullptr ? params.committed_row[source] : source;
    }
    if (params.last_row != nullptr && position == table.num_tokens[slot] - 1) {
      params.last_row[slot] = row;
    }
  }
  pad_rows(out, num_rows, thread, kThreads);
}

__global__ void __launch_bounds__(kThreads) chain_rows_kernel(ChainRowsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  __shared__ int warp_sums[kThreads / 32];
  const TableView& table = params.table;
  const DraftRows& out = params.out;
  const int i = threadIdx.x;
  const int num_wanted = i < params.num_seqs ? params.num_wanted[i] : 0;
  int num_rows;
  const int row = cuda::block_exclusive_sum(num_wanted > 0 ? 1 : 0, warp_sums, &num_rows);
  if (i < params.num_seqs && params.depth == 0) {
    params.num_drafts[i] = num_wanted;
    if (params.row_of_seq != nullptr) params.row_of_seq[i] = num_wanted > 0 ? row : -1;
  }
  int32_t token = 0;
  if (num_wanted > 0 && params.depth > 0) {
    token = params.chosen[row];
    params.drafts[int64_t{i} * params.max_drafts + params.depth - 1] = token;
  }
  if (params.depth == params.max_drafts) return;
  if (num_wanted > 0) {
    const int slot = params.seq[i];
    const int position = table.num_tokens[slot] - 1 + min(params.depth, num_wanted - 1);
    if (params.depth == 0) token = table.tokens[slot * table.tokens_stride + position];
    out.row_token[row] = token;
    out.row_position[row] = position;
    out.row_span[row] = row;
    out.row_parent[row] = -1;
    out.row_kv_slot[row] =
        params.depth < num_wanted ? kv_slot_of(table, slot, position, params.page_size) : -1;
    out.source[row] = slot;
    out.set_span(row, row, position, slot);
  }
  pad_spans(out, num_rows, num_rows, i, kThreads);
  pad_rows(out, num_rows, i, kThreads);
}

constexpr int kWindowThreads = 128;

/// A block for each span.
__global__ void __launch_bounds__(kWindowThreads) window_spans_kernel(WindowSpansParams params) {
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
  for (int i = threadIdx.x; i < end - first; i += kWindowThreads) out[i] = pages[first + i];
}

}  // namespace

int extend_rows_cuda(const ExtendRowsParams& params, void* stream) {
  if (params.step.num_spans > kThreads) return cudaErrorInvalidValue;
  return cuda::launch(extend_rows_kernel, dim3(1), dim3(kThreads), 0, stream, params);
}

int chain_rows_cuda(const ChainRowsParams& params, void* stream) {
  if (params.num_seqs > kThreads) return cudaErrorInvalidValue;
  return cuda::launch(chain_rows_kernel, dim3(1), dim3(kThreads), 0, stream, params);
}

int window_spans_cuda(const WindowSpansParams& params, void* stream) {
  return cuda::launch(window_spans_kernel, params.num_spans, kWindowThreads, 0, stream, params);
}

}  // namespace openspec
