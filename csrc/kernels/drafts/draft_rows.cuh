#pragma once

#include <cstdint>

#include "kernels/drafts/draft_rows.h"

namespace openspec::cuda {

/// Where a token of a sequence keeps its KV.
inline __device__ int64_t kv_slot_of(const TableView& table, int slot, int token, int page_size) {
  const int64_t page =
      table.pages.pages[int64_t{slot} * table.pages.max_pages_per_seq + token / page_size];
  return page * page_size + token % page_size;
}

/// Makes padding of the rows from `num_rows` on, by threads that start at `first` and step by
/// `stride`.
inline __device__ void pad_rows(const DraftRows& out, int num_rows, int first, int stride) {
  for (int row = num_rows + first; row < out.num_rows; row += stride) {
    out.row_token[row] = out.row_position[row] = 0;
    out.row_span[row] = out.row_parent[row] = out.source[row] = -1;
    out.row_kv_slot[row] = -1;
  }
  if (first == 0) out.span_begin[out.num_spans] = num_rows;
}

/// The same of the spans.
inline __device__ void pad_spans(const DraftRows& out, int num_rows, int num_spans, int first,
                                 int stride) {
  for (int span = num_spans + first; span < out.num_spans; span += stride) {
    out.span_begin[span] = num_rows;
    out.span_kv_len[span] = out.span_seq[span] = 0;
  }
}

}  // namespace openspec::cuda
