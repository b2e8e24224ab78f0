#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/ops.h"
#include "runtime/device_step.h"

// What DeviceStep enqueues on the device: the parts of a step, and their recording.

namespace openspec {

void DeviceStep::enqueue(const Shape& shape, int num_samples) {
  const Scratch& s = scratch_at_;
  const int num_spans = shape.num_spans;
  const RowBatch rows = {.num_rows = shape.num_rows,
                         .num_spans = num_spans,
                         .row_token = at<int32_t>(s.row_token),
                         .row_position = at<int32_t>(s.row_position),
                         .row_span = at<int32_t>(s.row_span),
                         .row_parent = at<int32_t>(s.row_parent),
                         .row_kv_slot = at<int64_t>(s.row_kv_slot),
                         .span_begin = at<int32_t>(s.span_begin),
                         .span_kv_len = at<int32_t>(s.span_kv_len),
                         .span_seq = at<int32_t>(s.span_seq),
                         .may_have_trees = shape.has_trees,
                         .expected_kv_len = shape.is_general ? 0 : kShortKvLen,
                         .expected_span_rows = shape.has_long_spans ? 0 : most_draft_rows()};
  if (shape.proposes) propose(rows);
  lay_out(shape, num_samples);
  score(rows);
  choose(rows, num_samples);
  commit(shape);
  if (shape.has_trees) move_kv(rows);
  if (shape.keeps_rows) {
    keep_rows(rows);
  } else {
    teach(rows);
  }
}

#ifdef OPENSPEC_CUDA

StepInput DeviceStep::input() {
  const auto* block = at<std::byte>(scratch_at_.input);
  return {.header = reinterpret_cast<const StepHeader*>(block + input_.header),
          .spans = reinterpret_cast<const StepSpan*>(block + input_.spans)};
}

DeviceStep::Proposals DeviceStep::proposals(bool has_trees, int num_spans) {
  const Scratch& s = scratch_at_;
  Proposals drafts{};
  if (num_steps_ahead() > 0) {
    drafts = {at<int32_t>(s.drafts), at<int32_t>(s.num_drafts), at<int32_t>(s.parents),
              at<float>(s.scores)};
  } else {
    drafts = {at<int32_t>(s.input + input_.drafts), at<int32_t>(s.input + input_.num_drafts),
              at<int32_t>(s.input + input_.parents), nullptr};
  }
  if (!has_trees) drafts.parents = nullptr;
  if (!has_trees && !compares_chains(num_spans)) drafts.scores = nullptr;
  return drafts;
}

DrawnDrafts DeviceStep::drawn_drafts() {
  DrawnDrafts drawn{.logits = context_.drafter.draft_logits()};
  if (drawn.logits.values == nullptr) return {};
  drawn.tokens = proposals(/*has_trees=*/false, /*num_spans=*/1).tokens;
  drawn.counts = at<int32_t>(scratch_at_.num_offered);
  drawn.max_drafts = std::max(1, context_.config.max_draft_tokens);
  return drawn;
}

TableView DeviceStep::table_view() const {
  return {.tokens = table_.tokens,
          .tokens_stride = table_.tokens_stride,
          .num_tokens = table_.num_tokens,
          .sampling = table_.sampling,
          .pages = {table_.pages, table_.max_pages_per_seq},
          .max_num_seqs = context_.config.max_num_seqs};
}

void DeviceStep::begin(int ring_index, const StepHeader& header, int num_spans) {
  const Scratch& s = scratch_at_;
  const std::byte* host = input_at(ring_index);
  auto* block = at<std::byte>(s.input);
  device::check(
      begin_step_cuda(
          {.header = header,
           .host_spans = reinterpret_cast<const StepSpan*>(host + input_.spans),
           .slot_updates = reinterpret_cast<const SlotUpdate*>(host + input_.slot_updates),
           .page_updates = reinterpret_cast<const PageUpdate*>(host + input_.page_updates),
           .table = table_,
           .max_spans = num_spans,
           .out_header = reinterpret_cast<StepHeader*>(block + input_.header),
           .spans = reinterpret_cast<StepSpan*>(block + input_.spans),
           .seq = at<int32_t>(s.seq),
           .num_wanted = at<int32_t>(s.num_wanted)},
          exec_.stream),
      "begin_step");
}

void DeviceStep::propose(const RowBatch& rows) {
  const Scratch& s = scratch_at_;
  const bool has_trees = context_.drafter.needs().makes_trees;
  const bool has_scores = has_trees || compares_chains(rows.num_spans);
  context_.drafter.propose(exec_, table_view(),
                           {.seq = at<int32_t>(s.seq),
                            .num_wanted = at<int32_t>(s.num_wanted),
                            .num_seqs = rows.num_spans,
                            .max_drafts = context_.config.max_draft_tokens,
                            .max_rows = rows.num_rows,
                            .expected_kv_len = rows.expected_kv_len,
                            .drafts = at<int32_t>(s.drafts),
                            .num_drafts = at<int32_t>(s.num_drafts),
                            .parents = has_trees ? at<int32_t>(s.parents) : nullptr,
                            .scores = has_scores ? at<float>(s.scores) : nullptr});
}

void DeviceStep::lay_out(const Shape& shape, int num_samples) {
  const Scratch& s = scratch_at_;
  const Proposals drafts = proposals(shape.has_trees, shape.num_spans);
  device::check(layout_rows_cuda({.input = input(),
                                  .table = table_,
                                  .num_wanted = at<int32_t>(s.num_wanted),
                                  .drafts = drafts.tokens,
                                  .num_drafts = drafts.counts,
                                  .parents = drafts.parents,
                                  .scores = drafts.scores,
                                  .max_spans = shape.num_spans,
                                  .max_drafts = std::max(1, context_.config.max_draft_tokens),
                                  .page_size = context_.config.page_size,
                                  .vocab_size = context_.config.target.vocab_size,
                                  .num_rows = shape.num_rows,
                                  .num_samples = num_samples,
                                  .row_token = at<int32_t>(s.row_token),
                                  .row_position = at<int32_t>(s.row_position),
                                  .row_span = at<int32_t>(s.row_span),
                                  .row_parent = at<int32_t>(s.row_parent),
                                  .row_kv_slot = at<int64_t>(s.row_kv_slot),
                                  .span_begin = at<int32_t>(s.span_begin),
                                  .span_kv_len = at<int32_t>(s.span_kv_len),
                                  .span_seq = at<int32_t>(s.span_seq),
                                  .num_offered = at<int32_t>(s.num_offered),
                                  .num_granted = at<int32_t>(s.num_granted),
                                  .first_choice = at<int32_t>(s.first_choice),
                                  .sample_begin = at<int32_t>(s.sample_begin),
                                  .sample_row = at<int32_t>(s.sample_row),
                                  .score_token = at<int32_t>(s.score_token)},
                                 exec_.stream),
                "layout_rows");
}

void DeviceStep::score(const RowBatch& rows) {
  context_.target.forward(exec_, rows, {table_.pages, table_.max_pages_per_seq}, context_.kv_layers,
                          capture_layers_, captured_.data());
}

void DeviceStep::choose(const RowBatch& rows, int num_samples) {
  const Scratch& s = scratch_at_;
  const int block = context_.config.max_num_logits_rows;
  for (int first = 0; first < num_samples; first += block) {
    const int count = std::min(block, num_samples - first);
    context_.target.logits(exec_, at<int32_t>(s.sample_row) + first, count, at<float>(s.logits));
    ops::choose(exec_, {.rows = rows,
                        .sample_row = at<int32_t>(s.sample_row) + first,
                        .score_token = at<int32_t>(s.score_token) + first,
                        .num_samples = count,
                        .logits = at<float>(s.logits),
                        .vocab_size = context_.config.target.vocab_size,
                        .drafts = drawn_drafts(),
                        .sampling = table_.sampling,
                        .tokens = table_.tokens,
                        .tokens_stride = table_.tokens_stride,
                        .num_tokens = table_.num_tokens,
                        .prompt_len = table_.prompt_len,
                        .chosen = at<int32_t>(s.chosen) + first,
                        .logprob_ids = at<int32_t>(s.logprob_ids) + first * kLogprobWidth,
                        .logprobs = at<float>(s.logprobs) + first * kLogprobWidth,
                        .ranks = at<int32_t>(s.ranks) + first,
                        .workspace = at<float>(s.choose)});
  }
}

void DeviceStep::commit(const Shape& shape) {
  const Scratch& s = scratch_at_;
  const Proposals drafts = proposals(shape.has_trees, shape.num_spans);
  const RunnerConfig& config = context_.config;
  device::check(commit_rows_cuda({.input = input(),
                                  .table = table_,
                                  .keeps_rows = shape.keeps_rows,
                                  .drafts = drafts.tokens,
                                  .parents = drafts.parents,
                                  .span_begin = at<int32_t>(s.span_begin),
                                  .num_offered = at<int32_t>(s.num_offered),
                                  .num_granted = at<int32_t>(s.num_granted),
                                  .first_choice = at<int32_t>(s.first_choice),
                                  .sample_begin = at<int32_t>(s.sample_begin),
                                  .chosen = at<int32_t>(s.chosen),
                                  .logprob_ids = at<int32_t>(s.logprob_ids),
                                  .logprobs = at<float>(s.logprobs),
                                  .ranks = at<int32_t>(s.ranks),
                                  .num_spans = shape.num_spans,
                                  .max_spans = config.max_num_seqs,
                                  .max_drafts = std::max(1, config.max_draft_tokens),
                                  .max_samples = config.max_num_batched_tokens,
                                  .num_computed = at<int32_t>(s.num_computed),
                                  .committed_row = at<int32_t>(s.committed_row),
                                  .outcomes = outcomes_.as<StepOutcome>(),
                                  .tokens = tokens_.as<int32_t>(),
                                  .samples = samples_.as<int32_t>(),
                                  .out_logprob_ids = logprob_ids_.as<int32_t>(),
                                  .out_logprobs = logprobs_.as<float>(),
                                  .out_ranks = ranks_.as<int32_t>()},
                                 exec_.stream),
                "commit_rows");
}

void DeviceStep::move_kv(const RowBatch& rows) {
  ops::move_kv(exec_, {.layers = kv_layers_.as<KvLayerView>(),
                       .num_layers = context_.config.target.num_layers,
                       .page_table = {table_.pages, table_.max_pages_per_seq},
                       .rows = rows,
                       .num_computed = at<int32_t>(scratch_at_.num_computed),
                       .committed_row = at<int32_t>(scratch_at_.committed_row),
                       .dtype = context_.config.dtype});
}

void DeviceStep::teach(const RowBatch& rows) {
  if (!context_.drafter.works_on_arrays()) return;
  const int32_t* committed_row = at<int32_t>(scratch_at_.committed_row);
  context_.drafter.learn(exec_, table_view(),
                         {.rows = rows,
                          .num_computed = at<int32_t>(scratch_at_.num_computed),
                          .committed_row = rows.may_have_trees ? committed_row : nullptr,
                          .num_committed = rows.num_rows,
                          .features = captured_.data()});
}

KeptRows DeviceStep::kept_rows() {
  const auto num_rows = index(context_.config.max_num_seqs) * kMaxKeptRows;
  return {kept_.data(), table_.kept_begin, static_cast<int64_t>(kept_.bytes() / num_rows)};
}

void DeviceStep::keep_rows(const RowBatch& rows) {
  ops::keep_rows(exec_, {.rows = rows,
                         .num_computed = at<int32_t>(scratch_at_.num_computed),
                         .features = captured_.data(),
                         .kept = kept_rows()});
}

void DeviceStep::teach_kept(int ring_index) {
  const Scratch& s = scratch_at_;
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
  auto* list = kept_slots_.as<int32_t>() + ring_index * context_.config.max_num_seqs;
  std::copy(slots.begin(), slots.end(), list);
  if (slots.empty()) return;
  device::copy_to_device(at<int32_t>(s.kept_slot), list, slots.size() * sizeof(int32_t),
                         stream_.handle());
  const int most = context_.config.max_num_batched_tokens / num_steps;
  for (int first = 0; first < static_cast<int>(slots.size()); first += most) {
    const int count = std::min(most, static_cast<int>(slots.size()) - first);
    const int num_rows = count * num_steps;
    // The arrays of the step, which has not begun.
    ops::take_kept_rows(exec_, {.kept = kept,
                                .slot = at<int32_t>(s.kept_slot) + first,
                                .kv_len = table_.kv_len,
                                .num_slots = count,
                                .num_rows = num_rows,
                                .span_begin = at<int32_t>(s.span_begin),
                                .span_kv_len = at<int32_t>(s.span_kv_len),
                                .num_computed = at<int32_t>(s.num_computed),
                                .source = at<int32_t>(s.committed_row)});
    ops::gather_rows(exec_, {.row = at<int32_t>(s.committed_row),
                             .in = kept.features,
                             .out = captured_.data(),
                             .num_rows = num_rows,
                             .width_bytes = kept.width_bytes,
                             .out_stride = kept.width_bytes});
    RowBatch rows{.num_rows = num_rows, .num_spans = count};
    rows.span_begin = at<int32_t>(s.span_begin);
    rows.span_kv_len = at<int32_t>(s.span_kv_len);
    rows.span_seq = at<int32_t>(s.kept_slot) + first;
    context_.drafter.learn(exec_, table_view(),
                           {.rows = rows,
                            .num_computed = at<int32_t>(s.num_computed),
                            .num_committed = num_rows,
                            .features = captured_.data()});
  }
}

#else

KeptRows DeviceStep::kept_rows() { return {}; }
void DeviceStep::keep_rows(const RowBatch&) {}
void DeviceStep::teach_kept(int) {}
void DeviceStep::begin(int, const StepHeader&, int) {}
void DeviceStep::propose(const RowBatch&) {}
void DeviceStep::lay_out(const Shape&, int) {}
void DeviceStep::score(const RowBatch&) {}
void DeviceStep::choose(const RowBatch&, int) {}
void DeviceStep::commit(const Shape&) {}
void DeviceStep::move_kv(const RowBatch&) {}
void DeviceStep::teach(const RowBatch&) {}

#endif

void DeviceStep::prepare() {
  graphs_.clear();
  for (int rows : row_sizes()) {
    for (const Shape& shape : shapes_of(rows)) {
      if (graphs_.contains(shape)) continue;
      // Once for real, without sequences: kernels are loaded and their limits set before recording.
      begin(0, {}, shape.num_spans);
      enqueue(shape, rows);
      synchronize();
      graphs_.try_emplace(shape, stream_.handle(), [&] { enqueue(shape, rows); });
    }
  }
  synchronize();
}

}  // namespace openspec
