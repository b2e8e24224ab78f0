// What the host's step does with a drafter before there are rows.

#include <algorithm>

#include "runtime/step/host_step.h"

namespace openspec {

namespace {

/// How many leading drafts can have rows: a draft that is no token, stands before the one that it
/// follows or has a higher score than one before it ends them.
int num_valid(const Draft& draft, int most, int vocab_size) {
  int count = 0;
  float last_score = 0.0f;
  for (; count < std::min(draft.size(), most); ++count) {
    const auto i = static_cast<size_t>(count);
    if (draft.tokens[i] < 0 || draft.tokens[i] >= vocab_size) break;
    if (draft.parents[i] < -1 || draft.parents[i] >= count) break;
    if (draft.scores.empty()) continue;
    if (!(draft.scores[i] <= last_score)) break;
    last_score = draft.scores[i];
  }
  return count;
}

/// Appends the tokens that the grammar leaves no choice of behind a chain, whose tokens it lets
/// pass. What a drafter drafted of them stays: it spells the same bytes as the model might.
void append_forced(GrammarState& grammar, int most, Draft& draft) {
  const int num_drafts = draft.size();
  for (int i = 0; i < num_drafts; ++i) {
    if (draft.parents[static_cast<size_t>(i)] != i - 1) return;
  }
  for (const int32_t token : draft.tokens) grammar.accept(token);
  const std::vector<int32_t> forced = grammar.forced(most - num_drafts);
  grammar.rollback(num_drafts);
  for (const int32_t token : forced) {
    draft.append(token);
    // As likely as the draft before them.
    if (!draft.scores.empty()) draft.scores.push_back(draft.scores.back());
  }
}

}  // namespace

void HostStep::offer_drafts(StepLease& lease) {
  lease.offered.assign(lease.requests.size(), {});
  std::vector<ProposeRequest> wanted;
  std::vector<size_t> span_of;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    // Without a drafter the room is for what grammars force.
    if (request.max_drafts == 0 || context_.config.max_draft_tokens == 0) continue;
    wanted.push_back({request.slot, request.max_drafts});
    span_of.push_back(i);
  }
  drawn_rows_.assign(lease.requests.size(), -1);
  lease.has_proposed = !wanted.empty() && drafts_pay(lease);
  // A drafter that learns later does so from steps without drafts.
  keeps_rows_ = !lease.has_proposed && may_keep_rows(context_, lease) && !has_forced(lease);
  std::vector<Draft> drafts;
  try {
    if (!keeps_rows_ || num_kept_steps_ == most_kept_steps(context_.config)) teach_kept();
    lease.num_waiting = keeps_rows_ ? num_kept_steps_ + 1 : 0;
    if (!lease.has_proposed) return;
    drafts = proposals(wanted);
  } catch (const std::exception& error) {
    context_.report_drafter_failure(error);
    return;
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    Draft& draft = drafts[i];
    draft.truncate(num_valid(draft, wanted[i].num_wanted, context_.config.target.vocab_size));
    lease.offered[span_of[i]] = std::move(draft);
    const DraftLogits logits = context_.drafter.draft_logits();
    if (logits.values != nullptr) drawn_rows_[span_of[i]] = logits.row[i];
  }
}

DrawnDrafts HostStep::drawn_drafts(const StepLease& lease) {
  DrawnDrafts drawn{.logits = context_.drafter.draft_logits()};
  if (drawn.logits.values == nullptr || lease.offered.empty()) return {};
  drawn.max_drafts = context_.config.max_draft_tokens;
  drawn_tokens_.clear();
  drawn_counts_.clear();
  for (const Draft& draft : lease.offered) {
    drawn_counts_.push_back(draft.size());
    drawn_tokens_.insert(drawn_tokens_.end(), draft.tokens.begin(), draft.tokens.end());
    drawn_tokens_.resize(drawn_counts_.size() * static_cast<size_t>(drawn.max_drafts), -1);
  }
  drawn.tokens = drawn_tokens_.data();
  drawn.counts = drawn_counts_.data();
  drawn.logits.row = drawn_rows_.data();
  return drawn;
}

/// Brings the grammars up to the known tokens. What they cannot let pass is taken out, for no row
/// is to be spent on it; what they leave no choice of is drafted behind what is left.
void HostStep::apply_grammars(StepLease& lease) {
  lease.num_refused.assign(lease.requests.size(), 0);
  lease.first_forced.clear();
  const bool forces = !keeps_rows_ && certain_drafts_pay(lease);
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    GrammarState* grammar = lease.is_sampled[i] ? grammar_at_end(request.slot) : nullptr;
    if (grammar != nullptr) lease.num_refused[i] = grammar->prune(lease.offered[i]);
    lease.first_forced.push_back(lease.offered[i].size());
    if (grammar != nullptr && request.max_drafts > 0 && forces) {
      append_forced(*grammar, request.max_drafts, lease.offered[i]);
    }
  }
}

GrammarState* HostStep::grammar_at_end(int slot) {
  const SequenceTable& table = context_.table;
  GrammarState* grammar = table.grammar(slot);
  if (grammar != nullptr) {
    grammar->sync(table.tokens(slot).subspan(static_cast<size_t>(table.prompt_len(slot))));
  }
  return grammar;
}

