#include "runtime/step/kept_learning.h"

#include <algorithm>

#include "kernels/ops.h"

namespace openspec {

void KeptLearning::learn(const ExecContext& exec, Drafter& drafter,
                         std::span<const int32_t> slots) const {
  const auto most = static_cast<size_t>(max_rows / num_steps);
  for (size_t first = 0; first < slots.size(); first += most) {
    const int count = static_cast<int>(std::min(most, slots.size() - first));
    int num_rows = count * num_steps;
    ops::take_kept_rows(exec, {.kept = kept,
                               .slot = slots.data() + first,
                               .kv_len = kv_len,
                               .num_slots = count,
                               .num_rows = num_rows,
                               .span_begin = span_begin,
                               .span_kv_len = span_kv_len,
                               .num_computed = num_computed,
                               .source = source});
    // On CUDA nobody knows yet how many there are: the rest is padding.
    if (exec.device == Device::kCpu) num_rows = span_begin[count];
    ops::gather_rows(exec, {.row = source,
                            .in = kept.features,
                            .out = features,
                            .num_rows = num_rows,
                            .width_bytes = kept.width_bytes,
                            .out_stride = kept.width_bytes});
    RowBatch rows{.num_rows = num_rows, .num_spans = count};
    rows.span_begin = span_begin;
    rows.span_kv_len = span_kv_len;
    rows.span_seq = slots.data() + first;
    drafter.learn(exec, table,
                  {.rows = rows,
                   .num_computed = num_computed,
                   .num_committed = num_rows,
                   .features = features});
  }
}

}  // namespace openspec
