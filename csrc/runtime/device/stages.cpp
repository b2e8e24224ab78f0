#ifdef OPENSPEC_CUDA

#include "runtime/device/stages.h"

#include <algorithm>

#include "kernels/attention/span_attention.h"
#include "kernels/ops.h"
#include "model/parts/sum_exchange.h"
#include "model/targets/target.h"
#include "runtime/step/kept_learning.h"

namespace openspec {

DeviceStages::DeviceStages(const StepContext& context, const DeviceBuffers& arrays, void* stream)
    : context_(context),
      arrays_(arrays),
      exec_{.pool = nullptr, .device = Device::kCuda, .stream = stream},
      copies_(copy_lookup_of(context.config)),
      answers_(context.config) {
  if (answers_.exists()) answers_.clear(exec_);
  copies_.allocate();
  const std::span<const KvLayerView> layers = context.kv_layers;
  kv_layers_ = Buffer(layers.size_bytes(), Memory::kDevice);
  device::copy_to_device(kv_layers_.data(), layers.data(), layers.size_bytes(), stream);
  device::synchronize(stream);
}

void DeviceStages::set_capture(const std::vector<int>& layers) {
  capture_layers_ = layers;
  const RunnerConfig& config = context_.config;
  const size_t row_bytes =
      layers.size() * as_index(config.target.hidden_size) * dtype_bytes(config.dtype);
  captured_ = Buffer(as_index(config.max_num_batched_tokens) * row_bytes, Memory::kDevice);
  if (context_.drafter.needs().is_costly) {
    kept_ = Buffer(as_index(config.max_num_seqs) * kMaxKeptRows * row_bytes, Memory::kDevice);
  }
}

RowBatch DeviceStages::row_batch(const StepShape& shape) const {
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
          .max_span_rows = shape.has_long_spans ? 0 : context_.config.step_rows()};
}

void DeviceStages::enqueue(const StepShape& shape, int num_samples) {
  if (drafts(shape)) propose(shape);
  lay_out(shape, num_samples);
  score(shape);
  enqueue_choices(shape, num_samples, /*masks=*/nullptr);
}

void DeviceStages::enqueue_choices(const StepShape& shape, int num_samples, const Masks* masks) {
  const RowBatch rows = row_batch(shape);
  choose(rows, num_samples, masks);
  commit(shape);
  if (shape.has_trees) {
    move_kv(exec_, context_, kv_layers_.as<KvLayerView>(), table_view().pages, committed(rows));
  }
  if (shape.keeps_rows) {
    keep_rows(rows);
  } else if (context_.drafter.works_on_arrays()) {
    context_.drafter.learn(exec_, table_view(), committed(rows));
  }
}

DeviceStages::Proposals DeviceStages::proposals(bool has_trees, int num_spans) const {
  const StepInputArrays& sent = arrays_.input;
  Proposals drafts{arrays_.drafts, arrays_.num_drafts, arrays_.parents, arrays_.scores};
  if (proposes_on_host()) drafts = {sent.drafts, sent.num_drafts, sent.parents, nullptr};
  if (!has_trees) drafts.parents = nullptr;
  if (!has_trees && !compares_chains(num_spans)) drafts.scores = nullptr;
  return drafts;
}

DrawnDrafts DeviceStages::drawn_drafts() const {
  DrawnDrafts drawn{.logits = context_.drafter.draft_logits()};
  if (drawn.logits.values == nullptr) return {};
  drawn.tokens = proposals(/*has_trees=*/false, /*num_spans=*/1).tokens;
  drawn.counts = arrays_.num_offered;
  drawn.max_drafts = max_drafts();
  return drawn;
}

TableView DeviceStages::table_view() const {
  return {.tokens = arrays_.table.tokens,
          .tokens_stride = arrays_.table.tokens_stride,
          .num_tokens = arrays_.table.num_tokens,
          .sampling = arrays_.table.sampling,
          .pages = {arrays_.table.pages, arrays_.table.max_pages_per_seq},
          .max_num_seqs = context_.config.max_num_seqs};
}

