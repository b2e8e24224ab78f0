#pragma once

/// What the tests of draft rows and blocks on CUDA share.

#include "cuda/cuda_testing.h"
#include "kernels/draft_rows_testing.h"

namespace openspec::testing {

constexpr int kPageSize = 16, kSlots = 300;

/// A DraftTable's arrays on the device.
struct DeviceTableCopy {
  explicit DeviceTableCopy(const DraftTable& table)
      : tokens(table.tokens), num_tokens(table.num_tokens), pages(table.pages), from(table) {}
  TableView view() const {
    TableView view = from.view();
    view.tokens = tokens.as<int32_t>();
    view.num_tokens = num_tokens.as<int32_t>();
    view.pages.pages = pages.as<int32_t>();
    return view;
  }
  DeviceBuffer tokens, num_tokens, pages;
  const DraftTable& from;
};

/// A DraftBatch's arrays on the device.
struct DeviceBatch {
  explicit DeviceBatch(const DraftBatch& batch)
      : row_token(batch.row_token),
        row_position(batch.row_position),
        row_span(batch.row_span),
        row_parent(batch.row_parent),
        source(batch.source),
        row_kv_slot(batch.row_kv_slot),
        span_begin(batch.span_begin),
        span_kv_len(batch.span_kv_len),
        span_seq(batch.span_seq),
        num_rows(static_cast<int>(batch.row_token.size())),
        num_spans(static_cast<int>(batch.span_seq.size())) {}
  DraftRows rows() const {
    return {.num_rows = num_rows,
            .num_spans = num_spans,
            .row_token = row_token.as<int32_t>(),
            .row_position = row_position.as<int32_t>(),
            .row_span = row_span.as<int32_t>(),
            .row_parent = row_parent.as<int32_t>(),
            .source = source.as<int32_t>(),
            .row_kv_slot = row_kv_slot.as<int64_t>(),
            .span_begin = span_begin.as<int32_t>(),
            .span_kv_len = span_kv_len.as<int32_t>(),
            .span_seq = span_seq.as<int32_t>()};
  }
  void check_equal(const DraftBatch& batch) const {
    CHECK(row_token.download<int32_t>() == batch.row_token);
    CHECK(row_position.download<int32_t>() == batch.row_position);
    CHECK(row_span.download<int32_t>() == batch.row_span);
    CHECK(row_parent.download<int32_t>() == batch.row_parent);
    CHECK(source.download<int32_t>() == batch.source);
    CHECK(row_kv_slot.download<int64_t>() == batch.row_kv_slot);
    CHECK(span_begin.download<int32_t>() == batch.span_begin);
    CHECK(span_kv_len.download<int32_t>() == batch.span_kv_len);
    CHECK(span_seq.download<int32_t>() == batch.span_seq);
    for (const DeviceBuffer* buffer : {&row_token, &row_position, &row_span, &row_parent, &source,
                                       &row_kv_slot, &span_begin, &span_kv_len, &span_seq}) {
      CHECK(buffer->guard_is_whole());
    }
  }
  DeviceBuffer row_token, row_position, row_span, row_parent, source, row_kv_slot, span_begin,
      span_kv_len, span_seq;
  int num_rows, num_spans;
};

inline DraftTable random_table(Rng& rng) {
  DraftTable table(kSlots, 640, kPageSize);
  for (int slot = 0; slot < kSlots; ++slot) {
    std::vector<int32_t> history;
    for (int i = rng.integer(2, 600); i > 0; --i) history.push_back(rng.integer(0, 1 << 17));
    table.set(slot, history);
  }
  return table;
}

}  // namespace openspec::testing
