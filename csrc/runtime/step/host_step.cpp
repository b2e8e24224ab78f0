#include "runtime/step/host_step.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "kernels/ops.h"
#include "model/targets/target.h"

namespace openspec {

namespace {

/// The accepted drafts of a tree stand among others: notes their rows.
void line_up(StepLease& lease, size_t index, std::span<const int32_t> path) {
  const int first_row = lease.layout.span_begin[index] + lease.spans[index].num_new_tokens;
  for (size_t i = 0; i < path.size(); ++i) {
    lease.committed_row[static_cast<size_t>(first_row) + i] = first_row + path[i];
  }
}

}  // namespace

void HostPace::begin() {
  begin_ = processor_seconds();
  if (std::exchange(thread_, std::this_thread::get_id()) != std::this_thread::get_id()) return;
  const double gap = begin_ - end_ - learning_seconds_;
  if (gap > kLongestGap) return;
  // A step before which requests came says little of the next.
  const double usual = host_seconds_ > 0.0 ? std::min(gap, 2.0 * host_seconds_) : gap;
  host_seconds_ += 0.1 * (usual - host_seconds_);
}

void HostPace::end() {
  end_ = processor_seconds();
  seconds_ = learning_seconds_ + host_seconds_ + end_ - begin_;
  learning_seconds_ = 0.0;
}

HostStep::HostStep(StepContext context)
    : StepBackend(std::move(context), StepYield::Common::kPace),
      threads_(context_.config.num_threads),
      exec_{.pool = &threads_},
      teacher_(context_, exec_),
      drafts_(context_, planner_, teacher_, exec_, threads_),
      masks_(context_.config.target.vocab_size, Memory::kHost) {
  const RunnerConfig& config = context_.config;
  logits_ = Buffer(sizeof(float) * static_cast<size_t>(config.max_num_logits_rows) *
                   static_cast<size_t>(config.target.vocab_size));
  choose_workspace_ =
      Buffer(choose_workspace_bytes_cpu(config.num_threads, config.target.vocab_size));
}

size_t HostStep::scratch_bytes(const RunnerConfig& config) {
  return sizeof(float) * static_cast<size_t>(config.max_num_logits_rows) *
             static_cast<size_t>(config.target.vocab_size) +
         choose_workspace_bytes_cpu(config.num_threads, config.target.vocab_size);
}

void HostStep::set_capture(std::vector<int> layers) {
  StepBackend::set_capture(std::move(layers));
  teacher_.set_capture(static_cast<int>(capture_layers_.size()));
}

void HostStep::launch(StepLease& lease) {
  const Clock::time_point begin = Clock::now();
  pace_.begin();
  context_.table.grammar_work().begin_step();
  propose(lease);
  lease.draft_seconds = seconds_since(begin);
  score(lease);
  choose(lease);
  accept(lease);
  pace_.end();
  lease.seconds = seconds_since(begin);
}

void HostStep::propose(StepLease& lease) {
  context_.enter("propose");
  drafts_.offer(lease, pace_.host_seconds());
  last_drafts_.clear();
  for (const MergedDraft& offers : lease.offers) last_drafts_.push_back(offers.draft);
  drafts_.grant(lease, pace_.host_seconds());
  settle_learning(lease);
  lay_out(lease);
  fill_masks(lease);
  note_failures(lease);
}

/// Whether the drafter learns from the step later, which it does from steps without drafts.
void HostStep::settle_learning(StepLease& lease) {
  const bool has_drafts = std::any_of(lease.spans.begin(), lease.spans.end(),
                                      [](const Span& span) { return span.draft.size() > 0; });
  keeps_rows_ = !lease.has_proposed && !has_drafts && may_keep_rows(lease);
  if (!keeps_rows_ || teacher_.num_kept_steps() == most_kept_steps()) {
    try {
      teacher_.learn_kept();
    } catch (const std::exception& error) {
      context_.report_drafter_failure(error);
    }
  }
  lease.num_waiting = keeps_rows_ ? teacher_.num_kept_steps() + 1 : 0;
}

void HostStep::lay_out(StepLease& lease) {
  lease.layout.clear();
  for (const Span& span : lease.spans) {
    const bool scores_prompt = context_.table.params(span.slot).num_prompt_logprobs >= 0;
    lease.layout.append(span, context_.table.tokens(span.slot), context_.table.page_row(span.slot),
                        context_.config.page_size,
                        /*score_from=*/scores_prompt ? 0 : context_.config.max_model_len,
                        context_.table.prompt_len(span.slot));
  }
  lease.num_rows = lease.layout.num_rows();
  lay_out_folds(lease);
}

void HostStep::lay_out_folds(StepLease& lease) {
  const SlotBases& bases = context_.bases;
  if (!bases.exist()) return;
  folded_read_.clear();
  folded_write_.clear();
  for (size_t i = 0; i < lease.spans.size(); ++i) {
    const Span& span = lease.spans[i];
    const bool is_made_up = lease.bases.empty();
    folded_read_.push_back(is_made_up ? folded_blocks(span.kv_len) : bases.num_folded(span.slot));
    folded_write_.push_back(folded_read_.back());
    if (is_made_up) continue;
    if (!lease.bases[i].pages().empty()) {
      folded_write_.back() =
          std::max(folded_read_.back(), folded_after(span.kv_len, span.num_rows()));
    }
    lease.num_folded.push_back(folded_write_.back());
  }
}

/// Masks of the rows that are laid out.
void HostStep::fill_masks(const StepLease& lease) {
  masks_.begin(lease.layout.sample_row.size());
  for (size_t i = 0; i < lease.spans.size(); ++i) {
    const Span& span = lease.spans[i];
    const int first = lease.layout.first_choice[i];
    if (first < 0 || context_.table.grammar(span.slot) == nullptr) continue;
    masks_.add(span.slot, context_.table.copy_tokens(span.slot), span.draft,
               static_cast<size_t>(first));
  }
  masks_.fill(context_.table, threads_);
}

RowBatch HostStep::row_batch(const RowLayout& layout) const {
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

void HostStep::score(StepLease& lease) {
  context_.enter("score");
  const ExpertCounts before = expert_counts();
  context_.target.forward(exec_, row_batch(lease.layout),
                          {.page_table = context_.table.page_table(),
                           .kv = context_.kv_layers,
                           .states = {.records = context_.records,
                                      .tails = context_.tails,
                                      .bases = context_.base_memory,
                                      .folded_read = folded_read_.data(),
                                      .folded_write = folded_write_.data()}},
                          capture_layers_, teacher_.features());
  num_captured_rows_ = lease.layout.num_rows();
  lease.experts = expert_counts() - before;
}

void HostStep::choose(StepLease& lease) {
  context_.enter("choose");
  const RowLayout& layout = lease.layout;
  const size_t num_samples = layout.sample_row.size();
  lease.chosen.resize(num_samples);
  const bool wants_logprobs = std::any_of(lease.spans.begin(), lease.spans.end(), [&](auto& span) {
    const SequenceParams& params = context_.table.params(span.slot);
    return params.num_logprobs >= 0 || params.num_prompt_logprobs >= 0;
  });
  if (wants_logprobs) {
    lease.logprob_ids.resize(num_samples * (1 + kMaxLogprobs));
    lease.logprobs.resize(num_samples * (1 + kMaxLogprobs));
    lease.ranks.resize(num_samples);
  }
  const TableView table = context_.table.view();
  ChooseParams params{.rows = row_batch(layout),
                      .logits = logits_.floats(),
                      .vocab_size = context_.config.target.vocab_size,
                      .drafts = drafts_.drawn(lease),
                      .row_masks = masks_.masks(),
                      .sampling = table.sampling,
                      .tokens = table.tokens,
                      .tokens_stride = table.tokens_stride,
                      .num_tokens = table.num_tokens,
                      .prompt_len = context_.table.prompt_len_data(),
                      .workspace = choose_workspace_.floats()};
  const auto block = static_cast<size_t>(context_.config.max_num_logits_rows);
  for (size_t first = 0; first < num_samples; first += block) {
    const int count = static_cast<int>(std::min(block, num_samples - first));
    context_.target.logits(exec_, &layout.sample_row[first], count, logits_.floats());
    num_last_logits_ = count;
    params.sample_row = &layout.sample_row[first];
    params.sample_mask = masks_.empty() ? nullptr : &masks_.sample_mask()[first];
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

void HostStep::accept(StepLease& lease) {
  context_.enter("accept");
  lease.committed_row.resize(lease.layout.token.size());
  std::iota(lease.committed_row.begin(), lease.committed_row.end(), 0);
  for (size_t i = 0; i < lease.spans.size(); ++i) {
    const int first = lease.layout.first_choice[i];
    std::vector<int32_t> path;
    if (first >= 0) {
      path = accept_drafts(lease.spans[i].draft,
                           std::span(lease.chosen).subspan(static_cast<size_t>(first)));
    }
    lease.results.push_back(resolve(lease, i, path));
    line_up(lease, i, path);
  }
  std::vector<int32_t> num_computed;
  for (const SpanResult& result : lease.results) num_computed.push_back(result.num_computed);
  move_kv(exec_, context_, context_.kv_layers.data(), context_.table.page_table(),
          committed(lease, num_computed));
}

SpanResult HostStep::resolve(const StepLease& lease, size_t index,
                             std::span<const int32_t> path) const {
  const Span& span = lease.spans[index];
  const RowLayout& layout = lease.layout;
  const SequenceParams& params = context_.table.params(span.slot);
  SpanResult result;
  result.slot = span.slot;
  result.num_computed = span.num_new_tokens;

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
  int num_output = span.num_tokens - context_.table.prompt_len(span.slot), num_accepted = 0;
  const auto choices = std::span(lease.chosen).subspan(static_cast<size_t>(first));
  // The token chosen at the last known token, then at each accepted draft: each but the last is
  // the next draft on the path.
  for (size_t i = 0; i <= path.size() && result.finish == FinishReason::kRunning; ++i) {
    const int sample = first + (i == 0 ? 0 : 1 + path[i - 1]);
    const int32_t token = lease.chosen[static_cast<size_t>(sample)];
    if (token == kNoChoice) break;
    result.token_ids.push_back(token);
    num_accepted += i < path.size();
    if (params.num_logprobs >= 0) {
      result.logprobs.push_back(logprobs_of(sample, params.num_logprobs));
    }
    ++num_output;
    const std::vector<int32_t>& stop_ids = params.lists.stop_ids;
    const bool is_stop = num_output > params.min_tokens &&
                         std::find(stop_ids.begin(), stop_ids.end(), token) != stop_ids.end();
    if (is_stop) {
      result.finish = FinishReason::kStop;
    } else if (num_output >= params.max_tokens ||
               context_.table.prompt_len(span.slot) + num_output >= context_.config.max_model_len) {
      result.finish = FinishReason::kLength;
    }
  }
  // The last chosen token has no KV yet; the drafts before it have.
  result.num_computed += static_cast<int>(result.token_ids.size()) - 1;

  // What was not granted is judged as far as it can be: so a sequence without drafts is probed at
  // every step at no cost.
  const MergedDraft& offers = lease.offers[index];
  const DraftJudgement judgement = judge_drafts(offers.draft, span.draft.size(), choices);
  result.count_drafts(offers.deal({.num_offered = offers.draft.size(),
                                   .num_drafts = span.draft.size(),
                                   .num_accepted = num_accepted,
                                   .num_judged = judgement.num_judged,
                                   .num_right = judgement.num_right}));
  result.copied = judge_copy(offers.copied, result.token_ids);
  if (params.reports_steps && !result.token_ids.empty()) {
    SpanDetail& detail = result.detail.emplace();
    detail.draft = span.draft;
    detail.accepted = drafts_of_run(span.draft, result.token_ids);
  }
  return result;
}

void HostStep::remember(int slot) {
  const SequenceTable& table = context_.table;
  const auto output = table.tokens(slot).subspan(static_cast<size_t>(table.prompt_len(slot)));
  drafts_.answers().remember(exec_, table.owner(slot), output.data(),
                             static_cast<int>(output.size()));
}

void HostStep::teach_drafter(const StepLease& lease) {
  const SequenceTable& table = context_.table;
  std::vector<int32_t> num_computed;
  for (size_t i = 0; i < lease.spans.size(); ++i) {
    const int slot = lease.spans[i].slot;
    const bool is_current = table.is_held_by(slot, lease.serials[i]);
    num_computed.push_back(is_current ? lease.results[i].num_computed : 0);
  }
  const double begin = processor_seconds();
  try {
    if (keeps_rows_) {
      teacher_.keep(committed(lease, num_computed));
    } else {
      teacher_.learn(committed(lease, num_computed));
    }
  } catch (const std::exception& error) {
    context_.report_drafter_failure(error);
  }
  pace_.note_learning(processor_seconds() - begin);
}

CommittedStep HostStep::committed(const StepLease& lease,
                                  const std::vector<int32_t>& num_computed) const {
  return {.rows = row_batch(lease.layout),
          .num_computed = num_computed.data(),
          .committed_row = lease.committed_row.empty() ? nullptr : lease.committed_row.data(),
          .num_committed = std::accumulate(num_computed.begin(), num_computed.end(), 0),
          .features = teacher_.features()};
}

std::vector<StepKind> HostStep::step_kinds() const {
  const RunnerConfig& config = context_.config;
  const int rows_per_seq = 1 + config.draft_room();
  const int most = std::min(config.max_num_batched_tokens, config.max_num_seqs * rows_per_seq);
  std::vector<StepKind> kinds;
  // Whose rows they are hardly matters, so those of one sequence tell what rows cost; what a
  // drafter adds hangs on the number of sequences alone. Rows of its own steps are a power of two,
  // as those of steps without it, so that the two compare.
  const int room = static_cast<int>(std::bit_ceil(static_cast<unsigned>(num_learned())));
  const auto add = [&](int num_rows, bool proposes) {
    const int of_each = proposes && num_rows * room <= most ? room : 1;
    const StepKind kind{proposes ? num_rows : 1, num_rows * of_each, proposes};
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
  };
  const bool is_costly = context_.drafter.needs().is_costly;
  add(1, false);
  if (is_costly) add(1, true);
  // A drafter's own drafts: a busy machine may have time for no other, and by the rows of longer
  // copies these would seem dearer than they are.
  const int own_rows = config.max_draft_tokens > 0 ? 1 + config.max_draft_tokens : rows_per_seq;
  add(std::min(most, own_rows), false);
  add(std::min(most, kManySeqs * own_rows), false);
  add(std::min(most, rows_per_seq), false);
  for (int rows = 2; rows < most; rows *= 2) {
    add(rows, false);
    if (is_costly && rows <= config.max_num_seqs) add(rows, true);
  }
  add(most, false);
  for (int rows = 3; rows < most; rows *= 2) add(rows, false);
  return kinds;
}

int HostStep::num_learned() const {
  constexpr double kRatio = 0.7;
  const DraftOffer offer{.num_drafts = context_.config.max_draft_tokens, .ratio = kRatio};
  return 1 + static_cast<int>(std::lround(worth_of(offer, /*price=*/0.0)));
}

double HostStep::time_step(const StepKind& kind, std::span<const int> slots) {
  const RunnerConfig& config = context_.config;
  StepLease lease;
  std::vector<ProposeRequest> wanted;
  std::vector<int32_t> num_computed;
  for (int i = 0; i < kind.num_seqs; ++i) {
    const int slot = slots[static_cast<size_t>(i)];
    const int num_rows = (kind.num_rows + i) / kind.num_seqs;
    // The token after a row that the drafter learns from is known.
    const int num_known = std::min(num_learned(), context_.table.num_tokens(slot) - 1);
    const int context = context_.table.num_tokens(slot) - num_known;
    num_computed.push_back(kind.proposes ? std::min(num_rows, num_known) : 1);
    Span span{.slot = slot,
              .num_new_tokens = 1,
              .kv_len = context - 1,
              .num_tokens = context,
              .draft = {}};
    const int first = kind.num_seqs + i * (num_rows - 1);
    for (int row = 1; row < num_rows; ++row) {
      span.draft.append(made_up_token(first + row, config.target.vocab_size));
    }
    lease.spans.push_back(std::move(span));
    wanted.push_back({.slot = slot, .num_wanted = config.max_draft_tokens});
  }
  lay_out(lease);
  const double begin = processor_seconds();
  if (kind.proposes) {
    std::vector<Draft> drafts(wanted.size());
    drafts_.drafter().offer(wanted, drafts);
  }
  score(lease);
  choose(lease);
  const CommittedStep step = committed(lease, num_computed);
  if (context_.drafter.needs().is_costly && !kind.proposes) {
    teacher_.keep(step);
    teacher_.forget_kept();
  } else if (context_.drafter.works_on_arrays()) {
    teacher_.learn(step);
  }
  return processor_seconds() - begin;
}

std::vector<float> HostStep::last_logits() {
  const auto* begin = logits_.floats();
  return {begin, begin + static_cast<size_t>(num_last_logits_) *
                             static_cast<size_t>(context_.config.target.vocab_size)};
}

std::vector<float> HostStep::last_features() {
  const RunnerConfig& config = context_.config;
  const size_t count = capture_layers_.size() * static_cast<size_t>(config.target.hidden_size) *
                       static_cast<size_t>(num_captured_rows_);
  return to_floats(teacher_.features(), config.dtype, count);
}

}  // namespace openspec