void DeviceStages::begin(const StepInputArrays& host, const StepHeader& header, int num_spans) {
  device::check(begin_step_cuda({.header = header,
                                 .host_spans = host.spans,
                                 .slot_updates = host.slot_updates,
                                 .page_updates = host.page_updates,
                                 .base_targets = host.base_targets,
                                 .table = arrays_.table,
                                 .max_spans = num_spans,
                                 .out_header = arrays_.input.header,
                                 .spans = arrays_.input.spans,
                                 .seq = arrays_.seq,
                                 .num_wanted = arrays_.num_wanted,
                                 .owners = arrays_.owners,
                                 .max_drafter_drafts = context_.config.max_draft_tokens,
                                 .num_drafter_wanted = arrays_.num_drafter_wanted},
                                exec_.stream),
                "begin_step");
}

void DeviceStages::propose(const StepShape& shape) {
  if (shape.proposes) ask_drafter(shape);
  if (!has_copies()) return;
  copies_.look_up(exec_, table_view(), arrays_.seq, arrays_.num_wanted, shape.num_spans,
                  arrays_.copied, arrays_.num_copied);
  if (answers_.exists()) {
    answers_.recall(exec_, table_view(),
                    {.seq = arrays_.seq,
                     .owners = arrays_.owners,
                     .num_wanted = arrays_.num_wanted,
                     .num_seqs = shape.num_spans,
                     .max_drafts = context_.config.max_copied_drafts,
                     .drafts = arrays_.copied,
                     .num_drafts = arrays_.num_copied,
                     .match_len = copies_.match_len()});
  }
  choose_source(shape);
}

void DeviceStages::remember(uint64_t owner, int slot, int begin, int count) {
  const TableView table = table_view();
  answers_.remember(exec_, owner, table.tokens + slot * table.tokens_stride + begin, count);
}

void DeviceStages::ask_drafter(const StepShape& shape) {
  const RowBatch rows = row_batch(shape);
  const DeviceArrays& s = arrays_;
  const bool has_trees = context_.drafter.needs().makes_trees;
  const bool has_scores = has_trees || compares_chains(rows.num_spans);
  WantedDrafts wanted{.seq = s.seq,
                      .num_wanted = s.num_wanted,
                      .num_seqs = rows.num_spans,
                      .max_drafts = context_.config.max_draft_tokens,
                      .max_rows = rows.num_rows,
                      .expected_kv_len = rows.expected_kv_len,
                      .drafts = s.drafts,
                      .num_drafts = s.num_drafts,
                      .parents = has_trees ? s.parents : nullptr,
                      .scores = has_scores ? s.scores : nullptr};
  if (has_copies()) {
    wanted.num_wanted = s.num_drafter_wanted;
    wanted.drafts = s.drafter_drafts;
    wanted.num_drafts = s.num_drafter_drafts;
    if (has_trees) wanted.parents = s.drafter_parents;
    if (has_scores) wanted.scores = s.drafter_scores;
  }
  context_.drafter.propose(exec_, table_view(), wanted);
}

void DeviceStages::choose_source(const StepShape& shape) {
  const DeviceArrays& s = arrays_;
  const bool has_trees = context_.drafter.needs().makes_trees;
  const bool has_scores = has_trees || compares_chains(shape.num_spans);
  device::check(
      choose_source_cuda({.input = input(),
                          .spans = s.input.spans,
                          .max_spans = shape.num_spans,
                          .copied = copied_drafts(),
                          .takes_copies = !shape.keeps_rows,
                          .max_drafter_drafts = context_.config.max_draft_tokens,
                          .drafter_drafts = s.drafter_drafts,
                          .num_drafter_drafts = shape.proposes ? s.num_drafter_drafts : nullptr,
                          .drafter_parents = s.drafter_parents,
                          .drafter_scores = has_scores ? s.drafter_scores : nullptr,
                          .max_drafts = max_drafts(),
                          .drafts = s.drafts,
                          .num_drafts = s.num_drafts,
                          .parents = has_trees ? s.parents : nullptr,
                          .scores = has_scores ? s.scores : nullptr,
                          .is_copied = s.is_copied,
                          .copy_class = s.copy_class},
                         exec_.stream),
      "choose_source");
}

