#ifdef OPENSPEC_CUDA

// What DeviceStep enqueues on the device: the parts of a step.

#include <algorithm>
#include <utility>

#include "kernels/ops.h"
#include "model/targets/target.h"
#include "runtime/device/device_step.h"

namespace openspec {

RowBatch DeviceStep::row_batch(const StepShape& shape) const {
  const DeviceArrays& s = arrays_;
  return {.num_rows = shape.num_rows,
          .num_spans = shape.num_spans,
          .row_token = s.row_token,
          .row_position = s.row_position,
          .row_span = s.row_span,
          .row_parent = s.row_parent,
          .row_kv_slot = s.row_kv_slot,
          .span_begin = s.span_begin,
          .span_kv_len = s.span_kv_len,
          .span_seq = s.span_seq,
          .may_have_trees = shape.has_trees,
          .expected_kv_len = shape.is_general ? 0 : short_kv_len(shape.num_rows, shape.num_spans),
          .expected_span_rows = shape.has_long_spans ? 0 : 1 + context_.config.draft_room()};
}

void DeviceStep::enqueue(const StepShape& shape, int num_samples) {
  enqueue_rows(shape, num_samples);
  score(row_batch(shape));
  enqueue_choices(shape, num_samples, /*has_masks=*/false);
}

void DeviceStep::enqueue_rows(const StepShape& shape, int num_samples) {
  if (shape.proposes) propose(row_batch(shape));
  lay_out(shape, num_samples);
}

void DeviceStep::enqueue_choices(const StepShape& shape, int num_samples, bool has_masks) {
  const RowBatch rows = row_batch(shape);
  choose(rows, num_samples, has_masks);
  commit(shape);
  if (shape.has_trees) move_kv(rows);
  if (shape.keeps_rows) {
    keep_rows(rows);
  } else {
    teach(rows);
  }
}

DeviceStep::Proposals DeviceStep::proposals(bool has_trees, int num_spans) const {
  const StepInputArrays& sent = arrays_.input;
  Proposals drafts{arrays_.drafts, arrays_.num_drafts, arrays_.parents, arrays_.scores};
  if (num_steps_ahead() == 0) drafts = {sent.drafts, sent.num_drafts, sent.parents, nullptr};
  if (!has_trees) drafts.parents = nullptr;
  if (!has_trees && !compares_chains(num_spans)) drafts.scores = nullptr;
  return drafts;
}

DrawnDrafts DeviceStep::drawn_drafts() const {
  DrawnDrafts drawn{.logits = context_.drafter.draft_logits()};
  if (drawn.logits.values == nullptr) return {};
  drawn.tokens = proposals(/*has_trees=*/false, /*num_spans=*/1).tokens;
  drawn.counts = arrays_.num_offered;
  drawn.max_drafts = drafts_per_seq();
  return drawn;
}

TableView DeviceStep::table_view() const {
  return {.tokens = arrays_.table.tokens,
          .tokens_stride = arrays_.table.tokens_stride,
          .num_tokens = arrays_.table.num_tokens,
          .sampling = arrays_.table.sampling,
          .pages = {arrays_.table.pages, arrays_.table.max_pages_per_seq},
          .max_num_seqs = context_.config.max_num_seqs};
}

void DeviceStep::begin(int ring_index, const StepHeader& header, int num_spans) {
  const StepInputArrays& host = arrays_.host_input[index(ring_index)];
  device::check(begin_step_cuda({.header = header,
                                 .host_spans = host.spans,
                                 .slot_updates = host.slot_updates,
                                 .page_updates = host.page_updates,
                                 .table = arrays_.table,
                                 .max_spans = num_spans,
                                 .out_header = arrays_.input.header,
                                 .spans = arrays_.input.spans,
                                 .seq = arrays_.seq,
                                 .num_wanted = arrays_.num_wanted},
                                exec_.stream),
                "begin_step");
}

void DeviceStep::propose(const RowBatch& rows) {
  const DeviceArrays& s = arrays_;
  const bool has_trees = context_.drafter.needs().makes_trees;
  const bool has_scores = has_trees || compares_chains(rows.num_spans);
  context_.drafter.propose(exec_, table_view(),
                           {.seq = s.seq,
                            .num_wanted = s.num_wanted,
                            .num_seqs = rows.num_spans,
                            .max_drafts = context_.config.max_draft_tokens,
                            .max_rows = rows.num_rows,
                            .expected_kv_len = rows.expected_kv_len,
                            .drafts = s.drafts,
                            .num_drafts = s.num_drafts,
                            .parents = has_trees ? s.parents : nullptr,
                            .scores = has_scores ? s.scores : nullptr});
}

void DeviceStep::lay_out(const StepShape& shape, int num_samples) {
  const DeviceArrays& s = arrays_;
  const Proposals drafts = proposals(shape.has_trees, shape.num_spans);
  device::check(layout_rows_cuda({.input = input(),
                                  .table = s.table,
                                  .num_wanted = s.num_wanted,
                                  .drafts = drafts.tokens,
                                  .num_drafts = drafts.counts,
                                  .parents = drafts.parents,
                                  .scores = drafts.scores,
                                  .max_spans = shape.num_spans,
                                  .max_drafts = drafts_per_seq(),
                                  .page_size = context_.config.page_size,
                                  .vocab_size = context_.config.target.vocab_size,
                                  .num_rows = shape.num_rows,
                                  .num_samples = num_samples,
                                  .row_token = s.row_token,
                                  .row_position = s.row_position,
                                  .row_span = s.row_span,
                                  .row_parent = s.row_parent,
                                  .row_kv_slot = s.row_kv_slot,
                                  .span_begin = s.span_begin,
                                  .span_kv_len = s.span_kv_len,
                                  .span_seq = s.span_seq,
                                  .num_offered = s.num_offered,
                                  .num_granted = s.num_granted,
                                  .first_choice = s.first_choice,
                                  .sample_begin = s.sample_begin,
                                  .sample_row = s.sample_row,
                                  .score_token = s.score_token},
                                 exec_.stream),
                "layout_rows");
}

void DeviceStep::score(const RowBatch& rows) {
  context_.target.forward(
      exec_, rows,
      {{arrays_.table.pages, arrays_.table.max_pages_per_seq}, context_.kv_layers, context_.records},
      capture_layers_, captured_.data());
}

void DeviceStep::choose(const RowBatch& rows, int num_samples, bool has_masks) {
  const DeviceArrays& s = arrays_;
  const int block = context_.config.max_num_logits_rows;
  for (int first = 0; first < num_samples; first += block) {
    const int count = std::min(block, num_samples - first);
    context_.target.logits(exec_, s.sample_row + first, count, s.logits);
    ops::choose(exec_, {.rows = rows,
                        .sample_row = s.sample_row + first,
                        .score_token = s.score_token + first,
                        .num_samples = count,
                        .logits = s.logits,
                        .vocab_size = context_.config.target.vocab_size,
                        .drafts = drawn_drafts(),
                        .row_masks = has_masks ? mask_words_.as<int32_t>() : nullptr,
                        .sample_mask = has_masks ? sample_mask_.as<int32_t>() + first : nullptr,
                        .sampling = arrays_.table.sampling,
                        .tokens = arrays_.table.tokens,
                        .tokens_stride = arrays_.table.tokens_stride,
                        .num_tokens = arrays_.table.num_tokens,
                        .prompt_len = arrays_.table.prompt_len,
                        .chosen = s.chosen + first,
                        .logprob_ids = s.logprob_ids + first * kLogprobWidth,
                        .logprobs = s.logprobs + first * kLogprobWidth,
                        .ranks = s.ranks + first,
                        .workspace = s.choose_workspace});
  }
}

void DeviceStep::commit(const StepShape& shape) {
  const DeviceArrays& s = arrays_;
  const Proposals drafts = proposals(shape.has_trees, shape.num_spans);
  const RunnerConfig& config = context_.config;
  device::check(commit_rows_cuda({.input = input(),
                                  .table = s.table,
                                  .keeps_rows = shape.keeps_rows,
                                  .drafts = drafts.tokens,
                                  .parents = drafts.parents,
                                  .scores = drafts.scores,
                                  .span_begin = s.span_begin,
                                  .num_offered = s.num_offered,
                                  .num_granted = s.num_granted,
                                  .first_choice = s.first_choice,
                                  .sample_begin = s.sample_begin,
                                  .chosen = s.chosen,
                                  .logprob_ids = s.logprob_ids,
                                  .logprobs = s.logprobs,
                                  .ranks = s.ranks,
                                  .num_spans = shape.num_spans,
                                  .max_spans = config.max_num_seqs,
                                  .max_drafts = drafts_per_seq(),
                                  .max_samples = config.max_num_batched_tokens,
                                  .num_computed = s.num_computed,
                                  .committed_row = s.committed_row,
                                  .outcomes = arrays_.outcome.outcomes,
                                  .tokens = arrays_.outcome.tokens,
                                  .samples = arrays_.outcome.samples,
                                  .out_drafts = arrays_.outcome.drafts,
                                  .out_parents = arrays_.outcome.parents,
                                  .out_scores = arrays_.outcome.scores,
                                  .out_logprob_ids = arrays_.outcome.logprob_ids,
                                  .out_logprobs = arrays_.outcome.logprobs,
                                  .out_ranks = arrays_.outcome.ranks},
                                 exec_.stream),
                "commit_rows");
}

void DeviceStep::move_kv(const RowBatch& rows) {
  ops::move_kv(exec_, {.layers = kv_layers_.as<KvLayerView>(),
                       .num_layers = static_cast<int>(context_.kv_layers.size()),
                       .page_table = {arrays_.table.pages, arrays_.table.max_pages_per_seq},
                       .rows = rows,
                       .num_computed = arrays_.num_computed,
                       .committed_row = arrays_.committed_row,
                       .dtype = context_.config.dtype});
}

void DeviceStep::teach(const RowBatch& rows) {
  if (!context_.drafter.works_on_arrays()) return;
  const int32_t* committed_row = arrays_.committed_row;
  context_.drafter.learn(exec_, table_view(),
                         {.rows = rows,
                          .num_computed = arrays_.num_computed,
                          .committed_row = rows.may_have_trees ? committed_row : nullptr,
                          .num_committed = rows.num_rows,
                          .features = captured_.data()});
}

KeptRows DeviceStep::kept_rows() {
  const auto num_rows = index(context_.config.max_num_seqs) * kMaxKeptRows;
  return {kept_.data(), arrays_.table.kept_begin, static_cast<int64_t>(kept_.bytes() / num_rows)};
}

void DeviceStep::keep_rows(const RowBatch& rows) {
  ops::keep_rows(exec_, {.rows = rows,
                         .num_computed = arrays_.num_computed,
                         .features = captured_.data(),
                         .kept = kept_rows()});
}

void DeviceStep::teach_kept(int ring_index) {
  const DeviceArrays& s = arrays_;
  const int num_steps = std::exchange(num_kept_steps_, 0);
  if (num_steps == 0) return;
  const KeptRows kept = kept_rows();
  // Pages of sequences that left may be someone else's by now, and of new ones the device has the
  // lengths of who was there before. Of those that go back it has lengths that include the steps
  // that were given up: what is learned of these will be computed again.
  std::vector<int> slots = context_.table.slots_in_use();
  std::erase_if(slots, [&](int slot) {
    return std::find(new_slots_.begin(), new_slots_.end(), slot) != new_slots_.end();
  });
  auto* list = arrays_.outcome.kept_slots + ring_index * context_.config.max_num_seqs;
  std::copy(slots.begin(), slots.end(), list);
  if (slots.empty()) return;
  device::copy_to_device(s.kept_slot, list, slots.size() * sizeof(int32_t), stream_.handle());
  const int most = context_.config.max_num_batched_tokens / num_steps;
  for (int first = 0; first < static_cast<int>(slots.size()); first += most) {
    const int count = std::min(most, static_cast<int>(slots.size()) - first);
    const int num_rows = count * num_steps;
    // The arrays of the step, which has not begun.
    ops::take_kept_rows(exec_, {.kept = kept,
                                .slot = s.kept_slot + first,
                                .kv_len = arrays_.table.kv_len,
                                .num_slots = count,
                                .num_rows = num_rows,
                                .span_begin = s.span_begin,
                                .span_kv_len = s.span_kv_len,
                                .num_computed = s.num_computed,
                                .source = s.committed_row});
    ops::gather_rows(exec_, {.row = s.committed_row,
                             .in = kept.features,
                             .out = captured_.data(),
                             .num_rows = num_rows,
                             .width_bytes = kept.width_bytes,
                             .out_stride = kept.width_bytes});
    RowBatch rows{.num_rows = num_rows, .num_spans = count};
    rows.span_begin = s.span_begin;
    rows.span_kv_len = s.span_kv_len;
    rows.span_seq = s.kept_slot + first;
    context_.drafter.learn(exec_, table_view(),
                           {.rows = rows,
                            .num_computed = s.num_computed,
                            .num_committed = num_rows,
                            .features = captured_.data()});
  }
}

}  // namespace openspec

#endif
