#ifdef OPENSPEC_CUDA

#include "runtime/device/device_step.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "kernels/attention/span_attention.h"

namespace openspec {

namespace {

GraphBook::Limits graph_limits(const StepContext& context) {
  const RunnerConfig& config = context.config;
  const Drafter& drafter = context.drafter;
  return {.max_num_seqs = config.max_num_seqs,
          .max_num_batched_tokens = config.max_num_batched_tokens,
          .max_num_logits_rows = config.max_num_logits_rows,
          .max_draft_tokens = config.max_draft_tokens,
          .draft_room = config.draft_room(),
          .works_on_arrays = drafter.works_on_arrays(),
          .makes_trees = drafter.needs().makes_trees,
          .is_costly = drafter.needs().is_costly,
          .takes_trees = context.takes_trees,
          .parts_spans = context.bases.exist(),
          .most_short_spans = most_short_spans_cuda(context.kv_layers.front().num_kv_heads,
                                                    context.kv_layers.front().head_dim)};
}

}  // namespace

DeviceStep::DeviceStep(const std::vector<StepContext>& contexts, DeviceExchange* exchange)
    : StepBackend(contexts.front(), StepYield::Common::kDelay),
      book_(graph_limits(context_)),
      inputs_(context_.config, context_.drafter.needs(), context_.bases.num_pages()),
      ranks_(contexts, exchange, inputs_, book_),
      ring_(context_.config, context_.table, inputs_, ranks_),
      updates_(context_.config, context_.table, context_.bases),
      masked_(context_, ring_, ranks_),
      probe_(ranks_),
      host_drafter_(context_.config, context_.drafter, context_.table,
                    ranks_.first().stages().exec()) {
  const RunnerConfig& config = context_.config;
  OPENSPEC_CHECK_ARG(config.max_num_seqs <= kMaxStepSpans, "on CUDA max_num_seqs must not exceed ",
                     kMaxStepSpans, ", got ", config.max_num_seqs);
  OPENSPEC_CHECK_ARG(
      !context_.drafter.needs().makes_trees || config.max_draft_tokens < kMaxTreeRows,
      "on CUDA a tree has fewer than ", kMaxTreeRows, " drafts, got ", config.max_draft_tokens);
  OPENSPEC_CHECK_ARG(config.max_copied_drafts == 0 || !proposes_on_host(),
                     "on CUDA drafts are copied beside a drafter that works there");
}

DeviceStep::~DeviceStep() { ranks_.end(); }

void DeviceStep::await_slot(int slot) {
  for (int rank = 0; rank < ranks_.size(); ++rank) ranks_[rank].mirror().await(slot);
}

void DeviceStep::add_sequence(int slot) {
  ranks_.each([&](RankStep& rank) { rank.mirror().add(slot); });
  updates_.add(slot);
}

void DeviceStep::restore_sequence(int slot) {
  masked_.forget_launched();  // what is given up is given up to the last step
  updates_.restore(slot);
  restored_.push_back(slot);
}

void DeviceStep::copy(void* to, const void* from, size_t bytes) {
  ranks_.first().copy(to, from, bytes);  // of records, which ranks do not share
}

void DeviceStep::remember(int slot) {
  const SequenceTable& table = context_.table;
  const int begin = table.prompt_len(slot);
  // The device's own row of the slot, which a later sequence takes in the same order.
  ranks_.each([&](RankStep& rank) {
    rank.stages().remember(table.owner(slot), slot, begin, table.num_tokens(slot) - begin);
  });
}

void DeviceStep::forget_answers() {
  ranks_.each([](RankStep& rank) { rank.stages().forget_answers(); });
}

// --- The step, on the host -----------------------------------------------------------------------

void DeviceStep::launch(StepLease& lease) {
  for (const char* stage : {"propose", "score", "choose", "accept"}) context_.enter(stage);
  // Before the first step nothing is under way.
  if (!experts_before_ && context_.target.expert_counts() != nullptr) {
    experts_before_ = expert_counts();
  }
  lease.ring_index = ring_.take();
  for (const int slot : std::exchange(restored_, {})) {
    ranks_.each([&](RankStep& rank) { rank.mirror().upload_base(slot); });
  }
  context_.table.grammar_work().begin_step();
  const bool host_has_trees = propose_on_host(lease);
  masked_.offer(lease);
  StepOrder order;
  order.shape = choose_shape(lease, host_has_trees);
  teach_kept(lease, order);
  lease.has_proposed = order.shape.proposes || proposes_on_host();
  order.header = write_input(lease, order.shape);
  order.num_samples = num_samples_[as_index(lease.ring_index)] = num_samples_of(lease, order.shape);
  if (MaskedSteps::has_masks(lease, context_.table)) {
    masked_.start(lease, order);
    note_failures(lease);
  } else {
    ranks_.enqueue([&](RankStep& rank) { rank.start(order); });
  }
  masked_.note_launched(lease);
  num_kept_steps_ = lease.num_waiting;  // and not earlier: the device keeps what it was given
  updates_.forget();
}

void DeviceStep::teach_kept(StepLease& lease, StepOrder& order) {
  // The lengths that sequences go back to forget where the rows that wait began.
  const bool keeps_rows = order.shape.keeps_rows;
  if (updates_.has_restored() || !keeps_rows || num_kept_steps_ == most_kept_steps()) {
    // Pages of sequences that left may be someone else's by now, and of new ones the device has the
    // lengths of who was there before. Of those that go back it has lengths that include the steps
    // that were given up: what is learned of these will be computed again.
    order.num_kept_steps = std::exchange(num_kept_steps_, 0);
    std::vector<int> slots =
        order.num_kept_steps > 0 ? context_.table.slots_in_use() : std::vector<int>();
    std::erase_if(slots, [&](int slot) { return updates_.is_new(slot); });
    std::copy(slots.begin(), slots.end(), ring_.input(lease.ring_index).kept_slots);
    order.num_kept_slots = static_cast<int>(slots.size());
  }
  lease.num_waiting = num_kept_steps_ + keeps_rows;
}

int DeviceStep::row_share(const StepLease& lease, int num_rows) {
  int num_known = 0, num_drafting = 0;
  for (const SpanRequest& request : lease.requests) {
    num_known += request.num_new_tokens;
    num_drafting += request.max_drafts > 0;
  }
  return num_drafting == 0 ? 0 : std::max(1, (num_rows - num_known) / num_drafting);
}

StepHeader DeviceStep::write_input(const StepLease& lease, const StepShape& shape) {
  const StepInputArrays& input = ring_.input(lease.ring_index);
  const bool drafts_there = lease.has_proposed || context_.config.max_copied_drafts > 0;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    const std::vector<int32_t>& lead = lease.offers[i].draft.tokens;
    const auto num_lead = static_cast<int32_t>(lead.size());
    const DraftSourceId source = num_lead > 0 ? kGrammarDrafts : kDrafterDrafts;
    const double ratio = context_.table.estimate(request.slot, source).acceptance.ratio();
    input.spans[i] = {.slot = request.slot,
                      .num_new_tokens = request.num_new_tokens,
                      .max_drafts = drafts_there ? request.max_drafts : num_lead,
                      .acceptance = static_cast<float>(ratio),
                      .folds = lease.bases[i].pages().empty() ? 0 : 1,
                      .owner = context_.table.owner(request.slot)};
    context_.table.copy_estimate(request.slot).copy_to(input.spans[i].copied_acceptance);
    input.num_lead[i] = num_lead;
    std::copy(lead.begin(), lead.end(), input.lead + i * most_drafts(context_.config));
  }
  StepHeader header = updates_.write(lease, inputs_);
  header.row_budget = shape.num_rows;
  header.row_price = static_cast<float>(planner_.row_price(lease));
  header.row_share = row_share(lease, shape.num_rows);
  return header;
}

