#include "runtime/step/host_teacher.h"

#include <algorithm>
#include <utility>

#include "kernels/ops.h"

namespace openspec {

void HostTeacher::set_capture(int num_layers) {
  const RunnerConfig& config = context_.config;
  const size_t row_bytes = static_cast<size_t>(num_layers) *
                           static_cast<size_t>(config.target.hidden_size) *
                           dtype_bytes(config.dtype);
  features_.resize(static_cast<size_t>(config.max_num_batched_tokens) * row_bytes);
  const auto num_seqs = static_cast<size_t>(config.max_num_seqs);
  kept_.resize(context_.drafter.needs().is_costly ? num_seqs * kMaxKeptRows * row_bytes : 0);
  kept_begin_.resize(num_seqs);
}

void HostTeacher::add_sequence(int slot) {
  kept_begin_[static_cast<size_t>(slot)] = context_.table.kv_len(slot);
}

void HostTeacher::learn(const CommittedStep& step) {
  for (int i = 0; i < step.rows.num_spans; ++i) {
    const int slot = step.rows.span_seq[i];
    kept_begin_[static_cast<size_t>(slot)] = context_.table.kv_len(slot);
  }
  context_.drafter.learn(exec_, context_.table.view(), step);
}

void HostTeacher::keep(const CommittedStep& step) {
  ops::keep_rows(exec_, {.rows = step.rows,
                         .num_computed = step.num_computed,
                         .features = features_.data(),
                         .kept = kept_rows()});
  ++num_kept_steps_;
}

KeptRows HostTeacher::kept_rows() {
  const auto num_rows = static_cast<size_t>(context_.config.max_num_seqs) * kMaxKeptRows;
  return {kept_.data(), kept_begin_.data(), static_cast<int64_t>(kept_.size() / num_rows)};
}

void HostTeacher::learn_kept() {
  const int num_steps = std::exchange(num_kept_steps_, 0);
  if (num_steps == 0) return;
  const KeptRows kept = kept_rows();
  const std::vector<int> in_use = context_.table.slots_in_use();
  const auto most = static_cast<size_t>(context_.config.max_num_batched_tokens / num_steps);
  for (size_t first = 0; first < in_use.size(); first += most) {
    const size_t count = std::min(most, in_use.size() - first);
    const std::vector<int32_t> slots(in_use.begin() + static_cast<ptrdiff_t>(first),
                                     in_use.begin() + static_cast<ptrdiff_t>(first + count));
    const auto num_rows = static_cast<int>(count) * num_steps;
    std::vector<int32_t> begin(count + 1), kv_len(count), num_computed(count),
        source(static_cast<size_t>(num_rows));
    ops::take_kept_rows(exec_, {.kept = kept,
                                .slot = slots.data(),
                                .kv_len = context_.table.kv_len_data(),
                                .num_slots = static_cast<int>(count),
                                .num_rows = num_rows,
                                .span_begin = begin.data(),
                                .span_kv_len = kv_len.data(),
                                .num_computed = num_computed.data(),
                                .source = source.data()});
    ops::gather_rows(exec_, {.row = source.data(),
                             .in = kept.features,
                             .out = features_.data(),
                             .num_rows = begin.back(),
                             .width_bytes = kept.width_bytes,
                             .out_stride = kept.width_bytes});
    RowBatch rows{.num_rows = begin.back(), .num_spans = static_cast<int>(count)};
    rows.span_begin = begin.data();
    rows.span_kv_len = kv_len.data();
    rows.span_seq = slots.data();
    context_.drafter.learn(exec_, context_.table.view(),
                           {.rows = rows,
                            .num_computed = num_computed.data(),
                            .num_committed = begin.back(),
                            .features = features_.data()});
  }
}

}  // namespace openspec
