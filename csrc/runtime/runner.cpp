#include "runtime/runner.h"

#include <algorithm>

#include "core/check.h"
#include "kernels/ops.h"

namespace openspec {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Longer gaps are idleness, not the host's share of a step.
constexpr double kLongestHostGap = 0.02;

std::vector<KvLayerSpec> kv_layers_of(const RunnerConfig& config, const DrafterNeeds& needs) {
  std::vector<KvLayerSpec> layers(static_cast<size_t>(config.target.num_layers),
                                  KvLayerSpec{config.target.num_kv_heads, config.target.head_dim});
  layers.insert(layers.end(), needs.kv_layers.begin(), needs.kv_layers.end());
  return layers;
}

size_t kv_page_bytes(const RunnerConfig& config, const KvLayerSpec& layer) {
  return size_t{2} * static_cast<size_t>(layer.num_kv_heads) *
         static_cast<size_t>(config.page_size) * static_cast<size_t>(layer.head_dim) *
         dtype_bytes(config.dtype);
}

// The target's context plus the rows that a step may lay beyond it.
int longest_context(const RunnerConfig& config) {
  return config.max_model_len + config.num_speculative_tokens;
}

}  // namespace

void RunnerConfig::validate() const {
  target.validate();
  const auto positive = [](const char* name, int value) {
    OPENSPEC_CHECK_ARG(value > 0, name, " must be positive, got ", value);
  };
  positive("page_size", page_size);
  positive("max_num_seqs", max_num_seqs);
  positive("max_model_len", max_model_len);
  positive("max_num_batched_tokens", max_num_batched_tokens);
  positive("max_num_logits_rows", max_num_logits_rows);
  OPENSPEC_CHECK_ARG(num_speculative_tokens >= 0, "num_speculative_tokens must not be negative");
}

DrafterConfig RunnerConfig::drafter() const {
  return {.num_speculative_tokens = num_speculative_tokens,
          .max_num_seqs = max_num_seqs,
          .max_model_len = max_model_len,
          .vocab_size = target.vocab_size,
          .options = method_options};
}

MemoryPlan plan_memory(const RunnerConfig& config) {
  config.validate();
  const DrafterNeeds needs = make_drafter(config.method, config.drafter())->needs();
  MemoryPlan plan;
  plan.weight_bytes = Qwen3::weight_bytes(config.target, DType::kBF16);
  plan.scratch_bytes =
      Qwen3::scratch_bytes(config.target, config.dtype, config.max_num_batched_tokens,
                           config.max_num_logits_rows, longest_context(config),
                           config.num_threads) +
      sizeof(float) * static_cast<size_t>(config.max_num_logits_rows) *
          static_cast<size_t>(config.target.vocab_size) +
      choose_workspace_bytes_cpu(config.num_threads, config.target.vocab_size);
  plan.table_bytes = SequenceTable::table_bytes(config.max_num_seqs, config.max_model_len,
                                                config.page_size, config.num_speculative_tokens);
  plan.draft_fixed_bytes = needs.fixed_bytes;
  for (const KvLayerSpec& layer : kv_layers_of(config, needs)) {
    plan.page_bytes += kv_page_bytes(config, layer);
  }
  return plan;
}

Runner::Runner(const RunnerConfig& config, int num_pages, std::unique_ptr<Drafter> drafter)
    : config_((config.validate(), config)),
      threads_(config.num_threads),
      exec_{.pool = &threads_},
      hasher_(config.cache_key),
      drafter_(drafter ? std::move(drafter) : make_drafter(config.method, config.drafter())),
      target_(config.target, config.dtype, config.max_num_batched_tokens,
              config.max_num_logits_rows, longest_context(config), config.num_threads),
      pool_(num_pages),
      table_(config.max_num_seqs, config.max_model_len, config.page_size,
             config.num_speculative_tokens) {
  for (const KvLayerSpec& layer : kv_layers_of(config_, drafter_->needs())) {
    kv_buffers_.emplace_back(kv_page_bytes(config_, layer) * static_cast<size_t>(num_pages));
    kv_layers_.push_back(
        {kv_buffers_.back().data(), layer.num_kv_heads, layer.head_dim, config_.page_size});
  }
  logits_ = Buffer(sizeof(float) * static_cast<size_t>(config_.max_num_logits_rows) *
                   static_cast<size_t>(config_.target.vocab_size));
  choose_workspace_ =
      Buffer(choose_workspace_bytes_cpu(config_.num_threads, config_.target.vocab_size));
  set_capture(drafter_->needs().capture_layers);
}