bool DeviceStep::propose_on_host(const StepLease& lease) {
  if (!proposes_on_host()) return false;
  const StepInputArrays& input = ring_.input(lease.ring_index);
  const auto most = as_index(context_.config.max_draft_tokens);
  std::vector<ProposeRequest> wanted;
  std::vector<size_t> span_of;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    input.num_drafts[i] = 0;
    if (lease.requests[i].max_drafts == 0) continue;
    wanted.push_back({lease.requests[i].slot, lease.requests[i].max_drafts});
    span_of.push_back(i);
  }
  if (wanted.empty()) return false;
  std::vector<Draft> drafts(wanted.size());
  try {
    host_drafter_.offer(wanted, drafts);
  } catch (const std::exception& error) {
    context_.report_drafter_failure(error);
    return false;
  }
  bool has_trees = false;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const size_t first = span_of[i] * most;
    const size_t offered = std::min(as_index(drafts[i].size()), most);
    // After a long prompt only a chain fits attention's limit, as for some targets always.
    const auto num_rows = as_index(lease.requests[span_of[i]].num_new_tokens) + offered;
    const bool may_be_tree = context_.takes_trees && num_rows <= as_index(kMaxTreeRows);
    size_t count = 0;
    for (; count < offered; ++count) {
      const bool is_next = drafts[i].parents[count] == static_cast<int>(count) - 1;
      if (!is_next && !may_be_tree) break;
      has_trees = has_trees || !is_next;
      input.drafts[first + count] = drafts[i].tokens[count];
      input.parents[first + count] = drafts[i].parents[count];
    }
    input.num_drafts[span_of[i]] = static_cast<int32_t>(count);
  }
  return has_trees;
}

