#include "runtime/state/prefix_cache.h"

#include <algorithm>

namespace openspec {

void PrefixCache::set_salt(int slot, std::span<const uint8_t> salt) {
  if (events_) salts_[size_t(slot)].assign(salt.begin(), salt.end());
}

std::vector<PageHash> PrefixCache::find(PageHash hash, std::span<const int32_t> tokens) const {
  const auto page_size = static_cast<size_t>(limits_.page_size);
  std::vector<PageHash> hashes;
  // At least one known token has to run, for its logits.
  while ((hashes.size() + 1) * page_size < tokens.size()) {
    hash = hasher_.extend(hash, tokens.subspan(hashes.size() * page_size, page_size));
    if (!pool_.has(hash)) break;
    hashes.push_back(hash);
  }
  while (records_.exist() && !hashes.empty() && !records_.has_snapshot(hashes.back())) {
    hashes.pop_back();
  }
  return hashes;
}

void PrefixCache::attach(int slot) {
  std::vector<PageHash>& hashes = table_.page_hashes(slot);
  hashes = find(table_.root(slot), table_.tokens(slot));
  std::transform(hashes.begin(), hashes.end(), table_.page_row(slot).begin(),
                 [&](const PageHash& hash) { return pool_.find(hash); });
  const int num_pages = static_cast<int>(hashes.size());
  const int num_cached = num_pages * limits_.page_size;
  if (records_.exist() && num_cached > 0) records_.attach(slot, hashes.back(), num_cached);
  table_.commit(slot, {}, num_computed(hashes.size()), num_pages);
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