CopiedDrafts DeviceStages::copied_drafts() const {
  return {.max_drafts = context_.config.max_copied_drafts,
          .drafts = arrays_.copied,
          .num_drafts = arrays_.num_copied,
          .match_len = copies_.match_len()};
}

void DeviceStages::merge(const StepInputArrays& host, const StepShape& shape, int num_spans,
                         bool has_proposed) {
  const Proposals drafts = proposals(shape.has_trees, shape.num_spans);
  device::check(merge_drafts_cuda({.num_lead = host.num_lead,
                                   .lead = host.lead,
                                   .num_spans = num_spans,
                                   .max_drafts = max_drafts(),
                                   .has_drafts = has_proposed,
                                   .drafts = drafts.tokens,
                                   .num_drafts = drafts.counts,
                                   .parents = drafts.parents,
                                   .scores = drafts.scores},
                                  exec_.stream),
                "merge_drafts");
}

void DeviceStages::lay_out(const StepShape& shape, int num_samples) {
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
                                  .max_drafts = max_drafts(),
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
                                  .score_token = s.score_token,
                                  .folded_read = s.folded_read,
                                  .folded_write = s.folded_write},
                                 exec_.stream),
                "layout_rows");
}

void DeviceStages::score(const StepShape& shape) {
  DeltaStates bases = context_.base_memory;
  bases.read_pages = arrays_.table.base_pages;
  bases.write_pages = arrays_.table.base_targets;
  context_.target.forward(exec_, row_batch(shape),
                          {.page_table = {arrays_.table.pages, arrays_.table.max_pages_per_seq},
                           .kv = context_.kv_layers,
                           .states = {.records = context_.records,
                                      .tails = context_.tails,
                                      .bases = bases,
                                      .folded_read = arrays_.folded_read,
                                      .folded_write = arrays_.folded_write}},
                          capture_layers_, captured_.data());
}

void DeviceStages::choose(const RowBatch& rows, int num_samples, const Masks* masks) {
  const DeviceArrays& s = arrays_;
  const int block = context_.config.max_num_logits_rows;
  for (int first = 0; first < num_samples; first += block) {
    const int count = std::min(block, num_samples - first);
    context_.target.logits(exec_, s.sample_row + first, count, s.logits);
    // Ranks choose for each other where rows are dealt.
    const RowRange own =
        context_.exchange != nullptr ? context_.exchange->dealt(count) : RowRange{0, count};
    ops::choose(exec_, part_of({.rows = rows,
                                .sample_row = s.sample_row + first,
                                .score_token = s.score_token + first,
                                .logits = s.logits,
                                .vocab_size = context_.config.target.vocab_size,
                                .drafts = drawn_drafts(),
                                .row_masks = masks != nullptr ? masks->words : nullptr,
                                .sample_mask = masks != nullptr ? masks->samples + first : nullptr,
                                .sampling = arrays_.table.sampling,
                                .tokens = arrays_.table.tokens,
                                .tokens_stride = arrays_.table.tokens_stride,
                                .num_tokens = arrays_.table.num_tokens,
                                .prompt_len = arrays_.table.prompt_len,
                                .chosen = s.chosen + first,
                                .logprob_ids = s.logprob_ids + first * (1 + kMaxLogprobs),
                                .logprobs = s.logprobs + first * (1 + kMaxLogprobs),
                                .ranks = s.ranks + first,
                                .workspace = s.choose_workspace},
                               own.first, own.count));
    if (own.count == count) continue;
    constexpr int kBest = 1 + kMaxLogprobs;
    const MadeRows results[] = {{s.chosen + first, 1},
                                {s.ranks + first, 1},
                                {s.logprob_ids + first * kBest, kBest},
                                {s.logprobs + first * kBest, kBest}};
    context_.exchange->share_rows(exec_, results, count);
  }
}

