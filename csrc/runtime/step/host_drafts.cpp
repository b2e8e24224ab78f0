#include "runtime/step/host_drafts.h"

#include <algorithm>
#include <utility>

namespace openspec {

namespace {

/// How many leading drafts can have rows: a draft that is no token, stands before the one that it
/// follows or has a higher score than one before it ends them; where the target takes no trees, so
/// does one that makes a tree of them.
int num_valid(const Draft& draft, int most, int vocab_size, bool takes_trees) {
  int count = 0;
  float last_score = 0.0f;
  for (; count < std::min(draft.size(), most); ++count) {
    const auto i = static_cast<size_t>(count);
    if (draft.tokens[i] < 0 || draft.tokens[i] >= vocab_size) break;
    if (draft.parents[i] < -1 || draft.parents[i] >= count) break;
    if (!takes_trees && draft.parents[i] != count - 1) break;
    if (draft.scores.empty()) continue;
    if (!(draft.scores[i] <= last_score)) break;
    last_score = draft.scores[i];
  }
  return count;
}

}  // namespace

HostDrafts::HostDrafts(const StepContext& context, DraftPlanner& planner, HostTeacher& teacher,
                       const ExecContext& exec, ThreadPool& threads)
    : context_(context),
      planner_(planner),
      teacher_(teacher),
      drafter_(context.config, context.drafter, context.table, exec),
      copies_(context.config, context.table, exec),
      grammars_(
          context.table, [&table = context.table](int slot) { return table.copy_tokens(slot); },
          [&threads]() -> ThreadPool& { return threads; }) {}

void HostDrafts::offer(StepLease& lease, double host_seconds) {
  const RunnerConfig& config = context_.config;
  lease.offers.assign(lease.requests.size(), {});
  drawn_rows_.assign(lease.requests.size(), -1);
  for (Offer& offer : ask(grammars_, config.draft_room(), lease)) {
    lease.offers[offer.span].add(kGrammarDrafts, std::move(offer.draft), offer.num_refused);
  }
  if (config.max_copied_drafts > 0) add_copies(lease);
  lease.has_proposed = drafter_works(lease, host_seconds);
  if (!lease.has_proposed) return;
  try {
    teacher_.learn_kept();
    add_drafters(lease);
  } catch (const std::exception& error) {
    context_.report_drafter_failure(error);
  }
}

void HostDrafts::add_copies(StepLease& lease) {
  for (Offer& offer : ask(copies_, context_.config.max_copied_drafts, lease)) {
    MergedDraft& merged = lease.offers[offer.span];
    if (offer.draft.size() > 0) {  // a grammar may have refused all of it
      merged.copied = {offer.draft.tokens, copies_.match_len(offer.request), kNoOpinion};
    }
    merged.add(kCopiedDrafts, std::move(offer.draft), offer.num_refused);
  }
}

void HostDrafts::add_drafters(StepLease& lease) {
  const double row_price = planner_.row_price(lease);
  const DraftLogits logits = context_.drafter.draft_logits();
  for (Offer& offer : ask(drafter_, context_.config.max_draft_tokens, lease)) {
    MergedDraft& merged = lease.offers[offer.span];
    if (logits.values != nullptr) drawn_rows_[offer.span] = logits.row[offer.request];
    const int slot = lease.requests[offer.span].slot;
    if (merged.copied.match_len > 0) {
      merged.copied.opinion =
          opinion_of(offer.draft.size(), offer.draft.tokens.data(), merged.copied.tokens.front());
    }
    if (planner_.prefers_copy(slot, merged, offer.draft, row_price)) continue;
    merged.drop_copied();
    merged.add(kDrafterDrafts, std::move(offer.draft), offer.num_refused);
  }
}

std::vector<HostDrafts::Offer> HostDrafts::ask(DraftSource& source, int max_drafts,
                                               const StepLease& lease) {
  std::vector<ProposeRequest> wanted;
  std::vector<Offer> offers;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    if (request.max_drafts == 0) continue;
    offers.push_back({.span = i, .request = wanted.size(), .draft = {}});
    wanted.push_back({request.slot, std::min(request.max_drafts, max_drafts)});
  }
  std::vector<Draft> drafts(wanted.size());
  source.offer(wanted, drafts);
  for (size_t i = 0; i < wanted.size(); ++i) {
    Draft& draft = offers[i].draft = std::move(drafts[i]);
    draft.truncate(num_valid(draft, wanted[i].num_wanted, context_.config.target.vocab_size,
                             context_.takes_trees));
    if (context_.table.grammar(wanted[i].slot) == nullptr) continue;
    offers[i].num_refused = prune(wanted[i].slot, draft);
  }
  return offers;
}

int HostDrafts::prune(int slot, Draft& draft) {
  const SequenceTable& table = context_.table;
  const auto output = table.tokens(slot).subspan(static_cast<size_t>(table.prompt_len(slot)));
  int num_refused = 0;
  // What is not judged would have no mask either.
  const bool is_judged =
      draft.size() > 0 && table.grammar(slot)->use(output, 1, [&](GrammarState& state) {
        num_refused = state.prune(draft);
      });
  if (!is_judged) draft.truncate(0);
  return num_refused;
}

bool HostDrafts::drafter_works(StepLease& lease, double host_seconds) {
  const bool is_wanted =
      std::any_of(lease.requests.begin(), lease.requests.end(),
                  [](const SpanRequest& request) { return request.max_drafts > 0; });
  if (!is_wanted || context_.config.max_draft_tokens == 0) return false;
  if (!context_.drafter.needs().is_costly || !planner_.is_adaptive()) return true;
  return planner_.drafter_pays(lease, /*may_be_absent=*/false, host_seconds);
}

void HostDrafts::grant(StepLease& lease, double host_seconds) {
  const std::vector<int> counts = planner_.grant(lease, host_seconds);
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    const SpanRequest& request = lease.requests[i];
    lease.spans.push_back({.slot = request.slot,
                           .num_new_tokens = request.num_new_tokens,
                           .kv_len = context_.table.kv_len(request.slot),
                           .num_tokens = context_.table.num_tokens(request.slot),
                           .draft = lease.offers[i].draft});
    lease.spans.back().draft.truncate(counts[i]);
  }
}

DrawnDrafts HostDrafts::drawn(const StepLease& lease) {
  DrawnDrafts drawn{.logits = context_.drafter.draft_logits()};
  if (drawn.logits.values == nullptr || lease.offers.empty()) return {};
  drawn.max_drafts = context_.config.max_draft_tokens;
  drawn_tokens_.clear();
  drawn_counts_.clear();
  for (const MergedDraft& offer : lease.offers) {
    const std::vector<int32_t>& tokens = offer.draft.tokens;
    drawn_counts_.push_back(offer.draft.size());
    drawn_tokens_.insert(drawn_tokens_.end(), tokens.begin(), tokens.end());
    drawn_tokens_.resize(drawn_counts_.size() * static_cast<size_t>(drawn.max_drafts), -1);
  }
  drawn.tokens = drawn_tokens_.data();
  drawn.counts = drawn_counts_.data();
  drawn.logits.row = drawn_rows_.data();
  return drawn;
}

}  // namespace openspec
