#include "runtime/state/prefix_cache.h"

#include <algorithm>

namespace openspec {

void PrefixCache::set_salt(int slot, std::span<const uint8_t> salt) {
  if (events_) salts_[size_t(slot)].assign(salt.begin(), salt.end());
}

std::vector<PageHash> PrefixCache::find(PageHash hash, std::span<const int32_t> tokens,
                                        int* num_matched) const {
  const auto page_size = static_cast<size_t>(limits_.page_size);
  std::vector<PageHash> hashes;
  // At least one known token has to run, for its logits.
  while ((hashes.size() + 1) * page_size < tokens.size()) {
    hash = hasher_.extend(hash, tokens.subspan(hashes.size() * page_size, page_size));
    if (!pool_.has(hash)) break;
    hashes.push_back(hash);
  }
  if (num_matched != nullptr) *num_matched = static_cast<int>(hashes.size());
  while (records_.exist() && !hashes.empty() && !records_.has_snapshot(hashes.back())) {
    hashes.pop_back();
  }
  return hashes;
}

BaseName PrefixCache::name_base(int slot, const PageHash& prefix) {
  const std::span<const PageId> pages = bases_.pages(slot);
  if (pages.empty()) return {};
  if (!bases_.key(slot)) {
    // No other base has the name, whose pages could make room before these.
    const int32_t words[] = {-1, ++num_bases_};
    bases_.key(slot) = hasher_.extend(prefix, words);
  }
  const BaseName base = {bases_.num_folded(slot), *bases_.key(slot)};
  for (int i = 0; i < bases_.num_pages(); ++i) {
    pool_.publish(pages[size_t(i)], base_page(base, i), /*is_silent=*/true);
  }
  return base;
}

void PrefixCache::make_snapshot(int slot, const PageHash& prefix, int length, int end) {
  if (!bases_.serves(slot, length - limits_.num_rows_behind, length)) return;
  // Whoever comes with the same prompt has its last token run, for the logits.
  const SnapshotOf of = length == records_.wanted(slot)     ? SnapshotOf::kShared
                        : length >= table_.prompt_len(slot) ? SnapshotOf::kAnswer
                                                            : SnapshotOf::kPrompt;
  if (!records_.publish(slot, prefix, length, end, of)) return;
  records_.base_of(prefix) = name_base(slot, prefix);
  if (events_) {
    const std::span<const PageHash> path = table_.page_hashes(slot);
    served_.add(path.first(size_t(length / limits_.page_size)), [&](size_t page) {
      if (pool_.has(path[page])) tell_stored(slot, page);
    });
  }
  release_lost();
}

void PrefixCache::tell_stored(int slot, size_t page) {
  const std::vector<PageHash>& hashes = table_.page_hashes(slot);
  const size_t num_tokens = (page + 1) * static_cast<size_t>(limits_.page_size);
  events_->stored(hashes[page], page == 0 ? table_.root(slot) : hashes[page - 1],
                  table_.tokens(slot).first(num_tokens), salts_[size_t(slot)]);
}

void PrefixCache::release_lost() {
  for (const LostSnapshot& lost : records_.take_lost()) {
    if (lost.base.num_folded > 0 && !records_.needs_base(lost.base.key)) {
      for (int i = 0; i < bases_.num_pages(); ++i) pool_.retract(base_page(lost.base, i));
    }
    if (!events_) continue;
    served_.remove(lost.prefix, [&](const PageHash& page) {
      if (pool_.has(page)) events_->removed(page);
    });
  }
}

void PrefixCache::forget(const PageHash& page, bool is_silent) {
  if (is_silent) {
    records_.forget_base(page);
    release_lost();
  } else if (events_ && counts(page)) {
    events_->removed(page);
  }
}

void PrefixCache::attach_base(int slot, const BaseName& base) {
  if (base.num_folded == 0) return;
  std::vector<PageId> pages;
  for (int i = 0; i < bases_.num_pages(); ++i) pages.push_back(pool_.find(base_page(base, i)));
  bases_.set(slot, pages, base.num_folded);
  bases_.key(slot) = base.key;
}

void PrefixCache::attach(int slot) {
  std::vector<PageHash>& hashes = table_.page_hashes(slot);
  int num_matched = 0;
  hashes = find(table_.root(slot), table_.tokens(slot), &num_matched);
  std::transform(hashes.begin(), hashes.end(), table_.page_row(slot).begin(),
                 [&](const PageHash& hash) { return pool_.find(hash); });
  const int num_pages = static_cast<int>(hashes.size());
  const int num_cached = num_pages * limits_.page_size;
  if (records_.exist() && num_matched > num_pages) {
    records_.wanted(slot) = num_matched * limits_.page_size;
  }
  if (records_.exist() && num_cached > 0) {
    records_.attach(slot, hashes.back(), num_cached);
    attach_base(slot, records_.base_of(hashes.back()));
  }
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
    if (pool_.publish(pages[page], hashes.back()) && events_ && counts(hashes.back())) {
      tell_stored(slot, page);
    }
    if (records_.exist()) {
      const int length = static_cast<int>((page + 1) * page_size);
      make_snapshot(slot, hashes.back(), length, end);
    }
  }
} catch (const std::exception&) {
  // Others find less in the cache. What is committed stays, and the rest of the commit must follow.
}

void PrefixCache::reset() {
  pool_.reset_cache();
  records_.reset_snapshots();
  served_.clear();
  if (events_) events_->cleared();
}

void PrefixCache::record_events() {
  events_ = std::make_unique<PageEventLog>(limits_.page_size);
  salts_.resize(static_cast<size_t>(table_.num_slots()));
}

std::vector<PageHash> PrefixCache::published_hashes() const {
  std::vector<PageHash> hashes = pool_.published_hashes();
  if (events_) {
    std::erase_if(hashes, [this](const PageHash& hash) { return !counts(hash); });
    for (PageHash& hash : hashes) hash = events_->hash_of(hash);
  }
  return hashes;
}

std::vector<PageEvent> PrefixCache::take_events() {
  return events_ ? events_->take() : std::vector<PageEvent>();
}

}  // namespace openspec
