#pragma once

#include <cstdint>

#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "kernels/drafts/table_rows.h"

/// The rows of a drafter that is itself a small model with KV in the page pool: those that teach it
/// what a step has committed, and those on which it draws its drafts one after another.
///
/// A drafter's entry at position p is made of the token at p and the target's features at p - 1
/// (position 0 then has none) or of the features at p, so it depends on no later token and pages
/// may be shared by their tokens.
namespace openspec {

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
  // With a shift: of a sequence whose first token is among its rows there is a row of that token
  // too, whose `source` is -1.
  bool from_start = false;
  DraftRows out;  // num_spans as in the step, num_rows too, and from_start one more for each span
  /// out [max_num_seqs] by slot: the row of the last known token; -1: the step did not reach it.
  /// Null where it has none, that is without a shift.
  int32_t* last_row = nullptr;

  /// Rows of a span that come before those of its computed rows.
  OPENSPEC_HD int num_before(int span) const {
    return from_start && num_computed[span] > 0 && step.span_kv_len[span] == 0 ? shift : 0;
  }
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

/// Pages that a window of so many committed tokens and the rows after them can touch.
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
