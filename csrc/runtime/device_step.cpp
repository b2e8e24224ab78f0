#include "runtime/device_step.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>

#include "core/check.h"
#include "kernels/ops.h"

namespace openspec {

namespace {

constexpr int kGraphRows[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256};
// Two steps are in flight at most; the others are being read, or were given up.
constexpr int kRing = 4;
// Most requests' lists of stop ids and biases fit.
constexpr size_t kListBytes = 4096;

size_t round_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

DeviceStep::InputLayout DeviceStep::plan_input(const RunnerConfig& config,
                                               const DrafterNeeds& needs) {
  InputLayout at{};
  const auto take = [&](size_t count, size_t bytes) {
    const size_t offset = at.total;
    at.total += round_up(count * bytes);
    return offset;
  };
  const auto seqs = index(config.max_num_seqs);
  // Of every sequence: its part of the step's rows, and the entries behind these.
  const size_t pages_behind = index(config.num_lookahead(needs) / config.page_size + 2);
  const size_t num_page_updates =
      index(config.max_num_batched_tokens / config.page_size) + seqs * pages_behind;
  at.header = take(1, sizeof(StepHeader));
  at.spans = take(seqs, sizeof(StepSpan));
  at.slot_updates = take(seqs, sizeof(SlotUpdate));
  at.page_updates = take(num_page_updates, sizeof(PageUpdate));
  at.num_drafts = take(seqs, sizeof(int32_t));
  for (size_t* array : {&at.drafts, &at.parents}) {
    *array = take(seqs * index(std::max(1, config.max_draft_tokens)), sizeof(int32_t));
  }
  return at;
}

DeviceStep::Scratch DeviceStep::plan_scratch(const RunnerConfig& config,
                                             const DrafterNeeds& needs) {
  Scratch at{};
  const auto take = [&](size_t count, size_t bytes) {
    const size_t offset = at.total;
    at.total += round_up(count * bytes);
    return offset;
  };
  const auto seqs = index(config.max_num_seqs);
  const auto rows = index(config.max_num_batched_tokens);
  const auto num_drafts = index(std::max(1, config.max_draft_tokens));
  const size_t pages_per_seq = index(SequenceTable::pages_per_sequence(
      config.max_model_len, config.page_size, config.num_lookahead(needs)));
  at.tokens = take(seqs * index(config.max_model_len), sizeof(int32_t));
  for (size_t* array :
       {&at.num_tokens, &at.kv_len, &at.prompt_len, &at.max_num_tokens, &at.is_active, &at.seq,
        &at.num_wanted, &at.num_drafts, &at.span_kv_len, &at.span_seq, &at.num_offered,
        &at.num_granted, &at.num_computed, &at.first_choice}) {
    *array = take(seqs, sizeof(int32_t));
  }
  at.kept_begin = take(seqs, sizeof(int32_t));
  at.kept_slot = take(seqs, sizeof(int32_t));
  at.span_begin = take(seqs + 1, sizeof(int32_t));
  at.sample_begin = take(seqs + 1, sizeof(int32_t));
  at.pages = take(seqs * pages_per_seq, sizeof(int32_t));
  at.sampling = take(seqs, sizeof(SamplingParams));
  at.input = take(1, plan_input(config, needs).total);
  for (size_t* array : {&at.drafts, &at.parents, &at.scores}) {
    *array = take(seqs * num_drafts, sizeof(int32_t));
  }
  for (size_t* array :
       {&at.row_token, &at.row_position, &at.row_span, &at.row_parent, &at.committed_row,
        &at.sample_row, &at.score_token, &at.chosen, &at.ranks}) {
    *array = take(rows, sizeof(int32_t));
  }
  at.row_kv_slot = take(rows, sizeof(int64_t));
  at.logprob_ids = take(rows * kLogprobWidth, sizeof(int32_t));
  at.logprobs = take(rows * kLogprobWidth, sizeof(float));
  at.logits =
      take(index(config.max_num_logits_rows) * index(config.target.vocab_size), sizeof(float));
#ifdef OPENSPEC_CUDA
  at.choose =
      take(1, choose_workspace_bytes_cuda(config.max_num_logits_rows, config.target.vocab_size));
#endif
  return at;
}

size_t DeviceStep::scratch_bytes(const RunnerConfig& config, const DrafterNeeds& needs) {
  return plan_scratch(config, needs).total + index(config.max_num_seqs) * kListBytes;
}

DeviceStep::DeviceStep(StepContext context)
    : StepBackend(context, StepYield::Common::kDelay),
      context_(std::move(context)),
      exec_{.pool = nullptr, .device = Device::kCuda, .stream = stream_.handle()},
      input_(plan_input(context_.config, context_.drafter.needs())),
      scratch_at_(plan_scratch(context_.config, context_.drafter.needs())),
      scratch_(scratch_at_.total, Memory::kDevice) {
  const RunnerConfig& config = context_.config;
  OPENSPEC_CHECK_ARG(config.max_num_seqs <= kMaxStepSpans, "on CUDA max_num_seqs must not exceed ",
                     kMaxStepSpans, ", got ", config.max_num_seqs);
  OPENSPEC_CHECK_ARG(
      !context_.drafter.needs().makes_trees || config.max_draft_tokens < kMaxTreeRows,
      "on CUDA a tree has fewer than ", kMaxTreeRows, " drafts, got ", config.max_draft_tokens);
  device::fill_zero(scratch_.data(), scratch_.bytes(), stream_.handle());
  const Scratch& s = scratch_at_;
  table_ = {.tokens = at<int32_t>(s.tokens),
            .tokens_stride = config.max_model_len,
            .num_tokens = at<int32_t>(s.num_tokens),
            .kv_len = at<int32_t>(s.kv_len),
            .prompt_len = at<int32_t>(s.prompt_len),
            .max_num_tokens = at<int32_t>(s.max_num_tokens),
            .is_active = at<int32_t>(s.is_active),
            .pages = at<int32_t>(s.pages),
            .max_pages_per_seq = context_.table.page_table().max_pages_per_seq,
            .sampling = at<SamplingParams>(s.sampling),
            .kept_begin = at<int32_t>(s.kept_begin)};
  for (int i = 0; i < config.max_num_seqs; ++i) {
    slot_params_.push_back({Buffer(kListBytes, Memory::kDevice),
                            Buffer(sizeof(SamplingParams) + kListBytes, Memory::kPinned),
                            device::Event()});
  }
  const auto entries = index(kRing) * index(config.max_num_seqs);
  const auto samples = index(kRing) * index(config.max_num_batched_tokens);
  input_ring_ = Buffer(index(kRing) * input_.total, Memory::kPinned);
  kept_slots_ = Buffer(entries * sizeof(int32_t), Memory::kPinned);
  outcomes_ = Buffer(entries * sizeof(StepOutcome), Memory::kPinned);
  for (Buffer* buffer : {&tokens_, &samples_}) {
    *buffer = Buffer(entries * index(1 + std::max(1, config.max_draft_tokens)) * sizeof(int32_t),
                     Memory::kPinned);
  }
  logprob_ids_ = Buffer(samples * kLogprobWidth * sizeof(int32_t), Memory::kPinned);
  logprobs_ = Buffer(samples * kLogprobWidth * sizeof(float), Memory::kPinned);
  ranks_ = Buffer(samples * sizeof(int32_t), Memory::kPinned);
  const auto layers = std::span(context_.kv_layers).first(index(config.target.num_layers));
  kv_layers_ = Buffer(layers.size_bytes(), Memory::kDevice);
  device::copy_to_device(kv_layers_.data(), layers.data(), layers.size_bytes(), stream_.handle());
  synchronize();
  for (auto* events : {&begun_, &done_}) {
    events->reserve(kRing);
    for (int i = 0; i < kRing; ++i) events->emplace_back();
  }
}

DeviceStep::~DeviceStep() {
  try {
    synchronize();  // a step that was given up may still use what goes now
  } catch (const DeviceError&) {
    // Nothing runs any more.
  }
}

int DeviceStep::num_steps_ahead() const {
  const bool has_drafts = context_.config.max_draft_tokens > 0;
  return has_drafts && !context_.drafter.works_on_arrays() ? 0 : 1;
}

void DeviceStep::synchronize() { device::synchronize(stream_.handle()); }

// --- Sequences ---------------------------------------------------------------------------------

void DeviceStep::await_slot(int slot) { slot_params_[index(slot)].uploaded.wait(); }

void DeviceStep::add_sequence(int slot) {
  SequenceTable& table = context_.table;
  const auto tokens = table.tokens(slot);
  device::copy_to_device(table_.tokens + slot * table_.tokens_stride, tokens.data(),
                         tokens.size_bytes(), stream_.handle());
  const auto pages = table.pages(slot);
  if (!pages.empty()) {
    device::copy_to_device(table_.pages + int64_t{slot} * table_.max_pages_per_seq, pages.data(),
                           pages.size_bytes(), stream_.handle());
  }
  upload_params(slot);
  slot_params_[index(slot)].uploaded.record(stream_.handle());
  new_slots_.push_back(slot);
  update_slot(slot);
}

void DeviceStep::restore_sequence(int slot) {
  has_restored_ = true;
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
  const size_t num_ints =
      p.stop_ids.size() + p.bias_ids.size() + p.bias_values.size() + p.allowed_ids.size();
  if (num_ints * sizeof(int32_t) > room.lists.bytes()) {
    synchronize();  // what is freed may be in use
    const size_t bytes = std::bit_ceil(num_ints * sizeof(int32_t));
    Buffer lists(bytes, Memory::kDevice), staging(sizeof(SamplingParams) + bytes, Memory::kPinned);
    room.lists = std::move(lists);  // both or none
    room.staging = std::move(staging);
  }
  SamplingParams sampling = context_.table.sampling_data()[slot];
  auto* staged = room.staging.as<std::byte>() + sizeof(SamplingParams);
  auto* device_lists = room.lists.as<std::byte>();
  size_t offset = 0;
  const auto put = [&](const auto& list, auto& pointer) {
    using T = std::remove_reference_t<decltype(*list.data())>;
    if (!list.empty()) std::memcpy(staged + offset, list.data(), list.size() * sizeof(T));
    pointer = reinterpret_cast<const T*>(device_lists + offset);
    offset += list.size() * sizeof(T);
  };
  put(p.stop_ids, sampling.stop_ids);
  put(p.bias_ids, sampling.bias_ids);
  put(p.bias_values, sampling.bias_values);
  put(p.allowed_ids, sampling.allowed_ids);
  std::memcpy(room.staging.data(), &sampling, sizeof sampling);
  device::copy_to_device(table_.sampling + slot, room.staging.data(), sizeof sampling,
                         stream_.handle());
  if (offset > 0) device::copy_to_device(device_lists, staged, offset, stream_.handle());
}

// --- The step, on the host -----------------------------------------------------------------------

void DeviceStep::launch(StepLease& lease) {
  for (const char* stage : {"propose", "score", "choose", "accept"}) context_.enter(stage);
  const RunnerConfig& config = context_.config;
  lease.ring_index = next_ring_;
  next_ring_ = (next_ring_ + 1) % kRing;
  done_[index(lease.ring_index)].wait();  // for steps that were given up; any other is collected
  std::byte* input = input_at(lease.ring_index);
  const bool is_on_host = num_steps_ahead() == 0 && config.max_draft_tokens > 0;
  const bool host_has_trees = is_on_host && propose_on_host(lease, input);
  const Shape shape = choose_shape(lease, host_has_trees);
  // The lengths that sequences go back to forget where the rows that wait began.
  const bool goes_back = std::exchange(has_restored_, false);
  if (goes_back || !shape.keeps_rows || num_kept_steps_ == most_kept_steps(config)) {
    teach_kept(lease.ring_index);
  }
  num_kept_steps_ += shape.keeps_rows;
  lease.num_waiting = num_kept_steps_;
  const int num_samples = num_samples_of(lease, shape);
  lease.has_proposed = shape.proposes || is_on_host;

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
  auto* spans = reinterpret_cast<StepSpan*>(input + input_.spans);
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    spans[i] = {.slot = request.slot,
                .num_new_tokens = request.num_new_tokens,
                .max_drafts = lease.has_proposed ? request.max_drafts : 0,
                .acceptance = static_cast<float>(context_.table.acceptance(request.slot).ratio())};
  }
  const size_t slot_bytes = slot_updates_.size() * sizeof(SlotUpdate);
  const size_t page_bytes = page_updates.size() * sizeof(PageUpdate);
  OPENSPEC_CHECK(input_.slot_updates + slot_bytes <= input_.page_updates &&
                     input_.page_updates + page_bytes <= input_.num_drafts,
                 "a step has ", slot_updates_.size(), " slot and ", page_updates.size(),
                 " page updates, more than its input holds");
  std::memcpy(input + input_.slot_updates, slot_updates_.data(), slot_bytes);
  std::memcpy(input + input_.page_updates, page_updates.data(), page_bytes);
  start(lease.ring_index, header, shape, num_samples);
  slot_updates_.clear();
  new_slots_.clear();
}

void DeviceStep::start(int ring_index, const StepHeader& header, const Shape& shape,
                       int num_samples) {
  begun_[index(ring_index)].record(stream_.handle());
  if (num_steps_ahead() == 0) {  // the host's proposals
    const size_t first = input_.num_drafts;
    device::copy_to_device(at<std::byte>(scratch_at_.input + first), input_at(ring_index) + first,
                           input_.total - first, stream_.handle());
  }
  begin(ring_index, header, shape.num_spans);
  const auto graph = graphs_.find(shape);
  if (graph != graphs_.end()) {
    graph->second.launch(stream_.handle());
  } else {
    enqueue(shape, num_samples);
  }
  done_[index(ring_index)].record(stream_.handle());
}

int DeviceStep::num_samples_of(const StepLease& lease, const Shape& shape) const {
  if (graphs_.contains(shape)) return shape.num_rows;
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
  const int num_samples = outcomes_.as<StepOutcome>()[last].sample_end;
  const int block = context_.config.max_num_logits_rows;
  num_last_logits_ = num_samples == 0 ? 0 : (num_samples - 1) % block + 1;
  num_last_rows_ = lease.num_rows;
  num_last_spans_ = static_cast<int>(lease.requests.size());
}

SpanResult DeviceStep::result_of(const StepLease& lease, size_t span) const {
  const RunnerConfig& config = context_.config;
  const size_t entry = index(lease.ring_index) * index(config.max_num_seqs) + span;
  const StepOutcome& outcome = outcomes_.as<StepOutcome>()[entry];
  SpanResult result;
  result.slot = lease.requests[span].slot;
  const SequenceTable& table = context_.table;
  // Another sequence may have the slot by now; nobody wants to know then.
  if (!table.is_held_by(result.slot, lease.serials[span])) return result;
  const size_t first = entry * index(1 + std::max(1, config.max_draft_tokens));
  const int32_t *tokens = tokens_.as<int32_t>() + first, *samples = samples_.as<int32_t>() + first;
  result.token_ids.assign(tokens, tokens + outcome.num_tokens);
  result.finish = static_cast<FinishReason>(outcome.finish);
  result.num_computed = outcome.num_computed;
  result.num_draft_tokens = outcome.num_drafts;
  result.num_accepted_tokens = outcome.num_accepted;
  result.num_offered = outcome.num_offered;
  result.num_judged = outcome.num_judged;
  result.num_right = outcome.num_right;

  const SequenceParams& params = table.params(result.slot);
  const size_t ring_begin = index(lease.ring_index) * index(config.max_num_batched_tokens);
  const auto logprobs_of = [&](int sample, int num_best) {
    const size_t i = ring_begin + index(sample);
    const int32_t* ids = logprob_ids_.as<int32_t>() + i * kLogprobWidth;
    const float* values = logprobs_.as<float>() + i * kLogprobWidth;
    const auto count = index(1 + num_best);
    return TokenLogprobs{{ids, ids + count}, {values, values + count}, ranks_.as<int32_t>()[i]};
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

std::vector<int> DeviceStep::row_sizes() const {
  const RunnerConfig& config = context_.config;
  std::vector<int> sizes;
  for (int rows : kGraphRows) {
    if (rows <= std::min(config.max_num_batched_tokens, config.max_num_logits_rows)) {
      sizes.push_back(rows);
    }
  }
  return sizes;
}

std::vector<StepBackend::StepKind> DeviceStep::step_kinds() const {
  const RunnerConfig& config = context_.config;
  const bool is_costly = context_.drafter.needs().is_costly;
  std::set<std::pair<int, std::pair<bool, int>>> kinds;  // rows, whether it proposes, sequences
  for (const auto& [shape, graph] : graphs_) {
    kinds.insert({shape.num_rows, {shape.proposes && is_costly, shape.num_spans}});
    // Drafts that cost nothing are verified in the graphs of as many sequences as rows.
    const int least = (shape.num_rows + most_draft_rows() - 1) / most_draft_rows();
    for (int num_seqs = shape.num_spans; !is_costly && num_seqs > least;) {
      num_seqs = std::max(least, num_seqs / 2);
      kinds.insert({shape.num_rows, {false, num_seqs}});
    }
  }
  // Larger steps have any size; drafts there stand beside prompts. Linears take them in bands of
  // rows, so that up to most_sized_rows() their times rise in steps.
  const int largest = row_sizes().back();
  for (int rows : {largest + largest / 2, most_sized_rows(), 4 * largest}) {
    if (rows > config.max_num_batched_tokens) break;
    kinds.insert({rows, {false, config.max_num_seqs}});
    for (int num_seqs = config.max_num_seqs; is_costly && num_seqs > 1; num_seqs /= 4) {
      if (2 * num_seqs <= rows) kinds.insert({rows, {true, num_seqs}});
    }
  }
  std::vector<StepKind> list;
  for (const auto& [rows, kind] : kinds) list.push_back({kind.second, rows, kind.first});
  return list;
}

double DeviceStep::time_step(const StepKind& kind, std::span<const int> slots) {
  const SequenceTable& table = context_.table;
  const DrafterNeeds& needs = context_.drafter.needs();
  const int num_drafts = kind.proposes ? context_.config.max_draft_tokens : 0;
  const StepHeader header = {.num_spans = kind.num_seqs,
                             .num_slot_updates = kind.num_seqs,
                             .num_page_updates = 0,
                             .row_budget = kind.num_rows};
  std::byte* input = input_at(0);
  auto* spans = reinterpret_cast<StepSpan*>(input + input_.spans);
  auto* updates = reinterpret_cast<SlotUpdate*>(input + input_.slot_updates);
  const int context = table.num_tokens(slots[0]);
  for (int i = 0; i < kind.num_seqs; ++i) {
    const int slot = slots[index(i)];
    // Without drafts the rows are the last tokens of the sequences, computed again.
    const int num_rows = kind.proposes ? 1 : (kind.num_rows + i) / kind.num_seqs;
    const int num_new_tokens = std::min(num_rows, context);
    spans[i] = {.slot = slot,
                .num_new_tokens = num_new_tokens,
                .max_drafts = num_drafts,
                .acceptance = 0.5f};
    updates[i] = {
        .slot = slot,
        .num_tokens = context,
        .kv_len = context - num_new_tokens,
        .prompt_len = context,
        .max_num_tokens = std::min(context + num_drafts + 2, context_.config.max_model_len),
        .is_active = 1};
    const auto row = context_.table.page_row(slot);
    device::copy_to_device(table_.pages + int64_t{slot} * table_.max_pages_per_seq, row.data(),
                           row.size_bytes(), stream_.handle());
    upload_params(slot);
  }
  // A drafter that costs nothing proposes in every step.
  Shape shape{kind.num_rows, kind.num_seqs, kind.proposes, kind.proposes && needs.makes_trees};
  for (const bool proposes : {kind.proposes, !kind.proposes}) {
    const bool has_trees = proposes && needs.makes_trees;
    const auto graph = find_graph({kind.num_rows, kind.num_seqs, proposes, has_trees,
                                   context > kShortKvLen, needs.is_costly && !proposes,
                                   kind.num_rows > kind.num_seqs * most_draft_rows()});
    if (graph == graphs_.end() || graph->first.num_rows != kind.num_rows) continue;
    shape = graph->first;
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

std::vector<float> DeviceStep::last_logits() {
  std::vector<float> values(index(num_last_logits_) * index(context_.config.target.vocab_size));
  device::copy_to_host(values.data(), at<float>(scratch_at_.logits), values.size() * sizeof(float),
                       stream_.handle());
  synchronize();
  return values;
}

std::vector<float> DeviceStep::last_features() {
  std::vector<uint16_t> bits(index(num_last_rows_) * capture_layers_.size() *
                             index(context_.config.target.hidden_size));
  device::copy_to_host(bits.data(), captured_.data(), bits.size() * sizeof(uint16_t),
                       stream_.handle());
  synchronize();
  std::vector<float> values(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) {
    values[i] = std::bit_cast<float>(uint32_t{bits[i]} << 16);
  }
  return values;
}

std::vector<Draft> DeviceStep::last_drafts() {
  const auto most = index(std::max(1, context_.config.max_draft_tokens));
  const auto seqs = index(num_last_spans_);
  const auto download = [&]<typename T>(size_t offset, size_t count, T /*type*/) {
    std::vector<T> values(count);
    device::copy_to_host(values.data(), at<T>(offset), count * sizeof(T), stream_.handle());
    synchronize();
    return values;
  };
  const auto tokens = download(scratch_at_.drafts, seqs * most, int32_t{});
  const auto counts = download(scratch_at_.num_drafts, seqs, int32_t{});
  const auto parents = download(scratch_at_.parents, seqs * most, int32_t{});
  const auto scores = download(scratch_at_.scores, seqs * most, float{});
  const bool has_trees = context_.drafter.needs().makes_trees;
  const bool has_scores = has_trees || compares_chains(num_last_spans_);
  std::vector<Draft> drafts(seqs);
  for (size_t i = 0; i < seqs; ++i) {
    for (size_t k = i * most; k < i * most + index(counts[i]); ++k) {
      drafts[i].append(tokens[k]);
      if (has_trees) drafts[i].parents.back() = parents[k];
      if (has_scores) drafts[i].scores.push_back(scores[k]);
    }
  }
  return drafts;
}

}  // namespace openspec