Runner::~Runner() {
  for (int slot : table_.slots_in_use()) remove_sequence(slot);
}

void Runner::set_capture(std::vector<int> layers) {
  for (int layer : layers) {
    OPENSPEC_CHECK_ARG(layer >= 0 && layer < config_.target.num_layers, "layer ", layer,
                       " is outside the model's ", config_.target.num_layers);
  }
  OPENSPEC_CHECK_ARG(std::is_sorted(layers.begin(), layers.end()), "layers must rise");
  capture_layers_ = std::move(layers);
  captured_.resize(static_cast<size_t>(config_.max_num_batched_tokens) * capture_layers_.size() *
                   static_cast<size_t>(config_.target.hidden_size) * dtype_bytes(config_.dtype));
}

// --- Sequences ---------------------------------------------------------------------------------

int Runner::add_sequence(std::span<const int32_t> tokens, int prompt_len, SequenceParams params,
                         std::span<const uint8_t> cache_salt) {
  for (int32_t token : tokens) {
    OPENSPEC_CHECK_ARG(token >= 0 && token < config_.target.vocab_size, "token id ", token,
                       " is outside the vocabulary of ", config_.target.vocab_size);
  }
  const int slot = table_.add(tokens, prompt_len, std::move(params), hasher_.root(cache_salt));
  table_.acceptance(slot) = AcceptanceEstimate(acceptance_.ratio());
  // Rows that score prompt tokens must run, cached or not.
  if (config_.enable_prefix_caching && table_.params(slot).num_prompt_logprobs < 0) {
    attach_prefix(slot);
  }
  return slot;
}

void Runner::attach_prefix(int slot) {
  const std::span<const int32_t> tokens = table_.tokens(slot);
  const auto page_size = static_cast<size_t>(config_.page_size);
  const std::span<int32_t> row = table_.page_row(slot);
  std::vector<PageHash>& hashes = table_.page_hashes(slot);
  // At least one known token has to run, for its logits.
  const size_t num_full = (tokens.size() - 1) / page_size;
  PageHash hash = table_.root(slot);
  size_t num_found = 0;
  for (; num_found < num_full; ++num_found) {
    hash = hasher_.extend(hash, tokens.subspan(num_found * page_size, page_size));
    const PageId page = pool_.find(hash);
    if (page < 0) break;
    row[num_found] = page;
    hashes.push_back(hash);
  }
  const int num_pages = static_cast<int>(num_found);
  table_.commit(slot, {}, num_pages * config_.page_size, num_pages);
  cache_queries_ += static_cast<int64_t>(tokens.size());
  cache_hits_ += num_pages * config_.page_size;
}

void Runner::remove_sequence(int slot) {
  table_.check_slot(slot);
  const std::span<const PageId> pages = table_.pages(slot);
  // Last page first: of a cached prefix, the tail is evicted before the head.
  for (size_t i = pages.size(); i-- > 0;) pool_.release(pages[i]);
  table_.remove(slot);
}

int Runner::num_pages_needed(int slot, int num_rows) const {
  table_.check_slot(slot);
  return std::max(0, table_.pages_for(table_.kv_len(slot) + num_rows) - table_.num_pages(slot));
}

void Runner::check_integrity() const {
  std::vector<PageId> holders;
  for (int slot : table_.slots_in_use()) {
    const std::span<const PageId> pages = table_.pages(slot);
    holders.insert(holders.end(), pages.begin(), pages.end());
    OPENSPEC_CHECK(table_.kv_len(slot) < table_.num_tokens(slot), "slot ", slot, " has KV for ",
                   table_.kv_len(slot), " of ", table_.num_tokens(slot), " tokens");
    OPENSPEC_CHECK(table_.num_pages(slot) == table_.pages_for(table_.kv_len(slot)), "slot ", slot,
                   " holds ", table_.num_pages(slot), " pages for ", table_.kv_len(slot),
                   " tokens");
  }
  pool_.check_integrity(holders);
}

// --- The step ----------------------------------------------------------------------------------

