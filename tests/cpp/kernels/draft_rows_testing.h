#pragma once

/// What the tests of the draft rows share, on the CPU and on CUDA.

#include <algorithm>
#include <vector>

#include "kernels/drafts/draft_rows.h"
#include "kernels/kernel_testing.h"

namespace openspec::testing {

/// A sequence table with pages in no particular order.
class DraftTable {
 public:
  DraftTable(int num_slots, int max_tokens, int page_size)
      : num_slots(num_slots),
        stride(max_tokens),
        pages_per_seq(max_tokens / page_size),
        page_size(page_size),
        tokens(static_cast<size_t>(num_slots * max_tokens), -1),
        num_tokens(static_cast<size_t>(num_slots), 0) {
    for (int i = 0; i < num_slots * pages_per_seq; ++i) pages.push_back((7 * i + 3) % 1000);
  }
  void set(int slot, const std::vector<int32_t>& history) {
    std::copy(history.begin(), history.end(), tokens.begin() + slot * stride);
    num_tokens[static_cast<size_t>(slot)] = static_cast<int32_t>(history.size());
  }
  int64_t kv_slot(int slot, int position) const {
    const auto page = static_cast<size_t>(slot * pages_per_seq + position / page_size);
    return int64_t{pages[page]} * page_size + position % page_size;
  }
  TableView view() const {
    return {.tokens = tokens.data(),
            .tokens_stride = stride,
            .num_tokens = num_tokens.data(),
            .sampling = nullptr,
            .pages = {pages.data(), pages_per_seq},
            .max_num_seqs = num_slots};
  }

  int num_slots, stride, pages_per_seq, page_size;
  std::vector<int32_t> tokens, num_tokens, pages;
};

/// The arrays of a DraftRows, begun as rubbish.
struct DraftBatch {
  DraftBatch(int num_rows, int num_spans) {
    for (auto* array : {&row_token, &row_position, &row_span, &row_parent, &source}) {
      array->assign(static_cast<size_t>(num_rows), 99);
    }
    row_kv_slot.assign(static_cast<size_t>(num_rows), 99);
    span_begin.assign(static_cast<size_t>(num_spans) + 1, 99);
    for (auto* array : {&span_kv_len, &span_seq}) {
      array->assign(static_cast<size_t>(num_spans), 99);
    }
  }
  DraftRows rows() {
    return {.num_rows = static_cast<int>(row_token.size()),
            .num_spans = static_cast<int>(span_seq.size()),
            .row_token = row_token.data(),
            .row_position = row_position.data(),
            .row_span = row_span.data(),
            .row_parent = row_parent.data(),
            .source = source.data(),
            .row_kv_slot = row_kv_slot.data(),
            .span_begin = span_begin.data(),
            .span_kv_len = span_kv_len.data(),
            .span_seq = span_seq.data()};
  }

  std::vector<int32_t> row_token, row_position, row_span, row_parent, source;
  std::vector<int64_t> row_kv_slot;
  std::vector<int32_t> span_begin, span_kv_len, span_seq;
};

}  // namespace openspec::testing