void DeviceStages::commit(const StepShape& shape) {
  const DeviceArrays& s = arrays_;
  const Proposals drafts = proposals(shape.has_trees, shape.num_spans);
  const RunnerConfig& config = context_.config;
  ExchangeState* exchange = context_.exchange != nullptr ? context_.exchange->state() : nullptr;
  device::check(commit_rows_cuda({.input = input(),
                                  .table = s.table,
                                  .keeps_rows = shape.keeps_rows,
                                  .drafts = drafts.tokens,
                                  .parents = drafts.parents,
                                  .scores = drafts.scores,
                                  .copied = copied_drafts(),
                                  .is_copied = s.is_copied,
                                  .copy_class = s.copy_class,
                                  .span_begin = s.span_begin,
                                  .num_offered = s.num_offered,
                                  .num_granted = s.num_granted,
                                  .first_choice = s.first_choice,
                                  .sample_begin = s.sample_begin,
                                  .chosen = s.chosen,
                                  .folded_read = s.folded_read,
                                  .folded_write = s.folded_write,
                                  .logprob_ids = s.logprob_ids,
                                  .logprobs = s.logprobs,
                                  .ranks = s.ranks,
                                  .num_spans = shape.num_spans,
                                  .max_spans = config.max_num_seqs,
                                  .max_drafts = max_drafts(),
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
                                  .out_ranks = arrays_.outcome.ranks,
                                  .exchange = exchange,
                                  .out_counts = arrays_.outcome.exchange,
                                  .experts = context_.target.expert_counts(),
                                  .out_experts = arrays_.outcome.experts},
                                 exec_.stream),
                "commit_rows");
}

CommittedStep DeviceStages::committed(const RowBatch& rows) const {
  return {.rows = rows,
          .num_computed = arrays_.num_computed,
          .committed_row = rows.may_have_trees ? arrays_.committed_row : nullptr,
          .num_committed = rows.num_rows,
          .features = captured_.data()};
}

KeptRows DeviceStages::kept_rows() {
  const auto num_rows = as_index(context_.config.max_num_seqs) * kMaxKeptRows;
  return {kept_.data(), arrays_.table.kept_begin, static_cast<int64_t>(kept_.bytes() / num_rows)};
}

void DeviceStages::keep_rows(const RowBatch& rows) {
  if (kept_.bytes() == 0) return;  // a drafter that reads tokens alone
  ops::keep_rows(exec_, {.rows = rows,
                         .num_computed = arrays_.num_computed,
                         .features = captured_.data(),
                         .kept = kept_rows()});
}

void DeviceStages::teach_kept(const StepInputArrays& host, int num_slots, int num_steps) {
  const DeviceArrays& s = arrays_;
  device::copy_to_device(s.input.kept_slots, host.kept_slots, as_index(num_slots) * sizeof(int32_t),
                         exec_.stream);
  // The arrays of the step, which has not begun.
  const KeptLearning learning{.rows = {.kept = kept_rows(),
                                       .slot = s.input.kept_slots,
                                       .kv_len = s.table.kv_len,
                                       .num_slots = num_slots,
                                       .span_begin = s.span_begin,
                                       .span_kv_len = s.span_kv_len,
                                       .num_computed = s.num_computed,
                                       .source = s.committed_row},
                              .table = table_view(),
                              .num_steps = num_steps,
                              .max_rows = context_.config.max_num_batched_tokens,
                              .features = captured_.data()};
  learning.learn(exec_, context_.drafter);
}

}  // namespace openspec

#endif