std::unique_ptr<StepLease> Runner::reserve(std::span<const SpanRequest> requests) {
  enter("reserve");
  if (last_commit_) {
    const double gap = seconds_since(*last_commit_);
    if (gap < kLongestHostGap) host_seconds_ += 0.1 * (gap - host_seconds_);
  }
  OPENSPEC_CHECK_ARG(!requests.empty(), "a step needs at least one span");
  auto lease = std::make_unique<StepLease>();
  int num_rows = 0;
  for (const SpanRequest& request : requests) {
    table_.check_slot(request.slot);
    const int kv_len = table_.kv_len(request.slot), num_tokens = table_.num_tokens(request.slot);
    OPENSPEC_CHECK_ARG(request.num_new_tokens >= 1 && kv_len + request.num_new_tokens <= num_tokens,
                       "slot ", request.slot, " has ", num_tokens - kv_len,
                       " tokens to compute, asked for ", request.num_new_tokens);
    const bool is_sampled = kv_len + request.num_new_tokens == num_tokens;
    const int max_drafts =
        is_sampled ? std::min(request.max_drafts, config_.num_speculative_tokens) : 0;
    const int needed = num_pages_needed(request.slot, request.num_new_tokens + max_drafts);
    PageLease pages(pool_, needed);
    if (!pages.ok()) {
      detail::fail<OutOfPages>("slot ", request.slot, " needs ", needed, " pages, ",
                               pool_.num_available(), " are free");
    }
    // Entries past num_pages are the step's own until commit.
    const auto row =
        table_.page_row(request.slot).subspan(static_cast<size_t>(table_.num_pages(request.slot)));
    std::copy(pages.pages().begin(), pages.pages().end(), row.begin());
    lease->requests.push_back({request.slot, request.num_new_tokens, max_drafts});
    lease->pages.push_back(std::move(pages));
    num_rows += request.num_new_tokens + max_drafts;
  }
  OPENSPEC_CHECK_ARG(num_rows <= config_.max_num_batched_tokens, "a step of up to ", num_rows,
                     " rows, at most ", config_.max_num_batched_tokens);
  return lease;
}

void Runner::launch(StepLease& lease) {
  OPENSPEC_CHECK(lease.state == StepLease::State::kReserved, "a lease is launched once");
  const auto start = Clock::now();
  propose(lease);
  score(lease);
  choose(lease);
  accept(lease);
  lease.state = StepLease::State::kLaunched;
  stats_.step_seconds += seconds_since(start);
}

const std::vector<SpanResult>& Runner::collect(StepLease& lease) {
  OPENSPEC_CHECK(lease.state == StepLease::State::kLaunched, "collect follows launch");
  return lease.results;
}

void Runner::commit(StepLease& lease) {
  OPENSPEC_CHECK(lease.state == StepLease::State::kLaunched, "commit follows launch");
  enter("commit");
  for (size_t i = 0; i < lease.spans.size(); ++i) {
    const Span& span = lease.spans[i];
    const std::vector<int32_t>& chosen = lease.results[i].token_ids;
    // The last chosen token has no KV yet; the drafts before it have.
    const int num_kept_drafts = chosen.empty() ? 0 : static_cast<int>(chosen.size()) - 1;
    const int kv_len = span.kv_len + span.num_new_tokens + num_kept_drafts;
    const int num_pages = table_.pages_for(kv_len);
    lease.pages[i].keep(num_pages - table_.num_pages(span.slot));
    table_.commit(span.slot, chosen, kv_len, num_pages);
    learn(lease, i);
    if (config_.enable_prefix_caching) publish_pages(span.slot);
  }
  show_committed(lease);
  ++stats_.num_steps;
  stats_.num_rows += lease.layout.num_rows();
  lease.close();
  last_commit_ = Clock::now();
}

// --- Stages ------------------------------------------------------------------------------------

void Runner::propose(StepLease& lease) {
  enter("propose");
  offer_drafts(lease);
  grant_drafts(lease);
  lay_out(lease);
}