/// Whether there are forced tokens that are worth their rows.
bool HostStep::has_forced(StepLease& lease) {
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    if (!lease.is_sampled[i] || request.max_drafts == 0) continue;
    GrammarState* grammar = grammar_at_end(request.slot);
    if (grammar != nullptr && !grammar->forced(1).empty()) return certain_drafts_pay(lease);
  }
  return false;
}

/// Whether a draft that is surely accepted pays for its row.
bool HostStep::certain_drafts_pay(StepLease& lease) {
  const RunnerConfig& config = context_.config;
  if (!config.adaptive || !has_step_times()) return true;
  const DraftOffer offer{.num_drafts = 1, .ratio = 1.0};
  return plan_drafts(lease, {&offer, 1}, lease.has_proposed, config.max_num_batched_tokens,
                     host_seconds_)
             .num_drafts > 0;
}

/// Masks of the rows that are laid out.
void HostStep::fill_masks(const StepLease& lease) {
  masks_.begin(lease.layout.sample_row.size());
  for (size_t i = 0; i < lease.spans.size(); ++i) {
    const Span& span = lease.spans[i];
    const int first = lease.layout.first_choice[i];
    if (first < 0 || context_.table.grammar(span.slot) == nullptr) continue;
    const std::span<const int32_t> known = context_.table.tokens(span.slot);
    masks_.add(span.slot, {known.begin(), known.end()}, span.draft, static_cast<size_t>(first));
  }
  masks_.fill(context_.table, threads_);
}

bool HostStep::drafts_pay(StepLease& lease) {
  const RunnerConfig& config = context_.config;
  if (!context_.drafter.needs().is_costly || !config.adaptive || !has_step_times()) return true;
  std::vector<DraftOffer> offers;
  for (const SpanRequest& request : lease.requests) {
    offers.push_back({.num_drafts = request.max_drafts,
                      .ratio = context_.table.acceptance(request.slot).ratio(),
                      .num_depths = expected_depths(context_)});
  }
  return StepBackend::drafts_pay(lease, offers, /*otherwise=*/{}, config.max_num_batched_tokens,
                                 host_seconds_);
}

std::vector<Draft> HostStep::proposals(std::span<const ProposeRequest> wanted) {
  std::vector<Draft> drafts(wanted.size());
  if (!context_.drafter.works_on_arrays()) {
    context_.drafter.propose_on_host(context_.table, wanted, drafts);
    return drafts;
  }
  const auto most = static_cast<size_t>(context_.config.max_draft_tokens);
  seq_.clear();
  num_wanted_.clear();
  for (const ProposeRequest& request : wanted) {
    seq_.push_back(request.slot);
    num_wanted_.push_back(request.num_wanted);
  }
  num_drafts_.assign(wanted.size(), 0);
  drafts_.assign(wanted.size() * most, -1);
  const bool has_trees = context_.drafter.needs().makes_trees;
  const bool has_scores = has_trees || context_.drafter.needs().has_scores;
  parents_.resize(has_trees ? wanted.size() * most : 0);
  scores_.resize(has_scores ? wanted.size() * most : 0);
  context_.drafter.propose(exec_, context_.table.view(),
                           {.seq = seq_.data(),
                            .num_wanted = num_wanted_.data(),
                            .num_seqs = static_cast<int>(wanted.size()),
                            .max_drafts = static_cast<int>(most),
                            .max_rows = context_.config.max_num_batched_tokens,
                            .drafts = drafts_.data(),
                            .num_drafts = num_drafts_.data(),
                            .parents = has_trees ? parents_.data() : nullptr,
                            .scores = has_scores ? scores_.data() : nullptr});
  for (size_t i = 0; i < wanted.size(); ++i) {
    for (size_t k = i * most; k < i * most + static_cast<size_t>(num_drafts_[i]); ++k) {
      drafts[i].append(drafts_[k]);
      if (has_trees) drafts[i].parents.back() = parents_[k];
      if (has_scores) drafts[i].scores.push_back(scores_[k]);
    }
  }
  return drafts;
}

void HostStep::grant_drafts(StepLease& lease) {
  std::vector<DraftOffer> offers;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    lease.spans.push_back({.slot = request.slot,
                           .num_new_tokens = request.num_new_tokens,
                           .kv_len = context_.table.kv_len(request.slot),
                           .num_tokens = context_.table.num_tokens(request.slot),
                           .draft = lease.offered[i]});
    const bool is_forced = lease.first_forced[i] == 0;
    offers.push_back({.num_drafts = lease.offered[i].size(),
                      .ratio = (is_forced ? context_.table.forced_acceptance(request.slot)
                                          : context_.table.acceptance(request.slot))
                                   .ratio(),
                      .scores = lease.offered[i].scores});
  }
  if (!context_.config.adaptive || !has_step_times()) return;
  const std::vector<int> counts = plan_drafts(lease, offers, lease.has_proposed,
                                              context_.config.max_num_batched_tokens, host_seconds_)
                                      .counts;
  for (size_t i = 0; i < counts.size(); ++i) lease.spans[i].draft.truncate(counts[i]);
}

}  // namespace openspec
