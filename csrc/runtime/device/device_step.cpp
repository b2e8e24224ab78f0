#ifdef OPENSPEC_CUDA

#include "runtime/device/device_step.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "core/check.h"
#include "kernels/attention/span_attention.h"
#include "kernels/ops.h"

namespace openspec {

namespace {

GraphBook::Limits graph_limits(const RunnerConfig& config, const Drafter& drafter) {
  return {.max_num_seqs = config.max_num_seqs,
          .max_num_batched_tokens = config.max_num_batched_tokens,
          .max_num_logits_rows = config.max_num_logits_rows,
          .max_draft_tokens = config.max_draft_tokens,
          .draft_room = config.draft_room(),
          .works_on_arrays = drafter.works_on_arrays(),
          .makes_trees = drafter.needs().makes_trees,
          .is_costly = drafter.needs().is_costly};
}

}  // namespace

DeviceStep::DeviceStep(StepContext context)
    : StepBackend(context, StepYield::Common::kDelay),
      context_(std::move(context)),
      book_(graph_limits(context_.config, context_.drafter)),
      exec_{.pool = nullptr, .device = Device::kCuda, .stream = stream_.handle()},
      arrays_(context_.config, context_.drafter.needs(), stream_.handle()),
      masks_(context_.config.target.vocab_size, Memory::kPinned) {
  const RunnerConfig& config = context_.config;
  OPENSPEC_CHECK_ARG(config.max_num_seqs <= kMaxStepSpans, "on CUDA max_num_seqs must not exceed ",
                     kMaxStepSpans, ", got ", config.max_num_seqs);
  OPENSPEC_CHECK_ARG(
      !context_.drafter.needs().makes_trees || config.max_draft_tokens < kMaxTreeRows,
      "on CUDA a tree has fewer than ", kMaxTreeRows, " drafts, got ", config.max_draft_tokens);
  for (int i = 0; i < config.max_num_seqs; ++i) {
    slot_params_.push_back(
        {Buffer(DeviceBuffers::kListBytes, Memory::kDevice),
         Buffer(sizeof(SamplingParams) + DeviceBuffers::kListBytes, Memory::kPinned),
         device::Event()});
  }
  const auto layers = std::span(context_.kv_layers);
  kv_layers_ = Buffer(layers.size_bytes(), Memory::kDevice);
  device::copy_to_device(kv_layers_.data(), layers.data(), layers.size_bytes(), stream_.handle());
  synchronize();
  for (auto* events : {&begun_, &done_}) {
    events->reserve(DeviceBuffers::kRing);
    for (int i = 0; i < DeviceBuffers::kRing; ++i) events->emplace_back();
  }
}

DeviceStep::~DeviceStep() {
  try {
    synchronize();  // a step that was given up may still use what goes now
  } catch (const DeviceError&) {
    // Nothing runs any more.
  }
}

void DeviceStep::prepare() {
  for (Graphs* graphs : {&graphs_, &draft_graphs_, &score_graphs_, &choice_graphs_})
    graphs->clear();
  context_.drafter.prepare(exec_);
  for (const StepShape& shape : book_.shapes()) {
    // Once for real, without sequences: kernels are loaded and their limits set before recording.
    begin(0, {}, shape.num_spans);
    enqueue(shape, shape.num_rows);
    synchronize();
    graphs_.try_emplace(shape, stream_.handle(), [&] { enqueue(shape, shape.num_rows); });
  }
  synchronize();
}

// --- Sequences ---------------------------------------------------------------------------------

void DeviceStep::await_slot(int slot) { slot_params_[index(slot)].uploaded.wait(); }

void DeviceStep::add_sequence(int slot) {
  SequenceTable& table = context_.table;
  const auto tokens = table.tokens(slot);
  device::copy_to_device(arrays_.table.tokens + slot * arrays_.table.tokens_stride, tokens.data(),
                         tokens.size_bytes(), stream_.handle());
  const auto pages = table.pages(slot);
  if (!pages.empty()) {
    device::copy_to_device(arrays_.table.pages + int64_t{slot} * arrays_.table.max_pages_per_seq,
                           pages.data(), pages.size_bytes(), stream_.handle());
  }
  upload_params(slot);
  slot_params_[index(slot)].uploaded.record(stream_.handle());
  new_slots_.push_back(slot);
  update_slot(slot);
}

void DeviceStep::restore_sequence(int slot) {
  has_restored_ = true;
  launched_.clear();  // what is given up is given up to the last step
  update_slot(slot);
}

void DeviceStep::update_slot(int slot) {
  const SequenceTable& table = context_.table;
  const SlotUpdate update = {.slot = slot,
                             .num_tokens = table.num_tokens(slot),
                             .kv_len = table.kv_len(slot),
                             .prompt_len = table.prompt_len(slot),
                             .max_num_tokens = table.max_num_tokens(slot),
                             .is_active = 1};
  // The last word counts, whatever the order in which the device writes them.
  std::erase_if(slot_updates_, [&](const SlotUpdate& other) { return other.slot == slot; });
  slot_updates_.push_back(update);
}

void DeviceStep::upload_params(int slot) {
  const SequenceParams& p = context_.table.params(slot);
  SlotParams& room = slot_params_[index(slot)];
  SamplingParams sampling = context_.table.sampling_data()[slot];
  size_t num_bytes = 0;
  p.for_each_list(sampling,
                  [&](const auto& list, auto&) { num_bytes += std::span(list).size_bytes(); });
  if (num_bytes > room.lists.bytes()) {
    synchronize();  // what is freed may be in use
    const size_t bytes = std::bit_ceil(num_bytes);
    Buffer lists(bytes, Memory::kDevice), staging(sizeof(SamplingParams) + bytes, Memory::kPinned);
    room.lists = std::move(lists);  // both or none
    room.staging = std::move(staging);
  }
  auto* staged = room.staging.as<std::byte>() + sizeof(SamplingParams);
  auto* device_lists = room.lists.as<std::byte>();
  size_t offset = 0;
  p.for_each_list(sampling, [&]<typename T>(const std::vector<T>& list, const T*& pointer) {
    if (!list.empty()) std::memcpy(staged + offset, list.data(), list.size() * sizeof(T));
    pointer = reinterpret_cast<const T*>(device_lists + offset);
    offset += list.size() * sizeof(T);
  });
  std::memcpy(room.staging.data(), &sampling, sizeof sampling);
  device::copy_to_device(arrays_.table.sampling + slot, room.staging.data(), sizeof sampling,
                         stream_.handle());
  if (offset > 0) device::copy_to_device(device_lists, staged, offset, stream_.handle());
}

// --- The step, on the host -----------------------------------------------------------------------

void DeviceStep::launch(StepLease& lease) {
  for (const char* stage : {"propose", "score", "choose", "accept"}) context_.enter(stage);
  const RunnerConfig& config = context_.config;
  lease.ring_index = next_ring_;
  next_ring_ = (next_ring_ + 1) % DeviceBuffers::kRing;
  done_[index(lease.ring_index)].wait();  // for steps that were given up; any other is collected
  const StepInputArrays& input = arrays_.host_input[index(lease.ring_index)];
  const bool host_has_trees = proposes_on_host() && propose_on_host(lease, input);
  find_forced(lease);
  const StepShape shape = choose_shape(lease, host_has_trees);
  // The lengths that sequences go back to forget where the rows that wait began.
  const bool goes_back = std::exchange(has_restored_, false);
  if (goes_back || !shape.keeps_rows || num_kept_steps_ == most_kept_steps(config)) {
    teach_kept(lease.ring_index);
  }
  lease.num_waiting = num_kept_steps_ + shape.keeps_rows;
  const int num_samples = num_samples_of(lease, shape);
  lease.has_proposed = shape.proposes || proposes_on_host();

  std::vector<PageUpdate> page_updates;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const int slot = lease.requests[i].slot;
    const auto pages = lease.pages[i].pages();
    // The lease's pages stand at the end of what is in flight for the sequence.
    const int end = context_.table.num_pages(slot) + context_.table.in_flight(slot).num_pages;
    const int first = end - static_cast<int>(pages.size());
    for (size_t j = 0; j < pages.size(); ++j) {
      page_updates.push_back({slot, first + static_cast<int>(j), pages[j]});
    }
  }
  const StepHeader header = {.num_spans = static_cast<int32_t>(lease.requests.size()),
                             .num_slot_updates = static_cast<int32_t>(slot_updates_.size()),
                             .num_page_updates = static_cast<int32_t>(page_updates.size()),
                             .row_budget = shape.num_rows,
                             .ring_index = lease.ring_index};
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    const std::vector<int32_t>& forced = lease.forced[i];
    const auto num_forced = static_cast<int32_t>(forced.size());
    const AcceptanceEstimate& acceptance = num_forced > 0
                                               ? context_.table.forced_acceptance(request.slot)
                                               : context_.table.acceptance(request.slot);
    input.spans[i] = {.slot = request.slot,
                      .num_new_tokens = request.num_new_tokens,
                      .max_drafts = lease.has_proposed ? request.max_drafts : num_forced,
                      .acceptance = static_cast<float>(acceptance.ratio())};
    input.num_forced[i] = num_forced;
    std::copy(forced.begin(), forced.end(), input.forced + i * index(drafts_per_seq()));
  }
  OPENSPEC_CHECK(slot_updates_.size() <= index(config.max_num_seqs) &&
                     page_updates.size() <= arrays_.max_page_updates,
                 "a step has ", slot_updates_.size(), " slot and ", page_updates.size(),
                 " page updates, more than its input holds");
  std::copy(slot_updates_.begin(), slot_updates_.end(), input.slot_updates);
  std::copy(page_updates.begin(), page_updates.end(), input.page_updates);
  start(lease.ring_index, header, shape, num_samples, has_masks(lease) ? &lease : nullptr);
  note_launched(lease);
  num_kept_steps_ = lease.num_waiting;  // and not earlier: the device keeps what it was given
  slot_updates_.clear();
  new_slots_.clear();
}

