#include "runtime/runner.h"

#include <algorithm>
#include <optional>

#include "core/check.h"
#include "kernels/drafts/kept_rows.h"
#include "kernels/ops.h"
#include "model/targets/device_exchange.h"
#include "model/targets/sharded.h"
#include "model/weights/weights.h"
#include "runtime/device/device_step.h"
#include "runtime/drafting/copy_source.h"
#include "runtime/step/host_step.h"

namespace openspec {

namespace {

const TargetKind& kind_of(const RunnerConfig& config) { return target_kind(config.target.kind); }

TargetSetup setup_of(const RunnerConfig& config) {
  return {.spec = config.target,
          .dtype = config.dtype,
          .device = config.device,
          .limits = config.limits(),
          .num_threads = config.num_threads,
          .rank = {.size = config.tensor_parallel_size}};
}

size_t kv_page_bytes(const RunnerConfig& config, const KvLayerSpec& layer) {
  return size_t{2} * static_cast<size_t>(layer.num_kv_heads) *
         static_cast<size_t>(config.page_size) * static_cast<size_t>(layer.head_dim) *
         dtype_bytes(config.dtype);
}

SequenceLimits limits_of(const RunnerConfig& config, const DrafterNeeds& needs) {
  return {.device = config.device,
          .max_num_seqs = config.max_num_seqs,
          .max_model_len = config.max_model_len,
          .page_size = config.page_size,
          .max_num_batched_tokens = config.max_num_batched_tokens,
          .draft_room = config.draft_room(),
          .num_steps = config.num_steps(),
          .num_lookahead = config.num_lookahead(needs),
          .num_draft_entries = needs.num_draft_entries,
          .num_rows_behind = needs.state.kv_layers.empty() ? 0 : 1,
          .enable_prefix_caching = config.enable_prefix_caching,
          .cache_key = config.cache_key};
}

RecordPlan plan_records(const RunnerConfig& config, const DrafterNeeds& needs) {
  OPENSPEC_CHECK_ARG(!needs.state.has_records(), "a drafter keeps its state in pages, not records");
  return {kind_of(config).state_needs(setup_of(config)), limits_of(config, needs)};
}

BasePlan plan_bases(const RunnerConfig& config, const DrafterNeeds& needs) {
  const StateNeeds state = kind_of(config).state_needs(setup_of(config));
  OPENSPEC_CHECK_ARG(state.takes_trees || !needs.makes_trees,
                     "this model takes chains of drafts, not trees: set draft_top_k to 1");
  OPENSPEC_CHECK_ARG(config.draft_room() <= state.max_drafts, "this model takes at most ",
                     state.max_drafts, " drafts, got num_speculative_tokens ", config.draft_room());
  const size_t slice_bytes =
      state.kv_layers.empty() ? 0 : kv_page_bytes(config, state.kv_layers.front());
  return {state, slice_bytes, config.max_num_seqs};
}

/// Null where all is on one device.
std::unique_ptr<DeviceExchange> make_exchange(const RunnerConfig& config) {
  if (config.device == Device::kCpu || config.tensor_parallel_size == 1) return nullptr;
  return std::make_unique<DeviceExchange>(setup_of(config), config.devices,
                                          static_cast<uint64_t>(1e9 * config.exchange_deadline_s));
}

std::optional<device::Use> use_device(const DeviceExchange* exchange, size_t rank) {
  if (exchange == nullptr) return std::nullopt;
  return std::optional<device::Use>(std::in_place, exchange->device(static_cast<int>(rank)));
}

}  // namespace

MemoryPlan plan_memory(const RunnerConfig& config) {
  config.validate();
  const DrafterNeeds needs = make_drafter(config)->needs();
  const TargetSetup whole = setup_of(config);
  MemoryPlan plan;
  for (int rank = 0; rank < whole.rank.size; ++rank) {
    const TargetSetup setup = setup_of_rank(whole, rank);
    plan.weight_bytes = std::max(plan.weight_bytes, kind_of(config).weight_bytes(setup));
    plan.scratch_bytes = std::max(plan.scratch_bytes, kind_of(config).scratch_bytes(setup));
  }
  plan.num_base_pages = plan_bases(config, needs).num_pages;
  plan.exchange_bytes = exchange_bytes_of_rank(whole);
  plan.scratch_bytes +=
      plan.exchange_bytes + (config.device == Device::kCuda
                                 ? DeviceBuffers::device_bytes(config, needs, plan.num_base_pages)
                                 : HostStep::scratch_bytes(config));
  plan.table_bytes = SequenceTable::table_bytes(config.max_num_seqs, config.max_model_len,
                                                config.page_size, config.num_lookahead(needs));
  const size_t row_bytes = needs.capture_layers.size() *
                           static_cast<size_t>(config.target.hidden_size) *
                           dtype_bytes(config.dtype);
  const int num_kept = needs.is_costly ? config.max_num_seqs * kMaxKeptRows : 0;
  plan.draft_fixed_bytes =
      config.draft_memory_bytes + needs.fixed_bytes + copy_lookup_of(config).bytes() +
      row_bytes * static_cast<size_t>(config.max_num_batched_tokens + num_kept);
  plan.state_bytes = plan_records(config, needs).bytes();
  for (const KvLayerSpec& layer : needs.state.kv_layers) {
    plan.draft_page_bytes += kv_page_bytes(config, layer);
  }
  plan.page_bytes = plan.draft_page_bytes;
  for (const KvLayerSpec& layer : kind_of(config).state_needs(whole).kv_layers) {
    plan.page_bytes += kv_page_bytes(config, layer);
  }
  return plan;
}

std::vector<Runner::Rank> Runner::make_ranks(const RunnerConfig& config, DeviceExchange* exchange,
                                             std::unique_ptr<Drafter> drafter) {
  std::vector<Rank> ranks;
  const bool is_given = drafter != nullptr;
  if (exchange == nullptr) {
    ranks.push_back({.drafter = is_given ? std::move(drafter) : make_drafter(config),
                     .target = make_target(setup_of(config))});
    return ranks;
  }
  if (!is_given) drafter = make_drafter(config);
  const bool is_on_device = drafter->works_on_arrays();
  OPENSPEC_CHECK_ARG(!is_given || !is_on_device,
                     "where ranks share the target, each needs a drafter of its own");
  for (std::unique_ptr<TargetModel>& target : openspec::make_ranks(setup_of(config), *exchange)) {
    if (is_on_device && !ranks.empty()) drafter = make_drafter(config);
    ranks.push_back({.drafter = std::move(drafter), .target = std::move(target)});
  }
  return ranks;
}

Runner::Runner(const RunnerConfig& config, int num_pages, std::unique_ptr<Drafter> drafter)
    : config_((config.validate(), config)),
      exchange_(make_exchange(config_)),
      ranks_(make_ranks(config_, exchange_.get(), std::move(drafter))),
      sequences_(
          limits_of(config_, this->drafter().needs()),
          plan_records(config_, this->drafter().needs()),
          plan_bases(config_, this->drafter().needs()), num_pages,
          [this](void* to, const void* from, size_t bytes) { backend_->copy(to, from, bytes); }),
      table_(sequences_.table()) {
  OPENSPEC_CHECK_ARG(
      config_.acceptance == Acceptance::kMatch || this->drafter().needs().keeps_logits,
      "acceptance by rejection needs the probabilities of chains of drafts, which this "
      "drafter does not know; accept by match");
  std::vector<StepContext> contexts;
  for (Rank& rank : ranks_) {
    const size_t number = contexts.size();
    const auto use = use_device(exchange_.get(), number);
    take_pages(rank, static_cast<int>(number), num_pages);
    contexts.push_back({.config = config_,
                        .table = table_,
                        .target = *rank.target,
                        .drafter = rank.drafter ? *rank.drafter : this->drafter(),
                        .kv_layers = rank.kv_layers,
                        .records = sequences_.records(),
                        .tails = sequences_.tails(),
                        .bases = sequences_.bases(),
                        .base_memory = base_memory(rank, num_pages),
                        .enter = [this](const char* stage) { enter(stage); },
                        .report_drafter_failure =
                            [this](const std::exception& error) {
                              // A drafter can cost a step its drafts, never its tokens.
                              const std::lock_guard lock(stats_mutex_);
                              ++stats_.num_drafter_failures;
                              stats_.last_drafter_failure = error.what();
                            }});
    contexts.back().takes_trees = kind_of(config_).state_needs(setup_of(config_)).takes_trees;
    if (exchange_) contexts.back().exchange = &exchange_->rank(static_cast<int>(number));
  }
  if (config_.device == Device::kCuda) {
#ifdef OPENSPEC_CUDA
    backend_ = std::make_unique<DeviceStep>(contexts, exchange_.get());
#endif
  } else {
    backend_ = std::make_unique<HostStep>(contexts.front());
  }
  set_capture(this->drafter().needs().capture_layers);
}

Runner::~Runner() = default;

void Runner::take_pages(Rank& rank, int number, int num_pages) {
  const bool is_cuda = config_.device == Device::kCuda;
  const auto take = [&](const StateNeeds& needs) {
    std::vector<KvLayerView> views;
    if (needs.kv_layers.empty()) return views;
    AreaPlan areas;
    for (const KvLayerSpec& layer : needs.kv_layers)
      areas.take(num_pages, kv_page_bytes(config_, layer));
    Buffer& buffer = rank.kv_buffers.emplace_back(areas.bytes, memory_of(config_.device));
    areas = {};
    for (const KvLayerSpec& layer : needs.kv_layers) {
      views.push_back({buffer.at(areas.take(num_pages, kv_page_bytes(config_, layer))),
                       layer.num_kv_heads, layer.head_dim, config_.page_size});
    }
    return views;
  };
  const int size = config_.tensor_parallel_size;
  for (int whose = is_cuda ? number : 0; whose < (is_cuda ? number + 1 : size); ++whose) {
    TargetSetup setup = setup_of(config_);
    setup.rank = {whose, size};
    const auto views = take(kind_of(config_).state_needs(setup));
    rank.kv_layers.insert(rank.kv_layers.end(), views.begin(), views.end());
  }
  if (rank.drafter) rank.drafter->attach(*rank.target, take(rank.drafter->needs().state));
  if (!is_cuda) return;
  // A drafter's layer has a place that is never written, which attention multiplies by zero; and
  // what the target makes of places that were never written (time_steps) must not be NaN, or the
  // drafter would write that there.
  for (Buffer& buffer : rank.kv_buffers) {
    device::fill_zero(buffer.data(), buffer.bytes(), nullptr);
  }
  device::synchronize(nullptr);
}

DeltaStates Runner::base_memory(const Rank& rank, int num_pages) const {
  DeltaStates bases = sequences_.bases().view();
  if (!sequences_.bases().exist()) return bases;
  const KvLayerView& layer = rank.kv_layers.front();
  bases.page_stride = kv_page_bytes(config_, {layer.num_kv_heads, layer.head_dim});
  bases.slice_stride = area_bytes(bases.page_stride * static_cast<size_t>(num_pages));
  bases.data = static_cast<std::byte*>(layer.data);
  return bases;
}

std::vector<Weights*> Runner::target_weights() {
  std::vector<Weights*> all;
  for (Rank& rank : ranks_) {
    for (Weights* weights : rank.target->weights()) all.push_back(weights);
  }
  return all;
}

std::vector<Weights*> Runner::draft_weights() {
  std::vector<Weights*> all;
  for (Rank& rank : ranks_) {
    Weights* weights = rank.drafter ? rank.drafter->weights() : nullptr;
    if (weights != nullptr) all.push_back(weights);
  }
  return all;
}

Weights& Runner::spare_draft_weights() {
  Weights* spare = drafter().spare_weights();
  OPENSPEC_CHECK_ARG(spare != nullptr, "this engine has no room for another draft head");
  return *spare;
}

void Runner::exchange_drafter() {
  spare_draft_weights();
  enter("exchange");
  backend_->exchange_drafter();
  backend_->planner().forget_drafter();
  acceptance_[kDrafterDrafts] = AcceptanceEstimate::of_all();
  for (const int slot : table_.slots_in_use()) forget_drafts(slot, kDrafterDrafts);
}

void Runner::finish_loading() {
  for (Weights* weights : target_weights()) weights->finish_loading();
  for (Weights* weights : draft_weights()) weights->finish_loading();
  backend_->prepare();
}

void Runner::set_capture(std::vector<int> layers) {
  for (int layer : layers) {
    OPENSPEC_CHECK_ARG(layer >= 0 && layer < config_.target.num_layers(), "layer ", layer,
                       " is outside the model's ", config_.target.num_layers());
  }
  OPENSPEC_CHECK_ARG(std::is_sorted(layers.begin(), layers.end()), "layers must rise");
  backend_->set_capture(std::move(layers));
}

// --- Sequences ---------------------------------------------------------------------------------

int Runner::add_sequence(std::span<const int32_t> tokens, int prompt_len, SequenceParams params,
                         std::span<const uint8_t> cache_salt) {
  for (int32_t token : tokens) {
    OPENSPEC_CHECK_ARG(token >= 0 && token < config_.target.vocab_size, "token id ", token,
                       " is outside the vocabulary of ", config_.target.vocab_size);
  }
  if (params.grammar != nullptr) {
    const int vocab_size = params.grammar->vocabulary().size();
    OPENSPEC_CHECK_ARG(vocab_size == config_.target.vocab_size, "the grammar is for ", vocab_size,
                       " tokens, the model has ", config_.target.vocab_size);
  }
  if (const int next = table_.next_slot(); next >= 0) backend_->await_slot(next);
  const int slot = sequences_.add(tokens, prompt_len, std::move(params), cache_salt);
  try {
    enter("add");
    for (const DraftSourceId source : {kGrammarDrafts, kCopiedDrafts, kDrafterDrafts}) {
      forget_drafts(slot, source);
    }
    const std::string& owner = table_.params(slot).owner;
    table_.owner(slot) = sequences_.prefixes()
                             .root({reinterpret_cast<const uint8_t*>(owner.data()), owner.size()})
                             .low;
    table_.estimate(slot, kCopiedDrafts).availability =
        AcceptanceEstimate(copy_availability_.ratio());
    table_.copy_estimate(slot) = CopyEstimate::like(copy_acceptance_);
    // Rows that score prompt tokens must run, cached or not.
    if (config_.enable_prefix_caching && table_.params(slot).num_prompt_logprobs < 0) {
      sequences_.prefixes().attach(slot);
    }
    backend_->add_sequence(slot);
  } catch (...) {
    remove_sequence(slot);
    throw;
  }
  return slot;
}

void Runner::remove_sequence(int slot) {
  table_.check_slot(slot);
  if (config_.draft_memory_bytes > 0) backend_->remember(slot);
  sequences_.remove(slot);
}

void Runner::check_integrity() const {
  backend_->synchronize();
  sequences_.check_integrity(num_steps_ahead() > 0);
}

// --- The step ----------------------------------------------------------------------------------

std::unique_ptr<StepLease> Runner::reserve(std::span<const SpanRequest> requests) {
  enter("reserve");
  std::unique_ptr<StepLease> lease = sequences_.reserve(requests);
  lease->on_abandon = [this](StepLease& abandoned) { abandon(abandoned); };
  return lease;
}

void Runner::abandon(StepLease& lease) {
  sequences_.abandon(lease);
  if (lease.state != StepLease::State::kLaunched) return;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    if (sequences_.is_current(lease, i)) backend_->restore_sequence(lease.requests[i].slot);
  }
}

