#include "core/page_pool.h"

#include <cstdio>
#include <cstdlib>

#include "core/check.h"

namespace openspec {

PagePool::PagePool(int num_pages) {
  OPENSPEC_CHECK_ARG(num_pages > 0, "num_pages must be positive, got ", num_pages);
  pages_.resize(static_cast<size_t>(num_pages));
  free_.reserve(pages_.size());
  for (PageId page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

PagePool::~PagePool() {
  for (size_t page = 0; page < pages_.size(); ++page) {
    if (pages_[page].num_references == 0) continue;
    std::fprintf(stderr, "openspec: page %zu leaked with %d references\n", page,
                 pages_[page].num_references);
    std::abort();
  }
}

PagePool::Page& PagePool::held(PageId page) {
  OPENSPEC_CHECK(page >= 0 && page < num_pages(), "page ", page, " is outside the pool");
  OPENSPEC_CHECK(pages_[static_cast<size_t>(page)].num_references > 0, "page ", page,
                 " is not held");
  return pages_[static_cast<size_t>(page)];
}

bool PagePool::allocate(int count, std::vector<PageId>* out) {
  if (count > num_available()) return false;
  for (int i = 0; i < count; ++i) {
    if (free_.empty()) {
      const PageId victim = cached_.front();
      cached_.pop_front();
      forget(victim);
      free_.push_back(victim);
    }
    const PageId page = free_.back();
    free_.pop_back();
    pages_[static_cast<size_t>(page)].num_references = 1;
    out->push_back(page);
  }
  return true;
}

void PagePool::release(PageId page) {
  Page& state = held(page);
  if (--state.num_references > 0) return;
  if (state.published) {
    state.cached_at = cached_.insert(cached_.end(), page);
  } else {
    free_.push_back(page);
  }
}

PageId PagePool::find(const PageHash& hash) {
  const auto found = index_.find(hash);
  if (found == index_.end()) return -1;
  Page& state = pages_[static_cast<size_t>(found->second)];
  if (state.num_references++ == 0) cached_.erase(state.cached_at);
  return found->second;
}

bool PagePool::publish(PageId page, const PageHash& hash, bool is_silent) {
  Page& state = held(page);
  if (state.published || !index_.emplace(hash, page).second) return false;
  state.published = true;
  state.is_silent = is_silent;
  state.hash = hash;
  return true;
}

void PagePool::forget(PageId page) {
  Page& state = pages_[static_cast<size_t>(page)];
  index_.erase(state.hash);
  state.published = false;
  if (tell_forgotten_) tell_forgotten_(state.hash, state.is_silent);
}

void PagePool::retract(const PageHash& hash) {
  const auto found = index_.find(hash);
  if (found == index_.end()) return;
  const PageId page = found->second;
  index_.erase(found);
  Page& state = pages_[static_cast<size_t>(page)];
  state.published = false;
  if (state.num_references > 0) return;
  cached_.erase(state.cached_at);
  free_.push_back(page);
}

void PagePool::reset_cache() {
  for (PageId page : cached_) free_.push_back(page);
  cached_.clear();
  index_.clear();
  for (Page& state : pages_) state.published = false;
}

std::vector<PageHash> PagePool::published_hashes() const {
  std::vector<PageHash> hashes;
  hashes.reserve(index_.size());
  for (const auto& [hash, page] : index_) {
    if (!pages_[static_cast<size_t>(page)].is_silent) hashes.push_back(hash);
  }
  return hashes;
}

void PagePool::check_integrity(std::span<const PageId> holders) const {
  std::vector<int> num_holders(pages_.size(), 0);
  std::vector<int> num_places(pages_.size(), 0);
  for (PageId page : holders) ++num_holders.at(static_cast<size_t>(page));
  for (PageId page : free_) ++num_places.at(static_cast<size_t>(page));
  for (PageId page : cached_) {
    ++num_places.at(static_cast<size_t>(page));
    OPENSPEC_CHECK(pages_[static_cast<size_t>(page)].published, "cached page ", page,
                   " is not in the prefix index");
  }
  for (size_t page = 0; page < pages_.size(); ++page) {
    const int references = pages_[page].num_references;
    OPENSPEC_CHECK(references == num_holders[page], "page ", page, " has ", references,
                   " references and ", num_holders[page], " holders");
    OPENSPEC_CHECK(num_places[page] + (references > 0) == 1, "page ", page, " is in ",
                   num_places[page], " lists with ", references, " references");
  }
  for (const auto& [hash, page] : index_) {
    const Page& state = pages_[static_cast<size_t>(page)];
    OPENSPEC_CHECK(state.published && state.hash == hash, "page ", page,
                   " stands under a foreign hash");
  }
}

}  // namespace openspec