void Runner::offer_drafts(StepLease& lease) {
  lease.offered.assign(lease.requests.size(), {});
  std::vector<ProposeRequest> wanted;
  std::vector<size_t> span_of;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    if (request.max_drafts == 0) continue;
    wanted.push_back({request.slot, request.max_drafts});
    span_of.push_back(i);
  }
  if (wanted.empty()) return;
  std::vector<Draft> drafts(wanted.size());
  try {
    drafter_->propose(exec_, table_, wanted, drafts);
  } catch (const std::exception& error) {
    report_drafter_failure(error);
    return;
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    Draft& draft = drafts[i];
    // A draft that is no token, or does not follow the one before it, ends the chain: accepted KV
    // must come to lie contiguously.
    int num_valid = 0;
    while (num_valid < std::min(draft.size(), wanted[i].num_wanted) &&
           draft.tokens[static_cast<size_t>(num_valid)] >= 0 &&
           draft.tokens[static_cast<size_t>(num_valid)] < config_.target.vocab_size &&
           draft.parents[static_cast<size_t>(num_valid)] == num_valid - 1) {
      ++num_valid;
    }
    draft.truncate(num_valid);
    lease.offered[span_of[i]] = std::move(draft);
  }
}

void Runner::grant_drafts(StepLease& lease) {
  int num_rows = 0, num_sampled = 0;
  std::vector<DraftOffer> offers;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    lease.spans.push_back({.slot = request.slot,
                           .num_new_tokens = request.num_new_tokens,
                           .kv_len = table_.kv_len(request.slot),
                           .num_tokens = table_.num_tokens(request.slot),
                           .draft = lease.offered[i]});
    num_rows += request.num_new_tokens;
    num_sampled += lease.spans.back().is_sampled();
    offers.push_back({lease.offered[i].size(), table_.acceptance(request.slot).ratio()});
  }
  if (!config_.adaptive || step_times_.empty()) return;
  const std::vector<int> counts = spend_row_budget(
      offers, num_rows, num_sampled, config_.max_num_batched_tokens, step_times_, host_seconds_);
  for (size_t i = 0; i < counts.size(); ++i) lease.spans[i].draft.truncate(counts[i]);
}

void Runner::lay_out(StepLease& lease) {
  lease.layout.clear();
  for (const Span& span : lease.spans) {
    const bool scores_prompt = table_.params(span.slot).num_prompt_logprobs >= 0;
    lease.layout.append(
        span, table_.tokens(span.slot), table_.page_row(span.slot), config_.page_size,
        /*score_from=*/scores_prompt ? 0 : config_.max_model_len, table_.prompt_len(span.slot));
  }
}

RowBatch Runner::row_batch(const RowLayout& layout) const {
  return {.num_rows = layout.num_rows(),
          .num_spans = static_cast<int>(layout.span_seq.size()),
          .row_token = layout.token.data(),
          .row_position = layout.position.data(),
          .row_span = layout.span.data(),
          .row_parent = layout.parent.data(),
          .row_kv_slot = layout.kv_slot.data(),
          .span_begin = layout.span_begin.data(),
          .span_kv_len = layout.span_kv_len.data(),
          .span_seq = layout.span_seq.data()};
}

void Runner::score(StepLease& lease) {
  enter("score");
  target_.forward(exec_, row_batch(lease.layout), table_.page_table(), kv_layers_, capture_layers_,
                  captured_.data());
  num_captured_rows_ = lease.layout.num_rows();
}

void Runner::choose(StepLease& lease) {
  enter("choose");
  const RowLayout& layout = lease.layout;
  const size_t num_samples = layout.sample_row.size();
  lease.chosen.resize(num_samples);
  const bool wants_logprobs = std::any_of(lease.spans.begin(), lease.spans.end(), [&](auto& span) {
    const SequenceParams& params = table_.params(span.slot);
    return params.num_logprobs >= 0 || params.num_prompt_logprobs >= 0;
  });
  if (wants_logprobs) {
    lease.logprob_ids.resize(num_samples * (1 + kMaxLogprobs));
    lease.logprobs.resize(num_samples * (1 + kMaxLogprobs));
    lease.ranks.resize(num_samples);
  }
  ChooseParams params{.rows = row_batch(layout),
                      .logits = logits_.floats(),
                      .vocab_size = config_.target.vocab_size,
                      .sampling = table_.sampling_data(),
                      .tokens = table_.token_data(),
                      .tokens_stride = table_.tokens_stride(),
                      .num_tokens = table_.num_tokens_data(),
                      .prompt_len = table_.prompt_len_data(),
                      .workspace = choose_workspace_.floats()};
  const auto block = static_cast<size_t>(config_.max_num_logits_rows);
  for (size_t first = 0; first < num_samples; first += block) {
    const int count = static_cast<int>(std::min(block, num_samples - first));
    target_.logits(exec_, &layout.sample_row[first], count, logits_.floats());
    num_last_logits_ = count;
    params.sample_row = &layout.sample_row[first];
    params.score_token = &layout.score_token[first];
    params.num_samples = count;
    params.chosen = &lease.chosen[first];
    if (wants_logprobs) {
      params.logprob_ids = &lease.logprob_ids[first * (1 + kMaxLogprobs)];
      params.logprobs = &lease.logprobs[first * (1 + kMaxLogprobs)];
      params.ranks = &lease.ranks[first];
    }
    ops::choose(exec_, params);
  }
}