StepShape DeviceStep::choose_shape(StepLease& lease, bool host_has_trees) {
  const RunnerConfig& config = context_.config;
  const DrafterNeeds& needs = context_.drafter.needs();
  const bool may_be_absent = !proposes_on_host();
  const int most_free = std::max(config.max_draft_tokens, config.max_copied_drafts);
  int num_known = 0, num_drafts = 0, longest = 0;
  bool has_long_spans = false, has_offers = false;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    // What anyone may offer, if all of it gets rows.
    const int num_lead = lease.offers[i].draft.size();
    num_drafts += num_lead > 0 ? num_lead : std::min(request.max_drafts, most_free);
    // A span may get more drafts than are expected.
    const int most_rows = request.num_new_tokens + request.max_drafts;
    num_known += request.num_new_tokens;
    longest = std::max(longest, context_.table.num_tokens(request.slot));
    has_long_spans = has_long_spans || most_rows > config.step_rows();
    has_offers = has_offers || lease.offers[i].draft.size() > 0;
  }
  const auto num_spans = static_cast<int>(lease.requests.size());
  bool proposes = num_drafts > 0 || !needs.is_costly;
  if (planner_.is_adaptive() && num_drafts > 0) {
    if (needs.is_costly) proposes = planner_.drafter_pays(lease, may_be_absent, 0.0);
    const auto chosen = planner_.expected_offers(lease, proposes, may_be_absent);
    num_drafts = planner_.plan(lease, chosen.offers, needs.is_costly && proposes, 0.0).num_drafts;
  }
  int num_rows = num_known + num_drafts;
  // A drafter that works on the host puts its proposals into the input.
  proposes = proposes && config.max_draft_tokens > 0 && !proposes_on_host();
  if (proposes && needs.is_costly) {
    num_rows = std::max(num_rows, 2 * num_spans);
    if (num_rows > config.max_num_batched_tokens) {
      num_rows = num_known;
      proposes = false;
    }
  }
  const bool is_general = longest > short_kv_len(num_rows, num_spans);
  // Copies are verified where rows are planned for them.
  const bool has_drafts =
      proposes || has_offers || (config.max_copied_drafts > 0 && num_rows > num_known);
  const bool keeps_rows = !has_drafts && may_keep_rows(lease);
  return book_.choose({num_rows, num_spans, proposes, proposes ? needs.makes_trees : host_has_trees,
                       is_general, keeps_rows, has_long_spans});
}

int DeviceStep::num_samples_of(const StepLease& lease, const StepShape& shape) const {
  if (book_.shapes().contains(shape)) return shape.num_rows;
  int num_samples = 0;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    if (lease.is_sampled[i]) num_samples += 1 + request.max_drafts;
    if (context_.table.params(request.slot).num_prompt_logprobs >= 0) {
      num_samples += request.num_new_tokens;
    }
  }
  return std::max(1, std::min(num_samples, shape.num_rows));
}

