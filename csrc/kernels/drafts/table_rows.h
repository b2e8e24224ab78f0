#pragma once

#include <cstdint>

#include "kernels/choose/sampling_params.h"
#include "kernels/common/exec.h"
#include "kernels/common/rows.h"

/// What the ops on draft rows share: the table that they read and the rows that they fill.
namespace openspec {

/// The sequence table as arrays by slot, on the device that runs the step.
struct TableView {
  const int32_t* tokens = nullptr;  // [max_num_seqs, tokens_stride] history, last token included
  int64_t tokens_stride = 0;
  const int32_t* num_tokens = nullptr;  // [max_num_seqs]
  const SamplingParams* sampling = nullptr;
  PageTableView pages;
  int max_num_seqs = 0;
};

/// Arrays of a RowBatch that an op fills, and what belongs to them.
struct DraftRows {
  int num_rows = 0;              // room, padding included
  int num_spans = 0;             // room, empty ones included
  int32_t* row_token = nullptr;  // [num_rows], as the next four
  int32_t* row_position = nullptr;
  int32_t* row_span = nullptr;
  int32_t* row_parent = nullptr;
  int32_t* source = nullptr;       // where a row's feature comes from; -1: padding
  int64_t* row_kv_slot = nullptr;  // [num_rows]
  int32_t* span_begin = nullptr;   // [num_spans + 1]
  int32_t* span_kv_len = nullptr;  // [num_spans]
  int32_t* span_seq = nullptr;     // [num_spans]

  constexpr void set_span(int span, int begin, int kv_len, int seq) const {
    span_begin[span] = begin;
    span_kv_len[span] = kv_len;
    span_seq[span] = seq;
  }
  RowBatch batch(bool may_have_trees = false) const {
    return {num_rows,    num_spans,  row_token,   row_position, row_span,      row_parent,
            row_kv_slot, span_begin, span_kv_len, span_seq,     may_have_trees};
  }
};

OPENSPEC_HD int32_t last_token(const TableView& table, int slot) {
  return table.tokens[slot * table.tokens_stride + table.num_tokens[slot] - 1];
}

/// Where a token of a sequence keeps its KV.
constexpr int64_t kv_slot_of(const TableView& table, int slot, int token, int page_size) {
  const int64_t page =
      table.pages.pages[int64_t{slot} * table.pages.max_pages_per_seq + token / page_size];
  return page * page_size + token % page_size;
}

/// Makes padding of the rows from `num_rows` on. On the device by threads that start at `first` and
/// step by `stride`.
constexpr void pad_rows(const DraftRows& out, int num_rows, int first = 0, int stride = 1) {
  for (int row = num_rows + first; row < out.num_rows; row += stride) {
    out.row_token[row] = out.row_position[row] = 0;
    out.row_span[row] = out.row_parent[row] = out.source[row] = -1;
    out.row_kv_slot[row] = -1;
  }
  if (first == 0) out.span_begin[out.num_spans] = num_rows;
}

/// Empties the spans from `num_spans` on; `num_rows` rows precede them. On the device by threads
/// that start at `first` and step by `stride`.
constexpr void pad_spans(const DraftRows& out, int num_rows, int num_spans, int first = 0,
                         int stride = 1) {
  for (int span = num_spans + first; span < out.num_spans; span += stride) {
    out.span_begin[span] = num_rows;
    out.span_kv_len[span] = out.span_seq[span] = 0;
  }
}

}  // namespace openspec