bool DeviceStep::propose_on_host(const StepLease& lease, const StepInputArrays& input) {
  const auto most = index(context_.config.max_draft_tokens);
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
    context_.drafter.propose_on_host(context_.table, wanted, drafts);
  } catch (const std::exception& error) {
    context_.report_drafter_failure(error);
    return false;
  }
  bool has_trees = false;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const size_t first = span_of[i] * most;
    const size_t offered = std::min(index(drafts[i].size()), most);
    // Behind a long prompt only a chain fits attention's limit.
    const auto num_rows = index(lease.requests[span_of[i]].num_new_tokens) + offered;
    const bool may_be_tree = num_rows <= index(kMaxTreeRows);
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
  const int max_rows = config.max_num_batched_tokens;
  int num_known = 0, num_drafts = 0, num_forced = 0, longest = 0;
  bool has_long_spans = false;
  std::vector<DraftOffer> offers, forced;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    const double availability = context_.table.availability(request.slot).ratio();
    forced.push_back({.num_drafts = static_cast<int>(lease.forced[i].size()),
                      .ratio = context_.table.forced_acceptance(request.slot).ratio()});
    offers.push_back({.num_drafts = std::min(request.max_drafts, config.max_draft_tokens),
                      .ratio = context_.table.acceptance(request.slot).ratio(),
                      .availability = proposes_on_host() ? 1.0 : availability,
                      .num_depths = expected_depths(context_)});
    if (forced[i].num_drafts > 0) offers[i] = forced[i];
    num_known += request.num_new_tokens;
    num_drafts += offers[i].num_drafts;
    num_forced += forced[i].num_drafts;
    longest = std::max(longest, context_.table.num_tokens(request.slot));
    has_long_spans =
        has_long_spans || request.num_new_tokens + offers[i].num_drafts > 1 + config.draft_room();
  }
  const auto num_spans = static_cast<int>(lease.requests.size());
  bool proposes = num_drafts > 0 || !needs.is_costly;
  if (config.adaptive && has_step_times() && num_drafts > 0) {
    if (needs.is_costly) proposes = drafts_pay(lease, offers, forced, max_rows, 0.0);
    num_drafts =
        plan_drafts(lease, proposes ? offers : forced, needs.is_costly && proposes, max_rows, 0.0)
            .num_drafts;
  }
  int num_rows = num_known + num_drafts;
  // A drafter that works on the host puts its proposals into the input.
  proposes = proposes && config.max_draft_tokens > 0 && !proposes_on_host();
  if (proposes && needs.is_costly) {
    num_rows = std::max(num_rows, 2 * num_spans);
    if (num_rows > max_rows) {
      num_rows = num_known;
      proposes = false;
    }
  }
  const bool is_general = longest > short_kv_len(num_rows, num_spans);
  const bool keeps_rows = !proposes && num_forced == 0 && may_keep_rows(context_, lease);
  return book_.choose({num_rows, num_spans, proposes, proposes ? needs.makes_trees : host_has_trees,
                       is_general, keeps_rows, has_long_spans});
}

