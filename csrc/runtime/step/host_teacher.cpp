#include "runtime/step/host_teacher.h"

#include <utility>

#include "kernels/ops.h"
#include "runtime/step/kept_learning.h"

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
  ++num_kept_steps_;
  if (kept_.empty()) return;  // a drafter that reads tokens alone
  ops::keep_rows(exec_, {.rows = step.rows,
                         .num_computed = step.num_computed,
                         .features = features_.data(),
                         .kept = kept_rows()});
}

KeptRows HostTeacher::kept_rows() {
  const auto num_rows = static_cast<size_t>(context_.config.max_num_seqs) * kMaxKeptRows;
  return {kept_.data(), kept_begin_.data(), static_cast<int64_t>(kept_.size() / num_rows)};
}

void HostTeacher::learn_kept() {
  const int num_steps = std::exchange(num_kept_steps_, 0);
  if (num_steps == 0) return;
  const std::vector<int32_t> slots = context_.table.slots_in_use();
  const auto max_rows = static_cast<size_t>(context_.config.max_num_batched_tokens);
  std::vector<int32_t> begin(slots.size() + 1), kv_len(slots.size()), num_computed(slots.size()),
      source(max_rows);
  const KeptLearning learning{.rows = {.kept = kept_rows(),
                                       .slot = slots.data(),
                                       .kv_len = context_.table.kv_len_data(),
                                       .num_slots = static_cast<int>(slots.size()),
                                       .span_begin = begin.data(),
                                       .span_kv_len = kv_len.data(),
                                       .num_computed = num_computed.data(),
                                       .source = source.data()},
                              .table = context_.table.view(),
                              .num_steps = num_steps,
                              .max_rows = static_cast<int>(max_rows),
                              .features = features_.data()};
  learning.learn(exec_, context_.drafter);
}

}  // namespace openspec
