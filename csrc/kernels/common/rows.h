#pragma once

#include <cstdint>

namespace openspec {

/// The rows of one step, ragged over sequences: what every op of the forward pass reads.
///
/// A *span* is the run of rows that one sequence contributes: known tokens that have no KV yet
/// (a prefill chunk, or the last committed token) followed by draft tokens. A row sees the
/// committed prefix [0, span_kv_len) and its own ancestors inside the span. All arrays are on the
/// device that runs the step, so that a captured graph stays right as lengths change.
///
/// On CUDA `num_rows` and `num_spans` are what the arrays and the captured graph have room for.
/// Rows from span_begin[num_spans] on are padding: token 0, position 0, span -1, parent -1, kv_slot
/// -1; ops may compute anything finite or not for them but touch no KV. Spans after the last real
/// one are empty (span_begin[s] == span_begin[s + 1], kv_len 0, seq 0).
struct RowBatch {
  int num_rows = 0;
  int num_spans = 0;
  const int32_t* row_token = nullptr;  // [num_rows] token id fed to the embedding
  // [num_rows] kv_len + depth of the row in its span; more, by as much for all of the span, where
  // its page table begins after the sequence's first tokens (draft_rows.h)
  const int32_t* row_position = nullptr;
  const int32_t* row_span = nullptr;    // [num_rows] index of the span; -1: padding
  const int32_t* row_parent = nullptr;  // [num_rows] row this one follows; -1: the committed prefix
  const int64_t* row_kv_slot = nullptr;  // [num_rows] page * page_size + offset; -1: write no KV
  const int32_t* span_begin = nullptr;   // [num_spans + 1] first row of each span
  const int32_t* span_kv_len = nullptr;  // [num_spans] tokens whose KV is committed
  const int32_t* span_seq = nullptr;     // [num_spans] slot in the sequence table
  // False promises that every span is a chain: on CUDA few rows are then attended to faster, and
  // rows of trees would come out as if they were chains.
  bool may_have_trees = true;
  // About the longest committed prefix; 0: unknown. It may choose a kernel, never a result.
  int expected_kv_len = 0;
  // No span has more rows; 0: unknown. It may choose a kernel, never a result.
  int max_span_rows = 0;
};

/// One layer's share of the page pool: layout [num_pages, 2 (K, V), num_kv_heads, page_size,
/// head_dim]. The element type is the op's activation type.
struct KvLayerView {
  void* data = nullptr;
  int num_kv_heads = 0;
  int head_dim = 0;
  int page_size = 0;  // tokens
};

/// The page table of the sequence table.
struct PageTableView {
  const int32_t* pages = nullptr;  // [max_num_seqs, max_pages_per_seq] page ids
  int max_pages_per_seq = 0;
};

}  // namespace openspec