void Runner::launch(StepLease& lease) {
  OPENSPEC_CHECK(lease.state == StepLease::State::kReserved, "a lease is launched once");
  sequences_.begin(lease);
  // From here on the device may have changed lengths, even if launching fails half-way.
  lease.state = StepLease::State::kLaunched;
  lease.launched_at = Clock::now();
  backend_->launch(lease);
}

const std::vector<SpanResult>& Runner::collect(StepLease& lease) {
  OPENSPEC_CHECK(lease.state == StepLease::State::kLaunched, "collect follows launch");
  enter("collect");
  backend_->collect(lease);
  const Clock::time_point begun = std::max(last_collected_, lease.launched_at);
  const double seconds = seconds_since(std::exchange(last_collected_, Clock::now()));
  DraftPlanner& planner = backend_->planner();
  planner.observe_time(lease, backend_->planned_seconds(seconds));
  planner.observe_experts(lease);
  const double whole = std::chrono::duration<double>(last_collected_ - begun).count();
  const std::optional<double> drafting = backend_->draft_seconds(lease);
  {
    const std::lock_guard lock(stats_mutex_);
    if (drafting) {
      stats_.draft_seconds += *drafting;
      stats_.verify_seconds += lease.seconds - *drafting;
    } else {
      stats_.unsplit_seconds += lease.seconds;
    }
    stats_.rest_seconds += std::max(0.0, whole - lease.seconds);
    stats_.experts += lease.experts;
    if (const ExpertSharing* sharing = planner.expert_sharing()) {
      stats_.experts_of_drafts = sharing->of_drafts();
      stats_.experts_of_sequences = sharing->of_sequences();
    }
    stats_.exchange.resize(lease.exchange.size());
    for (size_t rank = 0; rank < lease.exchange.size(); ++rank) {
      stats_.exchange[rank].num_rounds += lease.exchange[rank].num_rounds;
      stats_.exchange[rank].wait_ns += lease.exchange[rank].wait_ns;
    }
  }
  for (size_t i = 0; i < lease.results.size(); ++i) {
    if (!sequences_.is_current(lease, i)) continue;
    const GrammarPlace* grammar = table_.grammar(lease.requests[i].slot);
    lease.results[i].is_held = grammar != nullptr && grammar->is_slow();
    if (!lease.failures.empty()) lease.results[i].failure = lease.failures[i];
  }
  // Not those that had ended when the step began, which was launched before that was known.
  const auto num_seqs = std::ranges::count_if(
      lease.results, [](const SpanResult& result) { return result.num_computed > 0; });
  for (SpanResult& result : lease.results) {
    if (!result.detail) continue;
    result.detail->num_rows = lease.num_rows;
    result.detail->num_seqs = static_cast<int>(num_seqs);
    result.detail->seconds = whole;
    result.detail->device_seconds = lease.seconds;
    result.detail->draft_seconds = drafting;
    for (const ExchangeCounts& rank : lease.exchange) {
      result.detail->wait_seconds.push_back(1e-9 * static_cast<double>(rank.wait_ns));
    }
  }
  return lease.results;
}