void DeviceStep::collect(StepLease& lease) {
  const int entry = lease.ring_index;
  ring_.await(entry);
  masked_.note_collected(lease);
  lease.seconds = ranks_.first().seconds(entry);
  lease.exchange.clear();
  for (int rank = 0; ranks_.size() > 1 && rank < ranks_.size(); ++rank) {
    lease.exchange.push_back(ranks_[rank].arrays().outcome.exchange[entry]);
  }
  if (experts_before_) {
    const ExpertCounts now = ranks_.first().arrays().outcome.experts[entry];
    lease.experts = now - std::exchange(*experts_before_, now);
  }
  lease.results.clear();
  lease.num_folded.clear();
  lease.num_rows = 0;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    lease.results.push_back(ring_.result(lease, i));
    lease.num_folded.push_back(ring_.outcome(entry, i).num_folded);
    const SpanResult& result = lease.results.back();
    if (result.num_computed > 0) {
      lease.num_rows += lease.requests[i].num_new_tokens + result.num_draft_tokens;
    }
  }
  probe_.note_collected(static_cast<int>(lease.requests.size()), lease.num_rows,
                        ring_.outcome(entry, lease.requests.size() - 1).sample_end,
                        num_samples_[as_index(entry)]);
}

std::optional<double> DeviceStep::draft_seconds(const StepLease& lease) const {
  if (!lease.has_proposed) return 0.0;
  // A step is one graph: its parts are told apart only by steps without a drafter.
  const std::optional<double> expected =
      planner_.expected_draft_seconds(static_cast<int>(lease.requests.size()), lease.num_rows);
  return expected ? std::optional(std::min(*expected, lease.seconds)) : std::nullopt;
}

// --- Measuring ----------------------------------------------------------------------------------

double DeviceStep::time_step(const StepKind& kind, std::span<const int> slots) {
  const int num_drafts = kind.proposes ? context_.config.max_draft_tokens : 0;
  const int context = context_.table.num_tokens(slots[0]);
  const StepOrder order = {
      .header = {.num_spans = kind.num_seqs,
                 .num_slot_updates = kind.num_seqs,
                 .num_page_updates = 0,
                 .row_budget = kind.num_rows},
      .shape = timed_shape(kind, context),
      .num_samples = kind.proposes ? kind.num_rows : std::min(kind.num_seqs, kind.num_rows)};
  const StepInputArrays& input = ring_.input(0);
  for (int i = 0; i < kind.num_seqs; ++i) {
    const int slot = slots[as_index(i)];
    // Without drafts the rows are the last tokens of the sequences, computed again.
    const int num_rows = kind.proposes ? 1 : (kind.num_rows + i) / kind.num_seqs;
    const int num_new_tokens = std::min(num_rows, context);
    input.spans[i] = {.slot = slot,
                      .num_new_tokens = num_new_tokens,
                      .max_drafts = num_drafts,
                      .acceptance = 0.5f};
    input.slot_updates[i] = {
        .slot = slot,
        .num_tokens = context,
        .kv_len = context - num_new_tokens,
        .prompt_len = context,
        .max_num_tokens = std::min(context + num_drafts + 2, context_.config.max_model_len),
        .is_active = 1,
        .num_folded = folded_blocks(context - num_new_tokens)};
  }
  ranks_.each([&](RankStep& rank) {
    for (const int slot : slots.first(as_index(kind.num_seqs))) {
      rank.mirror().upload_tokens(slot);
      rank.mirror().upload_pages(slot, context_.table.page_row(slot));
      rank.mirror().upload_params(slot);
    }
  });
  ranks_.enqueue([&](RankStep& rank) { rank.start(order); });
  ring_.await(0);
  return ranks_.first().seconds(0);
}

StepShape DeviceStep::timed_shape(const StepKind& kind, int context) const {
  const DrafterNeeds& needs = context_.drafter.needs();
  // A drafter that costs nothing proposes in every step.
  for (const bool proposes : {kind.proposes, !kind.proposes}) {
    const bool has_trees = proposes && needs.makes_trees;
    const StepShape* recorded = book_.find(
        {kind.num_rows, kind.num_seqs, proposes, has_trees,
         context > short_kv_len(kind.num_rows, kind.num_seqs), needs.is_costly && !proposes,
         kind.num_rows > kind.num_seqs * context_.config.step_rows()});
    if (recorded != nullptr && recorded->num_rows == kind.num_rows) return *recorded;
  }
  return {kind.num_rows, kind.num_seqs, kind.proposes, kind.proposes && needs.makes_trees};
}

void DeviceStep::set_capture(std::vector<int> layers) {
  const bool is_changed = layers != capture_layers_;
  StepBackend::set_capture(std::move(layers));
  if (!is_changed) return;
  synchronize();
  ranks_.each([&](RankStep& rank) { rank.set_capture(capture_layers_); });
  if (ranks_.first().has_graphs()) prepare();
}

}  // namespace openspec

#endif
