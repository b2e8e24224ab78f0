// Runner's side of the prefix cache: a new sequence takes the pages that are there, a step offers
// those that it filled.
#include <algorithm>

#include "runtime/runner.h"

namespace openspec {

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
  const int num_cached = num_pages * config_.page_size;
  // A drafter needs the features of the token before the first new one, so that one runs again;
  // what it writes to its shared page are the bits that are there.
  const bool runs_again = num_cached > 0 && num_rows_behind() > 0;
  table_.commit(slot, {}, num_cached - (runs_again ? 1 : 0), num_pages);
  cache_queries_ += static_cast<int64_t>(tokens.size());
  cache_hits_ += num_cached;
}

void Runner::publish_pages(int slot, int num_waiting) try {
  std::vector<PageHash>& hashes = table_.page_hashes(slot);
  const auto page_size = static_cast<size_t>(config_.page_size);
  const std::span<const int32_t> tokens = table_.tokens(slot);
  const std::span<const PageId> pages = table_.pages(slot);
  const auto num_ready = static_cast<size_t>(std::max(0, table_.kv_len(slot) - num_waiting));
  while ((hashes.size() + 1) * page_size <= num_ready) {
    enter("publish");
    const size_t page = hashes.size();
    const PageHash parent = page == 0 ? table_.root(slot) : hashes.back();
    hashes.push_back(hasher_.extend(parent, tokens.subspan(page * page_size, page_size)));
    if (pool_.publish(pages[page], hashes.back()) && page_events_) {
      page_events_->stored(hashes.back(), parent, tokens.first((page + 1) * page_size),
                           cache_salts_[size_t(slot)]);
    }
  }
} catch (const std::exception&) {
  // Others find less in the cache. What is committed stays, and the rest of the commit must follow.
}

void Runner::record_page_events() {
  page_events_ = std::make_unique<PageEventLog>(config_.page_size);
  cache_salts_.resize(static_cast<size_t>(table_.num_slots()));
  pool_.set_event_log(page_events_.get());
}

std::vector<PageHash> Runner::published_hashes() const {
  std::vector<PageHash> hashes = pool_.published_hashes();
  if (page_events_) {
    for (PageHash& hash : hashes) hash = page_events_->hash_of(hash);
  }
  return hashes;
}

std::vector<PageEvent> Runner::take_page_events() {
  return page_events_ ? page_events_->take() : std::vector<PageEvent>();
}

}  // namespace openspec