void Runner::commit(StepLease& lease) {
  OPENSPEC_CHECK(lease.state == StepLease::State::kLaunched, "commit follows launch");
  OPENSPEC_CHECK(lease.results.size() == lease.requests.size(), "commit follows collect");
  enter("commit");
  bool is_drafter_stale = false;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    if (!sequences_.is_current(lease, i)) continue;
    sequences_.commit(lease, i, num_steps_ahead() > 0, [this] { enter("publish"); });
    const int slot = lease.requests[i].slot;
    if (GrammarPlace* grammar = table_.grammar(slot);
        grammar != nullptr && lease.results[i].finish == FinishReason::kRunning) {
      const auto prompt_len = static_cast<size_t>(table_.prompt_len(slot));
      grammar->make_if_slow(table_.tokens(slot).subspan(prompt_len));
    }
    if (lease.requests[i].max_drafts > 0 && !lease.results[i].token_ids.empty()) {
      observe_acceptance(lease.results[i], lease.has_proposed);
    }
    for (Rank& rank : ranks_) {
      is_drafter_stale |= rank.drafter && rank.drafter->observe(lease.results[i].token_ids);
    }
  }
  backend_->teach_drafter(lease);
  if (is_drafter_stale) backend_->refresh_drafter();
  {
    const std::lock_guard lock(stats_mutex_);
    ++stats_.num_steps;
    stats_.num_rows += lease.num_rows;
  }
  lease.on_abandon = nullptr;
  lease.close();
}

