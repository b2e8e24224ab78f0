#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/prefix_hash.h"

namespace openspec {

/// One change of what the prefix cache holds. Its hashes are the log's: see PageEventLog.
struct PageEvent {
  enum class Kind { kStored, kRemoved, kCleared };
  Kind kind = Kind::kCleared;
  /// kStored: pages of one sequence, one after another.
  std::vector<PageHash> hashes;
  /// kStored: the page in front of the first; none if that begins its sequence.
  std::optional<PageHash> parent;
  /// kStored: of all pages.
  std::vector<int32_t> tokens;
  /// kStored without parent: what separates this sequence from others that begin alike.
  std::string salt;
};

/// What happened to reusable pages since somebody last took it, in order. Whoever applies all
/// events to an empty set has the pages that PagePool::find() finds.
///
/// Its hashes are not the pool's, which are keyed by a secret. They depend on contents alone, so
/// that equal pages of two engines have equal hashes: subscribers who follow several rely on that.
class PageEventLog {
 public:
  explicit PageEventLog(int page_size) : page_size_(static_cast<size_t>(page_size)) {}

  /// A sequence's page became reusable: the last one of `tokens`, which begin with the sequence.
  /// `hash` and `parent` are the pool's.
  void stored(const PageHash& hash, const PageHash& parent, std::span<const int32_t> tokens,
              const std::string& salt);
  void removed(const PageHash& hash);
  void cleared();

  /// The log's hash of a page that is reusable.
  const PageHash& hash_of(const PageHash& hash) const { return hashes_.at(hash); }

  std::vector<PageEvent> take() { return std::exchange(events_, {}); }

 private:
  PageEvent& begin(PageEvent::Kind kind);
  bool continues_last(PageEvent::Kind kind) const {
    return !events_.empty() && events_.back().kind == kind;
  }

  size_t page_size_;
  PrefixHasher hasher_{PrefixHasher::Key{}};
  std::unordered_map<PageHash, PageHash, PageHashHasher>
      hashes_;  // of reusable pages, by the pool's
  std::vector<PageEvent> events_;
};

}  // namespace openspec