void Runner::accept(StepLease& lease) {
  enter("accept");
  for (size_t i = 0; i < lease.spans.size(); ++i) {
    const int first = lease.layout.first_choice[i];
    lease.accepted.push_back(
        first < 0 ? std::vector<int32_t>{}
                  : accept_drafts(lease.spans[i].draft,
                                  std::span(lease.chosen).subspan(static_cast<size_t>(first))));
    lease.results.push_back(resolve(lease, i));
  }
}

SpanResult Runner::resolve(const StepLease& lease, size_t index) const {
  const Span& span = lease.spans[index];
  const RowLayout& layout = lease.layout;
  const SequenceParams& params = table_.params(span.slot);
  SpanResult result;
  result.slot = span.slot;
  result.num_draft_tokens = span.draft.size();

  const auto logprobs_of = [&](int sample, int num_best) {
    const size_t at = static_cast<size_t>(sample) * (1 + kMaxLogprobs);
    const auto count = static_cast<size_t>(1 + num_best);
    return TokenLogprobs{{&lease.logprob_ids[at], &lease.logprob_ids[at] + count},
                         {&lease.logprobs[at], &lease.logprobs[at] + count},
                         lease.ranks[static_cast<size_t>(sample)]};
  };
  for (int sample = layout.sample_begin[index]; sample < layout.sample_begin[index + 1]; ++sample) {
    if (layout.score_token[static_cast<size_t>(sample)] >= 0) {
      result.prompt_logprobs.push_back(logprobs_of(sample, params.num_prompt_logprobs));
    }
  }

  const int first = layout.first_choice[index];
  if (first < 0) return result;
  int num_output = span.num_tokens - table_.prompt_len(span.slot);
  const auto& path = lease.accepted[index];
  // The token chosen at the last known token, then at each accepted draft: each but the last is
  // the next draft on the path.
  for (size_t i = 0; i <= path.size() && result.finish == FinishReason::kRunning; ++i) {
    const int sample = first + (i == 0 ? 0 : 1 + path[i - 1]);
    const int32_t token = lease.chosen[static_cast<size_t>(sample)];
    result.token_ids.push_back(token);
    result.num_accepted_tokens += i < path.size();
    if (params.num_logprobs >= 0) {
      result.logprobs.push_back(logprobs_of(sample, params.num_logprobs));
    }
    ++num_output;
    const bool is_stop =
        num_output > params.min_tokens &&
        std::find(params.stop_ids.begin(), params.stop_ids.end(), token) != params.stop_ids.end();
    if (is_stop) {
      result.finish = FinishReason::kStop;
    } else if (num_output >= params.max_tokens ||
               table_.prompt_len(span.slot) + num_output >= config_.max_model_len) {
      result.finish = FinishReason::kLength;
    }
  }
  return result;
}

void Runner::report_drafter_failure(const std::exception& error) {
  // A drafter can cost a step its drafts, never its tokens.
  ++stats_.num_drafter_failures;
  stats_.last_drafter_failure = error.what();
}

void Runner::show_committed(const StepLease& lease) {
  const size_t stride = capture_layers_.size() * static_cast<size_t>(config_.target.hidden_size) *
                        dtype_bytes(config_.dtype);
  std::vector<CommittedRows> committed;
  for (size_t i = 0; i < lease.spans.size(); ++i) {
    const Span& span = lease.spans[i];
    const auto first = static_cast<size_t>(lease.layout.span_begin[i]);
    const auto count = static_cast<size_t>(table_.kv_len(span.slot) - span.kv_len);
    committed.push_back({.slot = span.slot,
                         .first_position = span.kv_len,
                         .tokens = std::span(lease.layout.token).subspan(first, count),
                         .features = captured_.data() + first * stride});
  }
  try {
    drafter_->observe(committed);
  } catch (const std::exception& error) {
    report_drafter_failure(error);
  }
}