void Runner::forget_drafts(int slot, DraftSourceId source) {
  table_.estimate(slot, source) = {AcceptanceEstimate::among(acceptance_[source]),
                                   AcceptanceEstimate()};
}

void Runner::observe_acceptance(const SpanResult& result, bool has_proposed) {
  const auto observe = [&](DraftSourceId source, int num_judged, int num_right) {
    table_.estimate(result.slot, source).acceptance.observe(num_judged, num_right);
    acceptance_[source].observe(num_judged, num_right);
  };
  const DraftCounts& grammar = result.by_source[kGrammarDrafts];
  const DraftCounts& drafter = result.by_source[kDrafterDrafts];
  observe(kGrammarDrafts, grammar.num_judged, grammar.num_right);
  if (config_.max_copied_drafts > 0) {
    const auto& [copy_class, num_judged, num_right] = result.copied;
    // One that is wrong from the first token on is as good as none. What follows a right one is
    // likely to be right for long, so the two are not one ratio.
    for (AcceptanceEstimate* availability :
         {&table_.estimate(result.slot, kCopiedDrafts).availability, &copy_availability_}) {
      availability->observe(1, num_right > 0 ? 1 : 0);
    }
    if (num_right > 0) observe(kCopiedDrafts, num_judged - 1, num_right - 1);
    if (copy_class >= 0) {
      table_.copy_estimate(result.slot).observe(copy_class, num_judged, num_right);
      copy_acceptance_.observe(copy_class, num_judged, num_right);
    }
  }
  // What came first may have left it no place, which says nothing of the drafter.
  const bool has_others = grammar.num_offered + result.by_source[kCopiedDrafts].num_offered > 0;
  if (has_others && drafter.num_offered == 0) return;
  SourceEstimate& estimate = table_.estimate(result.slot, kDrafterDrafts);
  if (!has_proposed) {
    // It was left out, which is not the same as having nothing to offer. Nor is what others showed
    // true for ever: with one sequence at a time it is what this one showed.
    estimate.acceptance.rest();
    acceptance_[kDrafterDrafts].rest();
    return;
  }
  estimate.availability.observe(1, drafter.num_offered > 0 ? 1 : 0);
  observe(kDrafterDrafts, drafter.num_judged, drafter.num_right);
}

