#include <cstring>

#include "kernels/steps/move_kv.h"

namespace openspec {

namespace {

/// The K of a token in head 0 of a layer.
std::byte* key_of(const KvLayerView& kv, const PageTableView& table, int slot, int token,
                  size_t head_bytes) {
  const int64_t page = table.pages[int64_t{slot} * table.max_pages_per_seq + token / kv.page_size];
  const int64_t line = page * 2 * kv.num_kv_heads * kv.page_size + token % kv.page_size;
  return static_cast<std::byte*>(kv.data) + static_cast<size_t>(line) * head_bytes;
}

void move_span(const MoveKvParams& params, const KvLayerView& kv, int span) {
  const RowBatch& rows = params.rows;
  const size_t head_bytes = static_cast<size_t>(kv.head_dim) * dtype_bytes(params.dtype);
  const size_t stride = head_bytes * static_cast<size_t>(kv.page_size);
  const int begin = rows.span_begin[span], slot = rows.span_seq[span];
  for (int i = 0; i < params.num_computed[span]; ++i) {
    const int at = params.committed_row[begin + i] - begin;
    if (at == i) continue;
    const int kv_len = rows.span_kv_len[span];
    const std::byte* from = key_of(kv, params.page_table, slot, kv_len + at, head_bytes);
    std::byte* to = key_of(kv, params.page_table, slot, kv_len + i, head_bytes);
    // All heads of K, then all of V.
    for (size_t head = 0; head < static_cast<size_t>(2 * kv.num_kv_heads); ++head) {
      std::memcpy(to + head * stride, from + head * stride, head_bytes);
    }
  }
}

}  // namespace

void move_kv_cpu(const ExecContext& exec, const MoveKvParams& params) {
  bool has_moves = false;
  for (int span = 0; span < params.rows.num_spans; ++span) {
    const int last = params.rows.span_begin[span] + params.num_computed[span] - 1;
    has_moves = has_moves || (params.num_computed[span] > 0 && params.committed_row[last] != last);
  }
  if (!has_moves) return;
  exec.pool->parallel_for(params.num_layers, [&](int64_t layer) {
    for (int span = 0; span < params.rows.num_spans; ++span) {
      move_span(params, params.layers[layer], span);
    }
  });
}

void move_records_cpu(const ExecContext&, const MoveRecordsParams& params) {
  const RowBatch& rows = params.rows;
  for (int span = 0; span < rows.num_spans; ++span) {
    const int begin = rows.span_begin[span], slot = rows.span_seq[span];
    for (int i = 0; i < params.num_computed[span]; ++i) {
      const int at = params.committed_row[begin + i] - begin;
      if (at == i) continue;
      const int kv_len = rows.span_kv_len[span];
      std::memcpy(params.records.at(slot, kv_len + i), params.records.at(slot, kv_len + at),
                  params.records.record_bytes);
    }
  }
}

}  // namespace openspec
