#include <algorithm>

#include "kernels/drafts/draft_window.h"

namespace openspec {

void window_spans_cpu(const ExecContext&, const WindowSpansParams& params) {
  for (int span = 0; span < params.num_spans; ++span) {
    const int num_rows = params.span_begin[span + 1] - params.span_begin[span];
    const int kv_len = params.span_kv_len[span];
    const int begin = window_begin(kv_len, params.window, params.page_size);
    params.out_seq[span] = span;
    params.out_kv_len[span] = kv_len - begin;
    if (num_rows == 0) continue;
    const int first = begin / params.page_size;
    const int end = (kv_len + num_rows + params.page_size - 1) / params.page_size;
    const int32_t* pages =
        params.from.pages + int64_t{params.span_seq[span]} * params.from.max_pages_per_seq;
    std::copy(pages + first, pages + std::min(end, params.from.max_pages_per_seq),
              params.out_pages + int64_t{span} * params.max_pages);
  }
}

}  // namespace openspec