std::vector<TimedStep> Runner::time_steps(std::span<const StepKind> kinds, int context,
                                          int num_repeats, double budget) {
  OPENSPEC_CHECK_ARG(table_.slots_in_use().empty(), "step times are measured on an idle engine");
  int most_seqs = 0;
  for (const StepKind& kind : kinds) most_seqs = std::max(most_seqs, kind.num_seqs);
  // Made-up sequences, which share their pages: what is in these does not matter.
  const int room = std::min(config_.limits().max_tokens, num_pages() * config_.page_size);
  const int most_rows = room - context - num_rows_ahead() - 1;
  PageLease pages(sequences_.pool(), table_.pages_for(room));
  if (!pages.ok()) return {};
  std::vector<int> slots;
  for (int i = 0; i < most_seqs; ++i) {
    std::vector<int32_t> tokens(static_cast<size_t>(context));
    for (int j = 0; j < context; ++j) {
      tokens[static_cast<size_t>(j)] = made_up_token(i * context + j, config_.target.vocab_size);
    }
    slots.push_back(table_.add(tokens, context, {}, sequences_.prefixes().root({})));
    std::copy(pages.pages().begin(), pages.pages().end(), table_.page_row(slots.back()).begin());
  }
  double spent = 0.0;
  const auto time = [&](size_t i) {
    const double seconds = backend_->time_step(kinds[i], slots);
    spent += seconds;
    return seconds;
  };
  const bool is_cuda = config_.device == Device::kCuda;
  if (!is_cuda) time(0);  // the first step of all finds memory that was never touched
  std::vector<TimedStep> best;
  for (const StepKind& kind : kinds) best.push_back({kind});
  for (int repeat = 0; repeat < num_repeats; ++repeat) {
    // In a row: the first find caches and clocks as a step of another kind has left them. Where
    // steps take long the host's kinds are all timed once before.
    const int num_turns = is_cuda ? 2 : repeat == 0 ? 1 : 4;
    for (size_t i = 0; i < kinds.size(); ++i) {
      const bool is_needed = repeat == 0 && i < backend_->num_needed_kinds();
      if (spent > budget && !is_needed) continue;
      if (kinds[i].num_rows > most_rows * kinds[i].num_seqs) continue;
      for (int turn = 0; turn < num_turns; ++turn) {
        if (turn > 0 && spent > budget) break;
        const ExpertCounts before = backend_->expert_counts();
        const double seconds = time(i);
        best[i].num_experts = (backend_->expert_counts() - before).experts_per_layer();
        if (best[i].seconds == 0.0 || seconds < best[i].seconds) best[i].seconds = seconds;
      }
    }
  }
  backend_->synchronize();
  for (int slot : slots) table_.remove(slot);
  return best;
}