void DeviceStep::start(int ring_index, const StepHeader& header, const StepShape& shape,
                       int num_samples, StepLease* masked) {
  begun_[index(ring_index)].record(stream_.handle());
  if (proposes_on_host()) arrays_.upload_proposals(ring_index, stream_.handle());
  begin(ring_index, header, shape.num_spans);
  const auto graph = graphs_.find(shape);
  if (masked != nullptr) {
    run_masked(*masked, shape, num_samples);
  } else if (graph != graphs_.end()) {
    graph->second.launch(stream_.handle());
  } else {
    enqueue(shape, num_samples);
  }
  done_[index(ring_index)].record(stream_.handle());
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
  done_[index(lease.ring_index)].wait();
  note_collected(lease);
  lease.seconds = done_[index(lease.ring_index)].seconds_since(begun_[index(lease.ring_index)]);
  lease.results.clear();
  lease.num_rows = 0;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    lease.results.push_back(result_of(lease, i));
    const SpanResult& result = lease.results.back();
    if (result.num_computed > 0) {
      lease.num_rows += lease.requests[i].num_new_tokens + result.num_draft_tokens;
    }
  }
  const size_t last =
      index(lease.ring_index) * index(context_.config.max_num_seqs) + lease.requests.size() - 1;
  const int num_samples = arrays_.outcome.outcomes[last].sample_end;
  const int block = context_.config.max_num_logits_rows;
  num_last_logits_ = num_samples == 0 ? 0 : (num_samples - 1) % block + 1;
  num_last_rows_ = lease.num_rows;
  num_last_spans_ = static_cast<int>(lease.requests.size());
}

