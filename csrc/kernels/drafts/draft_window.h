#pragma once

#include <cstdint>

#include "kernels/common/exec.h"
#include "kernels/common/rows.h"

/// Draft rows that see the last tokens of their sequence only. A drafter's attention then costs the
/// same however long the context is, and heads that were trained on short texts are kept among the
/// distances they know. Rows keep their true positions.
namespace openspec {

/// Turns spans over whole sequences into spans over the pages of a window: such a span has a row of
/// the page table to itself and counts its committed tokens from the first page it sees. That of
/// an empty span stays as it is.
struct WindowSpansParams {
  const int32_t* span_begin = nullptr;   // [num_spans + 1]
  const int32_t* span_kv_len = nullptr;  // [num_spans] of the whole sequence
  const int32_t* span_seq = nullptr;     // [num_spans] row of `from`
  PageTableView from;
  int num_spans = 0;
  int window = 0;  // committed tokens that a span sees at least; the first page may hold more
  int page_size = 0;
  int max_pages = 0;              // of a span: window_pages(...)
  int32_t* out_kv_len = nullptr;  // out [num_spans]
  int32_t* out_seq = nullptr;     // out [num_spans] the span's own number
  int32_t* out_pages = nullptr;   // out [num_spans, max_pages]
};

/// Pages that a window of so many committed tokens and the rows behind them can touch.
constexpr int window_pages(int window, int max_span_rows, int page_size) {
  return (window + max_span_rows + page_size - 2) / page_size + 1;
}
/// The first token, the beginning of a page.
constexpr int window_begin(int kv_len, int window, int page_size) {
  return kv_len <= window ? 0 : (kv_len - window) / page_size * page_size;
}

void window_spans_cpu(const ExecContext& exec, const WindowSpansParams& params);
#ifdef OPENSPEC_CUDA
int window_spans_cuda(const WindowSpansParams& params, void* stream);
#endif

}  // namespace openspec
