#pragma once

#include "kernels/drafts/draft_rows.h"

namespace openspec {

/// Where a token of a sequence keeps its KV.
inline int64_t kv_slot_of(const TableView& table, int slot, int token, int page_size) {
  const int64_t page =
      table.pages.pages[int64_t{slot} * table.pages.max_pages_per_seq + token / page_size];
  return page * page_size + token % page_size;
}

/// Makes padding of the rows and spans behind the real ones.
inline void pad_rows(const DraftRows& out, int num_rows, int num_spans) {
  for (int row = num_rows; row < out.num_rows; ++row) {
    out.row_token[row] = out.row_position[row] = 0;
    out.row_span[row] = out.row_parent[row] = out.source[row] = -1;
    out.row_kv_slot[row] = -1;
  }
  for (int span = num_spans; span < out.num_spans; ++span) {
    out.span_kv_len[span] = out.span_seq[span] = 0;
    out.span_begin[span] = num_rows;
  }
  out.span_begin[out.num_spans] = num_rows;
}

}  // namespace openspec
