#pragma once

#include <cstdint>

#include "kernels/choose/choose.h"
#include "kernels/common/exec.h"
#include "kernels/common/rows.h"

/// The rows of a drafter that is itself a small model with KV in the page pool: those that teach it
/// what a step has committed, and those on which it draws its drafts one after another.
///
/// A drafter's entry at position p is made of the token at p and the target's features at p - 1
/// (position 0 then has none) or of the features at p, so it depends on no later token and pages
/// may be shared by their tokens.
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
  int num_spans = 0;             // likewise
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

/// The same of the spans.
constexpr void pad_spans(const DraftRows& out, int num_rows, int num_spans, int first = 0,
                         int stride = 1) {
  for (int span = num_spans + first; span < out.num_spans; span += stride) {
    out.span_begin[span] = num_rows;
    out.span_kv_len[span] = out.span_seq[span] = 0;
  }
}

/// Rows that the committed rows of a step become: `shift` positions on, with the token that was
/// known or chosen there. `source` is the row of the step whose features they take.
struct ExtendRowsParams {
  RowBatch step;
  const int32_t* num_computed = nullptr;  // [step.num_spans] rows of a span that count
  // [step.num_rows] at span_begin + i, the i-th row of the span that counts; null: row i, as where
  // all drafts are chains.
  const int32_t* committed_row = nullptr;
  TableView table;  // after the commit
  int page_size = 0;
  int shift = 1;  // 1, or 0: a row keeps its position
  DraftRows out;  // num_rows and num_spans as in the step
  /// out [max_num_seqs] by slot: the row of the last known token; -1: the step did not reach it.
  /// Null where it has none, that is without a shift.
  int32_t* last_row = nullptr;
};

void extend_rows_cpu(const ExecContext& exec, const ExtendRowsParams& params);
int extend_rows_cuda(const ExtendRowsParams& params, void* stream);

/// One row for every sequence that wants drafts: `depth` 0 is its last known token, `depth` d its
/// d-th draft, chosen by the row before. Called for depths 0 to K in turn, each call stores the
/// drafts that were chosen on the rows of the one before; the last only stores. `source` is the
/// sequence's slot. Where fewer drafts are wanted there may be no page for more: such a row stays
/// at the last place that is wanted, writes no KV, and what comes of it is not counted.
struct ChainRowsParams {
  TableView table;
  const int32_t* seq = nullptr;         // [num_seqs] slots
  const int32_t* num_wanted = nullptr;  // [num_seqs]
  int num_seqs = 0;
  int max_drafts = 0;
  int depth = 0;
  int page_size = 0;
  const int32_t* chosen = nullptr;  // [out.num_rows] of the depth before
  DraftRows out;                    // num_rows = num_spans = num_seqs; one row a span
  int32_t* drafts = nullptr;        // out [num_seqs, max_drafts]
  int32_t* num_drafts = nullptr;    // out [num_seqs]
  int32_t* row_of_seq = nullptr;    // out [num_seqs] or null: a sequence's row; -1: it has none
};

void chain_rows_cpu(const ExecContext& exec, const ChainRowsParams& params);
int chain_rows_cuda(const ChainRowsParams& params, void* stream);

// ---- Windows ----
//
// Draft rows that see the last tokens of their sequence only. A drafter's attention then costs the
// same however long the context is, and heads that were trained on short texts are kept among the
// distances they know. Rows keep their true positions.

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
int window_spans_cuda(const WindowSpansParams& params, void* stream);

}  // namespace openspec
