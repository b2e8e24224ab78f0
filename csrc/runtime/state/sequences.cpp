#include "runtime/state/sequences.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace openspec {

Sequences::Sequences(const SequenceLimits& limits, const RecordPlan& records, const BasePlan& bases,
                     int num_pages, SlotRecords::Copy copy)
    : limits_(limits),
      pool_(num_pages),
      table_(limits.max_num_seqs, limits.max_model_len, limits.page_size, limits.num_lookahead,
             limits.device == Device::kCuda ? Memory::kPinned : Memory::kHost),
      records_(records, limits.device, std::move(copy)),
      bases_(bases),
      prefixes_(limits, table_, pool_, records_, bases_) {}

Sequences::~Sequences() {
  for (int slot : table_.slots_in_use()) remove(slot);
}

int Sequences::add(std::span<const int32_t> tokens, int prompt_len, SequenceParams params,
                   std::span<const uint8_t> cache_salt) {
  const int slot = table_.add(tokens, prompt_len, std::move(params), prefixes_.root(cache_salt));
  prefixes_.set_salt(slot, cache_salt);
  if (records_.exist()) records_.add(slot);
  if (bases_.exist()) bases_.add(slot);
  return slot;
}

void Sequences::remove(int slot) {
  table_.check_slot(slot);
  const std::span<const PageId> pages = table_.pages(slot);
  // Last page first: of a cached prefix, the tail is evicted before the head.
  for (size_t i = pages.size(); i-- > 0;) pool_.release(pages[i]);
  for (const PageId page : bases_.pages(slot)) pool_.release(page);
  table_.remove(slot);
}

int Sequences::num_pages_needed(int slot, int num_rows) const {
  table_.check_slot(slot);
  const SequenceTable::InFlight& in_flight = table_.in_flight(slot);
  const int end = table_.kv_len(slot) + in_flight.num_rows + num_rows;
  const bool has_drafts = end > table_.num_tokens(slot);
  // What is in flight may turn out to be all right.
  const int most_tokens =
      std::min(limits_.max_model_len,
               std::max(table_.num_tokens(slot), table_.kv_len(slot) + in_flight.num_rows + 1));
  const int end_of_drafting = has_drafts ? most_tokens + limits_.num_draft_entries : 0;
  const int num_base_pages = bases_.folds(slot, table_.kv_len(slot) + in_flight.num_rows, num_rows)
                                 ? bases_.num_pages()
                                 : 0;
  return num_base_pages +
         std::max(0, table_.pages_for(std::max(end + limits_.num_rows_behind, end_of_drafting)) -
                         table_.num_pages(slot) - in_flight.num_pages);
}

void Sequences::check_integrity(bool keeps_more) const {
  std::vector<PageId> holders;
  for (int slot : table_.slots_in_use()) {
    const std::span<const PageId> pages = table_.pages(slot);
    const std::span<const PageId> base = bases_.pages(slot);
    holders.insert(holders.end(), pages.begin(), pages.end());
    holders.insert(holders.end(), base.begin(), base.end());
    OPENSPEC_CHECK(table_.kv_len(slot) < table_.num_tokens(slot), "slot ", slot, " has KV for ",
                   table_.kv_len(slot), " of ", table_.num_tokens(slot), " tokens");
    // Where steps run ahead, pages for drafts stay with the sequence: the next step may write them.
    const int kv_len = table_.kv_len(slot);
    // A cached prefix of one token, which runs again, is a page for none.
    const int num_needed = kv_len == 0 ? static_cast<int>(table_.page_hashes(slot).size())
                                       : table_.pages_for(kv_len + limits_.num_rows_behind);
    OPENSPEC_CHECK(
        table_.num_pages(slot) == num_needed || (keeps_more && table_.num_pages(slot) > num_needed),
        "slot ", slot, " holds ", table_.num_pages(slot), " pages for ", table_.kv_len(slot),
        " tokens");
  }
  pool_.check_integrity(holders);
}