std::vector<TimedStep> Runner::measure_step_times(double budget) {
  // Long enough that attention is not free.
  const int context =
      std::min(256, std::min(config_.max_model_len, num_pages() * config_.page_size) / 2);
  const std::vector<StepKind> kinds = backend_->step_kinds();
  if (context < 2 || kinds.empty()) return {};
  std::vector<TimedStep> measured = time_steps(kinds, context, /*num_repeats=*/3, budget);
  std::erase_if(measured, [](const TimedStep& step) { return step.seconds == 0.0; });
  set_step_times(measured);
  return measured;
}

void Runner::set_step_times(std::span<const TimedStep> measured) {
  std::vector<StepTable::Point> plain, proposing;
  for (const auto& [kind, seconds, num_experts] : measured) {
    OPENSPEC_CHECK(kind.num_seqs > 0 && kind.num_rows > 0 && seconds > 0.0,
                   "a step time is not positive");
    (kind.proposes ? proposing : plain)
        .push_back({kind.num_seqs, kind.num_rows, seconds, num_experts});
  }
  const int most_sized_rows = backend_->most_sized_rows();
  StepTable without(std::move(plain), most_sized_rows);
  if (most_sized_rows == 0) proposing = without.with_drafter(proposing);
  backend_->planner().set_step_times(std::move(without),
                                     StepTable(std::move(proposing), most_sized_rows));
}

}  // namespace openspec
