#include "runtime/state/prefix_cache.h"

#include <algorithm>

namespace openspec {

void PrefixCache::set_salt(int slot, std::span<const uint8_t> salt) {
  if (events_) salts_[size_t(slot)].assign(salt.begin(), salt.end());
}

void PrefixCache::attach(int slot) {
  const std::span<const int32_t> tokens = table_.tokens(slot);
  const auto page_size = static_cast<size_t>(limits_.page_size);
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
  while (records_.exist() && num_found > 0 && !records_.has_snapshot(hashes.back())) {
    hashes.pop_back();
    pool_.release(row[--num_found]);
  }
  const int num_pages = static_cast<int>(num_found);
  const int num_cached = num_pages * limits_.page_size;
  if (records_.exist() && num_cached > 0) records_.attach(slot, hashes.back(), num_cached);
  // A drafter needs the features of the token before the first new one, so that one runs again;
  // what it writes to its shared page are the bits that are there.
  const bool runs_again = num_cached > 0 && limits_.num_rows_behind > 0;
  table_.commit(slot, {}, num_cached - (runs_again ? 1 : 0), num_pages);
  num_found_ += num_cached;
}

void PrefixCache::publish(int slot, int num_ready, int end,
                          const std::function<void()>& enter) try {
  std::vector<PageHash>& hashes = table_.page_hashes(slot);
  const auto page_size = static_cast<size_t>(limits_.page_size);
  const std::span<const int32_t> tokens = table_.tokens(slot);
  const std::span<const PageId> pages = table_.pages(slot);
  while ((hashes.size() + 1) * page_size <= static_cast<size_t>(std::max(0, num_ready))) {
    enter();
    const size_t page = hashes.size();
    const PageHash parent = page == 0 ? table_.root(slot) : hashes.back();
    hashes.push_back(hasher_.extend(parent, tokens.subspan(page * page_size, page_size)));
    if (pool_.publish(pages[page], hashes.back()) && events_) {
      events_->stored(hashes.back(), parent, tokens.first((page + 1) * page_size),
                      salts_[size_t(slot)]);
    }
    if (records_.exist()) {
      const int length = static_cast<int>((page + 1) * page_size);
      records_.publish(slot, hashes.back(), length, end, length > table_.prompt_len(slot));
    }
  }
} catch (const std::exception&) {
  // Others find less in the cache. What is committed stays, and the rest of the commit must follow.
}

void PrefixCache::reset() {
  pool_.reset_cache();
  records_.reset_snapshots();
}

void PrefixCache::record_events() {
  events_ = std::make_unique<PageEventLog>(limits_.page_size);
  salts_.resize(static_cast<size_t>(table_.num_slots()));
  pool_.set_event_log(events_.get());
}

std::vector<PageHash> PrefixCache::published_hashes() const {
  std::vector<PageHash> hashes = pool_.published_hashes();
  if (events_) {
    for (PageHash& hash : hashes) hash = events_->hash_of(hash);
  }
  return hashes;
}

std::vector<PageEvent> PrefixCache::take_events() {
  return events_ ? events_->take() : std::vector<PageEvent>();
}

}  // namespace openspec