SpanResult DeviceStep::result_of(const StepLease& lease, size_t span) const {
  const RunnerConfig& config = context_.config;
  const size_t entry = index(lease.ring_index) * index(config.max_num_seqs) + span;
  const StepOutcome& outcome = arrays_.outcome.outcomes[entry];
  SpanResult result;
  result.slot = lease.requests[span].slot;
  const SequenceTable& table = context_.table;
  // Another sequence may have the slot by now; nobody wants to know then.
  if (!table.is_held_by(result.slot, lease.serials[span])) return result;
  const size_t first = entry * index(1 + drafts_per_seq());
  const int32_t *tokens = arrays_.outcome.tokens + first,
                *samples = arrays_.outcome.samples + first;
  result.token_ids.assign(tokens, tokens + outcome.num_tokens);
  result.finish = static_cast<FinishReason>(outcome.finish);
  result.num_computed = outcome.num_computed;
  result.num_draft_tokens = outcome.num_drafts;
  result.num_accepted_tokens = outcome.num_accepted;
  result.num_offered = outcome.num_offered;
  result.num_judged = outcome.num_judged;
  result.num_right = outcome.num_right;
  if (lease.is_forced[span]) {
    result.is_forced = true;
    result.num_forced_tokens = outcome.num_drafts;
    result.num_accepted_forced_tokens = outcome.num_accepted;
  }

  const SequenceParams& params = table.params(result.slot);
  if (params.reports_steps && outcome.first_choice >= 0) result.detail = detail_of(result, entry);
  const size_t ring_begin = index(lease.ring_index) * index(config.max_num_batched_tokens);
  const auto logprobs_of = [&](int sample, int num_best) {
    const size_t i = ring_begin + index(sample);
    const int32_t* ids = arrays_.outcome.logprob_ids + i * kLogprobWidth;
    const float* values = arrays_.outcome.logprobs + i * kLogprobWidth;
    const auto count = index(1 + num_best);
    return TokenLogprobs{{ids, ids + count}, {values, values + count}, arrays_.outcome.ranks[i]};
  };
  if (params.num_prompt_logprobs >= 0) {
    const int end = outcome.first_choice >= 0 ? outcome.first_choice : outcome.sample_end;
    for (int sample = outcome.sample_begin; sample < end; ++sample) {
      result.prompt_logprobs.push_back(logprobs_of(sample, params.num_prompt_logprobs));
    }
  }
  if (params.num_logprobs >= 0) {
    for (int i = 0; i < outcome.num_tokens; ++i) {
      result.logprobs.push_back(logprobs_of(samples[i], params.num_logprobs));
    }
  }
  return result;
}