void Runner::learn(const StepLease& lease, size_t index) {
  const Span& span = lease.spans[index];
  const Draft& offered = lease.offered[index];
  const int first = lease.layout.first_choice[index];
  if (first < 0 || offered.size() == 0) return;
  // One draft more than was granted can be judged for free: the target's choice is known after
  // the last granted one. So a sequence without drafts is probed at every step at no cost.
  const auto num_granted = static_cast<size_t>(span.draft.size());
  const size_t num_judged = std::min(static_cast<size_t>(offered.size()), num_granted + 1);
  size_t num_right = 0;
  while (num_right < num_judged &&
         offered.tokens[num_right] == lease.chosen[static_cast<size_t>(first) + num_right]) {
    ++num_right;
  }
  table_.acceptance(span.slot).observe(static_cast<int>(num_judged), static_cast<int>(num_right));
  acceptance_.observe(static_cast<int>(num_judged), static_cast<int>(num_right));
}

void Runner::publish_pages(int slot) {
  std::vector<PageHash>& hashes = table_.page_hashes(slot);
  const auto page_size = static_cast<size_t>(config_.page_size);
  const std::span<const int32_t> tokens = table_.tokens(slot);
  const std::span<const PageId> pages = table_.pages(slot);
  while ((hashes.size() + 1) * page_size <= static_cast<size_t>(table_.kv_len(slot))) {
    const size_t page = hashes.size();
    hashes.push_back(hasher_.extend(page == 0 ? table_.root(slot) : hashes.back(),
                                    tokens.subspan(page * page_size, page_size)));
    pool_.publish(pages[page], hashes.back());
  }
}

std::span<const float> Runner::last_logits() const {
  return {logits_.floats(),
          static_cast<size_t>(num_last_logits_) * static_cast<size_t>(config_.target.vocab_size)};
}

const StepTimes& Runner::measure_step_times(double budget_seconds) {
  OPENSPEC_CHECK_ARG(table_.slots_in_use().empty(), "step times are measured on an idle engine");
  const auto start = Clock::now();
  const int most_rows = std::min(config_.max_num_batched_tokens,
                                 config_.max_num_seqs * (1 + config_.num_speculative_tokens));
  // A made-up sequence long enough that attention is not free.
  const int room = std::min(config_.max_model_len, pool_.num_pages() * config_.page_size);
  const int context = std::min(256, room / 2);
  if (context < 1) return step_times_;
  const std::vector<int32_t> tokens(static_cast<size_t>(context), 0);
  const int slot = table_.add(tokens, context, {}, hasher_.root({}));
  std::vector<std::pair<int, double>> points;
  for (int rows : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512}) {
    if (rows > std::min(most_rows, room - context)) break;
    double best = 0.0;
    for (int repeat = 0; repeat < 4; ++repeat) {
      Span span{.slot = slot,
                .num_new_tokens = 1,
                .kv_len = context - 1,
                .num_tokens = context,
                .draft = {}};
      for (int i = 1; i < rows; ++i) span.draft.append(0);
      StepLease lease;
      const int num_pages = table_.pages_for(context - 1 + rows);
      lease.pages.emplace_back(pool_, num_pages);
      if (!lease.pages.back().ok()) break;
      std::copy(lease.pages.back().pages().begin(), lease.pages.back().pages().end(),
                table_.page_row(slot).begin());
      lease.spans.push_back(std::move(span));
      lay_out(lease);
      const auto begin = Clock::now();
      score(lease);
      choose(lease);
      const double seconds = seconds_since(begin);
      if (repeat == 0 || seconds < best) best = seconds;
      if (seconds_since(start) > budget_seconds) break;
    }
    if (best > 0.0) points.emplace_back(rows, best);
    if (seconds_since(start) > budget_seconds) break;
  }
  table_.remove(slot);
  step_times_ = StepTimes(std::move(points));
  return step_times_;
}

}  // namespace openspec
