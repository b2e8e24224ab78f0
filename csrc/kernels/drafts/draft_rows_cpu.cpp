#include <algorithm>

#include "kernels/drafts/draft_rows.h"

namespace openspec {

void extend_rows_cpu(const ExecContext&, const ExtendRowsParams& params) {
  const RowBatch& step = params.step;
  const TableView& table = params.table;
  const DraftRows& out = params.out;
  if (params.last_row != nullptr) std::fill_n(params.last_row, table.max_num_seqs, -1);
  int row = 0;
  for (int span = 0; span < step.num_spans; ++span) {
    const int slot = step.span_seq[span];
    const int first = step.span_begin[span];
    const int before = params.num_before(span);
    const int count = params.num_computed[span] + before;
    const int begin = step.span_kv_len[span] + params.shift - before;
    out.set_span(span, row, count > 0 ? begin : 0, slot);
    for (int i = 0; i < count; ++i, ++row) {
      const int position = begin + i;
      out.row_token[row] = table.tokens[slot * table.tokens_stride + position];
      out.row_position[row] = position;
      out.row_span[row] = span;
      out.row_parent[row] = i == 0 ? -1 : row - 1;
      out.row_kv_slot[row] = kv_slot_of(table, slot, position, params.page_size);
      const int source = first + i - before;
      if (i < before) {
        out.source[row] = -1;
      } else {
        out.source[row] = params.committed_row != nullptr ? params.committed_row[source] : source;
      }
      if (params.last_row != nullptr && position == table.num_tokens[slot] - 1) {
        params.last_row[slot] = row;
      }
    }
  }
  pad_spans(out, row, step.num_spans);
  pad_rows(out, row);
}

void chain_rows_cpu(const ExecContext&, const ChainRowsParams& params) {
  const TableView& table = params.table;
  const DraftRows& out = params.out;
  int row = 0;
  for (int i = 0; i < params.num_seqs; ++i) {
    const int num_wanted = params.num_wanted[i];
    if (params.depth == 0) {
      params.num_drafts[i] = num_wanted;
      if (params.row_of_seq != nullptr) params.row_of_seq[i] = num_wanted > 0 ? row : -1;
    }
    if (num_wanted == 0) continue;
    const int slot = params.seq[i];
    const int position = table.num_tokens[slot] - 1 + std::min(params.depth, num_wanted - 1);
    int32_t* drafts = params.drafts + int64_t{i} * params.max_drafts;
    if (params.depth > 0) drafts[params.depth - 1] = params.chosen[row];
    if (params.depth < params.max_drafts) {
      out.row_token[row] = params.depth > 0 ? params.chosen[row]
                                            : table.tokens[slot * table.tokens_stride + position];
      out.row_position[row] = position;
      out.row_span[row] = row;
      out.row_parent[row] = -1;
      out.row_kv_slot[row] =
          params.depth < num_wanted ? kv_slot_of(table, slot, position, params.page_size) : -1;
      out.source[row] = slot;
      out.set_span(row, row, position, slot);
    }
    ++row;
  }
  if (params.depth == params.max_drafts) return;
  pad_spans(out, row, row);
  pad_rows(out, row);
}

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