// --- Measuring and looking inside ----------------------------------------------------------------

double DeviceStep::time_step(const StepKind& kind, std::span<const int> slots) {
  const SequenceTable& table = context_.table;
  const DrafterNeeds& needs = context_.drafter.needs();
  const int num_drafts = kind.proposes ? context_.config.max_draft_tokens : 0;
  const StepHeader header = {.num_spans = kind.num_seqs,
                             .num_slot_updates = kind.num_seqs,
                             .num_page_updates = 0,
                             .row_budget = kind.num_rows};
  const StepInputArrays& input = arrays_.host_input[0];
  const int context = table.num_tokens(slots[0]);
  for (int i = 0; i < kind.num_seqs; ++i) {
    const int slot = slots[index(i)];
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
        .is_active = 1};
    const auto row = context_.table.page_row(slot);
    device::copy_to_device(arrays_.table.pages + int64_t{slot} * arrays_.table.max_pages_per_seq,
                           row.data(), row.size_bytes(), stream_.handle());
    upload_params(slot);
  }
  // A drafter that costs nothing proposes in every step.
  StepShape shape{kind.num_rows, kind.num_seqs, kind.proposes, kind.proposes && needs.makes_trees};
  for (const bool proposes : {kind.proposes, !kind.proposes}) {
    const bool has_trees = proposes && needs.makes_trees;
    const StepShape* recorded = book_.find(
        {kind.num_rows, kind.num_seqs, proposes, has_trees,
         context > short_kv_len(kind.num_rows, kind.num_seqs), needs.is_costly && !proposes,
         kind.num_rows > kind.num_seqs * (1 + context_.config.draft_room())});
    if (recorded == nullptr || recorded->num_rows != kind.num_rows) continue;
    shape = *recorded;
    break;
  }
  start(0, header, shape, kind.proposes ? kind.num_rows : std::min(kind.num_seqs, kind.num_rows));
  done_[0].wait();
  return done_[0].seconds_since(begun_[0]);
}

void DeviceStep::set_capture(std::vector<int> layers) {
  const bool is_changed = layers != capture_layers_;
  StepBackend::set_capture(std::move(layers));
  if (!is_changed) return;
  synchronize();
  const RunnerConfig& config = context_.config;
  const size_t row_bytes =
      capture_layers_.size() * index(config.target.hidden_size) * dtype_bytes(config.dtype);
  captured_ = Buffer(index(config.max_num_batched_tokens) * row_bytes, Memory::kDevice);
  if (context_.drafter.needs().is_costly) {
    kept_ = Buffer(index(config.max_num_seqs) * kMaxKeptRows * row_bytes, Memory::kDevice);
  }
  if (!graphs_.empty()) prepare();
}

}  // namespace openspec

#endif
