#pragma once

#include <optional>
#include <span>
#include <unordered_map>

#include "core/prefix_hash.h"

namespace openspec {

/// The pages that lead to snapshots: those of the prefixes that there are snapshots of, whether a
/// page is there or not.
class ServedPages {
 public:
  bool has(const PageHash& page) const { return pages_.contains(page); }
  /// There is a snapshot of the prefix that consists of these pages; `begin(index)` is called for
  /// each that led to none before, in order.
  template <typename Begin>
  void add(std::span<const PageHash> prefix, const Begin& begin) {
    for (size_t i = 0; i < prefix.size(); ++i) {
      Page& page = pages_[prefix[i]];
      if (i > 0) page.parent = prefix[i - 1];
      if (page.num_snapshots++ == 0) begin(i);
    }
  }
  /// There is no snapshot any more of the prefix that ends with page `last`; `end(page)` is called
  /// for each that leads to none now, last one first.
  template <typename End>
  void remove(const PageHash& last, const End& end) {
    for (std::optional<PageHash> hash = last; hash;) {
      const auto found = pages_.find(*hash);
      const std::optional<PageHash> parent = found->second.parent;
      if (--found->second.num_snapshots == 0) {
        end(*hash);
        pages_.erase(found);
      }
      hash = parent;
    }
  }
  void clear() { pages_.clear(); }

 private:
  struct Page {
    std::optional<PageHash> parent;
    int num_snapshots = 0;
  };
  std::unordered_map<PageHash, Page, PageHashHasher> pages_;
};

}  // namespace openspec