std::unique_ptr<StepLease> Sequences::reserve(std::span<const SpanRequest> requests) {
  OPENSPEC_CHECK_ARG(!requests.empty(), "a step needs at least one span");
  auto lease = std::make_unique<StepLease>();
  lease->on_abandon = [this](StepLease& failed) { abandon(failed); };
  std::vector<bool> is_in_step(static_cast<size_t>(table_.num_slots()));
  for (const SpanRequest& request : requests) {
    table_.check_slot(request.slot);
    SequenceTable::InFlight& in_flight = table_.in_flight(request.slot);
    const auto slot = static_cast<size_t>(request.slot);
    OPENSPEC_CHECK_ARG(!is_in_step[slot], "slot ", request.slot, " is in the step twice");
    is_in_step[slot] = true;
    OPENSPEC_CHECK_ARG(request.max_drafts >= 0, "slot ", request.slot, ": max_drafts is ",
                       request.max_drafts);
    const int begin = table_.kv_len(request.slot) + in_flight.num_new_tokens;
    const int num_tokens = table_.num_tokens(request.slot);
    OPENSPEC_CHECK_ARG(num_tokens < limits_.max_model_len, "slot ", request.slot, " has ",
                       num_tokens, " tokens, all that a context of ", limits_.max_model_len,
                       " has room for");
    // Behind a step in flight that chooses a token, that token is the one to compute.
    const int num_known = std::max(num_tokens, in_flight.num_new_tokens > 0 ? begin + 1 : 0);
    OPENSPEC_CHECK_ARG(request.num_new_tokens >= 1 && request.num_new_tokens <= num_known - begin,
                       "slot ", request.slot, " has ", num_known - begin,
                       " tokens to compute, asked for ", request.num_new_tokens);
    const bool is_sampled = begin + request.num_new_tokens >= num_tokens;
    // A drafter with entries of its own begins after the last known token's, which a step before
    // this one must have made.
    const bool may_draft =
        is_sampled && (limits_.num_rows_behind == 0 || (begin > 0 && request.num_new_tokens == 1));
    const int max_drafts = may_draft ? std::min(request.max_drafts, limits_.draft_room) : 0;
    const int num_rows = request.num_new_tokens + max_drafts;
    const int all_needed = num_pages_needed(request.slot, num_rows);
    const bool folds =
        bases_.folds(request.slot, table_.kv_len(request.slot) + in_flight.num_rows, num_rows);
    const int num_free = pool_.num_available();
    if (all_needed > num_free) {
      detail::fail<OutOfPages>("slot ", request.slot, " needs ", all_needed, " pages, ", num_free,
                               " are free");
    }
    PageLease base(pool_, folds ? bases_.num_pages() : 0);
    const int needed = all_needed - (folds ? bases_.num_pages() : 0);
    PageLease pages(pool_, needed);
    if (folds) bases_.set_target(request.slot, base.pages());
    // Entries past num_pages are the leases' own until commit.
    const auto row =
        table_.page_row(request.slot)
            .subspan(static_cast<size_t>(table_.num_pages(request.slot) + in_flight.num_pages));
    OPENSPEC_CHECK_ARG(pages.pages().size() <= row.size(), "slot ", request.slot,
                       " is in more steps than may be under way");
    std::copy(pages.pages().begin(), pages.pages().end(), row.begin());
    in_flight.num_new_tokens += request.num_new_tokens;
    in_flight.num_rows += num_rows;
    in_flight.num_pages += needed;
    lease->requests.push_back({request.slot, request.num_new_tokens, max_drafts});
    lease->serials.push_back(table_.serial(request.slot));
    lease->is_sampled.push_back(is_sampled);
    lease->first_position.push_back(begin);
    lease->pages.push_back(std::move(pages));
    lease->bases.push_back(std::move(base));
    lease->num_rows += num_rows;
  }
  OPENSPEC_CHECK_ARG(lease->num_rows <= limits_.max_num_batched_tokens, "a step of up to ",
                     lease->num_rows, " rows, at most ", limits_.max_num_batched_tokens);
  return lease;
}

bool Sequences::overwrites_records(const StepLease& lease, size_t span) const {
  const bool is_decode = lease.is_sampled[span] && lease.requests[span].num_new_tokens == 1;
  return records_.exist() && !is_decode;
}

void Sequences::begin(StepLease& lease) {
  for (const GivenUp& span : given_up_) {
    if (!table_.is_held_by(span.slot, span.serial)) continue;
    records_.restore(span.slot, span.place, span.length);
  }
  given_up_.clear();
  lease.place = num_begun_++ % limits_.num_steps;
  for (size_t i = 0; i < lease.requests.size(); ++i) {
    if (!overwrites_records(lease, i) || !is_current(lease, i)) continue;
    records_.save(lease.requests[i].slot, lease.place, lease.first_position[i]);
  }
}

void Sequences::abandon(StepLease& lease) {
  const bool was_begun = lease.state == StepLease::State::kLaunched;
  for (size_t i = 0; i < lease.serials.size(); ++i) {
    if (!is_current(lease, i)) continue;
    const SpanRequest& request = lease.requests[i];
    SequenceTable::InFlight& in_flight = table_.in_flight(request.slot);
    in_flight.num_new_tokens -= request.num_new_tokens;
    in_flight.num_rows -= request.num_new_tokens + request.max_drafts;
    in_flight.num_pages -= static_cast<int>(lease.pages[i].pages().size());
    if (was_begun && overwrites_records(lease, i)) {
      records_.lose(request.slot, lease.first_position[i]);
      given_up_.push_back({request.slot, lease.serials[i], lease.place, lease.first_position[i]});
    }
  }
}

void Sequences::commit_base(StepLease& lease, size_t span) {
  const int slot = lease.requests[span].slot, num_folded = lease.num_folded[span];
  if (num_folded <= bases_.num_folded(slot)) return;
  for (const PageId page : bases_.pages(slot)) pool_.release(page);
  PageLease& base = lease.bases[span];
  bases_.set(slot, base.pages(), num_folded);
  base.keep(bases_.num_pages());
}

void Sequences::commit(StepLease& lease, size_t span, bool keeps_more,
                       const std::function<void()>& enter_publish) {
  const SpanRequest& request = lease.requests[span];
  const SpanResult& result = lease.results[span];
  const int slot = request.slot;
  SequenceTable::InFlight& in_flight = table_.in_flight(slot);
  in_flight.num_new_tokens -= request.num_new_tokens;
  in_flight.num_rows -= request.num_new_tokens + request.max_drafts;
  const int num_leased = static_cast<int>(lease.pages[span].pages().size());
  in_flight.num_pages -= num_leased;
  const int kv_len = table_.kv_len(slot) + result.num_computed;
  const int num_kept =
      keeps_more ? num_leased
                 : table_.pages_for(kv_len + limits_.num_rows_behind) - table_.num_pages(slot);
  lease.pages[span].keep(num_kept);
  if (bases_.exist()) commit_base(lease, span);
  table_.commit(slot, result.token_ids, kv_len, table_.num_pages(slot) + num_kept);
  if (!limits_.enable_prefix_caching) return;
  // Behind what is committed: rows of steps that were given up, of this one, and of the next.
  const int end = kv_len + limits_.num_steps * (1 + limits_.draft_room) + in_flight.num_rows;
  prefixes_.publish(slot, kv_len - lease.num_waiting, end, enter_publish);
}

}  // namespace openspec
