#include "runtime/step/kept_learning.h"

#include <algorithm>

#include "kernels/ops.h"

namespace openspec {

void KeptLearning::learn(const ExecContext& exec, Drafter& drafter) const {
  const int most = max_rows / num_steps;
  for (int first = 0; first < rows.num_slots; first += most) {
    TakeKeptRowsParams part = rows;
    part.slot += first;
    part.num_slots = std::min(most, rows.num_slots - first);
    part.num_rows = part.num_slots * num_steps;
    ops::take_kept_rows(exec, part);
    int num_rows = part.num_rows;
    // On CUDA nobody knows yet how many there are: the rest is padding.
    if (exec.device == Device::kCpu) num_rows = part.span_begin[part.num_slots];
    if (part.kept.width_bytes > 0) {
      ops::gather_rows(exec, {.row = part.source,
                              .in = part.kept.features,
                              .out = features,
                              .num_rows = num_rows,
                              .width_bytes = part.kept.width_bytes,
                              .out_stride = part.kept.width_bytes});
    }
    RowBatch batch{.num_rows = num_rows, .num_spans = part.num_slots};
    batch.span_begin = part.span_begin;
    batch.span_kv_len = part.span_kv_len;
    batch.span_seq = part.slot;
    drafter.learn(exec, table,
                  {.rows = batch,
                   .num_computed = part.num_computed,
                   .num_committed = num_rows,
                   .features = features});
  }
}

}  // namespace openspec
