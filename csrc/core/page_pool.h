#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/prefix_hash.h"

namespace openspec {

using PageId = int32_t;

/// Hands out pages of the KV pool and remembers which hold a reusable prefix. Owns no KV memory.
///
/// A page is *free*, *held* (reference count above 0) or *cached*: published under its content
/// hash, held by nobody, evictable in order of last use. Only full pages whose every token is
/// committed are published, and a published page is never written again; so pages are shared
/// without copy-on-write.
class PagePool {
 public:
  explicit PagePool(int num_pages);
  /// A page still held is a leak, hence a bug: ends the process with a message.
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  int num_pages() const { return static_cast<int>(pages_.size()); }
  /// Free or evictable.
  int num_available() const { return static_cast<int>(free_.size() + cached_.size()); }

  /// Appends `count` pages with reference count 1 to `out`, or takes nothing and returns false.
  /// The page freed last goes out first; cached pages are evicted only when no free one is left.
  bool allocate(int count, std::vector<PageId>* out);
  /// Drops one reference.
  void release(PageId page);

  /// Takes a reference to the page published under `hash`; -1 if there is none.
  PageId find(const PageHash& hash);
  /// Whether there is one.
  bool has(const PageHash& hash) const { return index_.contains(hash); }
  /// Offers a held page for reuse; whether it stands under `hash` from then on. If another page
  /// already does, that one stays. published_hashes() has none that `is_silent`: such a page holds
  /// something else than tokens' KV.
  bool publish(PageId page, const PageHash& hash, bool is_silent = false);
  /// The page that stands under `hash`, if one does, is reusable no more, and free if nobody holds
  /// it. Nobody is told.
  void retract(const PageHash& hash);
  /// Forgets every published page; held ones stay held.
  void reset_cache();
  /// Tells of each page that makes room for others; not of those that reset_cache() forgets.
  using Forgotten = std::function<void(const PageHash& hash, bool is_silent)>;
  void on_forgotten(Forgotten tell) { tell_forgotten_ = std::move(tell); }

  /// Throws EngineError unless every page is exactly one of free, cached and held, and each is held
  /// as often as it occurs in `holders`.
  void check_integrity(std::span<const PageId> holders) const;
  /// Of every reusable page, in no order.
  std::vector<PageHash> published_hashes() const;

 private:
  struct Page {
    int num_references = 0;
    bool published = false, is_silent = false;
    PageHash hash;
    std::list<PageId>::iterator cached_at;  // valid while cached
  };

  Page& held(PageId page);
  void forget(PageId page);

  std::vector<Page> pages_;
  std::vector<PageId> free_;  // used as a stack
  std::list<PageId> cached_;  // least recently used first
  std::unordered_map<PageHash, PageId, PageHashHasher> index_;
  Forgotten tell_forgotten_;
};

/// Pages taken for one optimistic use; whatever is not kept goes back when the lease ends, last
/// taken first.
class PageLease {
 public:
  PageLease() = default;
  /// Throws nothing; `ok()` tells whether all `count` pages were had.
  PageLease(PagePool& pool, int count) : pool_(&pool) { ok_ = pool.allocate(count, &pages_); }
  PageLease(PageLease&& other) noexcept { *this = std::move(other); }
  PageLease& operator=(PageLease&& other) noexcept {
    keep(0);
    pool_ = other.pool_;
    ok_ = other.ok_;
    pages_ = std::move(other.pages_);
    other.pages_.clear();
    return *this;
  }
  ~PageLease() { keep(0); }

  bool ok() const { return ok_; }
  std::span<const PageId> pages() const { return pages_; }
  /// Passes the first `count` pages to the caller and gives the rest back; the lease is then empty.
  void keep(int count) {
    while (static_cast<int>(pages_.size()) > count) {
      pool_->release(pages_.back());
      pages_.pop_back();
    }
    pages_.clear();
  }

 private:
  PagePool* pool_ = nullptr;
  bool ok_ = false;
  std::vector<PageId> pages_;
};

}  // namespace openspec
