#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/prefix_hash.h"

namespace openspec {

/// One change of what the prefix cache holds.
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
class PageEventLog {
 public:
  void stored(const PageHash& hash, const std::optional<PageHash>& parent,
              std::span<const int32_t> tokens, const std::string& salt) {
    const bool continues =
        continues_last(PageEvent::Kind::kStored) && parent == events_.back().hashes.back();
    if (!continues) {
      begin(PageEvent::Kind::kStored);
      events_.back().parent = parent;
      if (!parent) events_.back().salt = salt;
    }
    PageEvent& event = events_.back();
    event.hashes.push_back(hash);
    event.tokens.insert(event.tokens.end(), tokens.begin(), tokens.end());
  }

  void removed(const PageHash& hash) {
    if (!continues_last(PageEvent::Kind::kRemoved)) begin(PageEvent::Kind::kRemoved);
    events_.back().hashes.push_back(hash);
  }

  void cleared() { begin(PageEvent::Kind::kCleared); }

  std::vector<PageEvent> take() { return std::exchange(events_, {}); }

 private:
  void begin(PageEvent::Kind kind) { events_.emplace_back().kind = kind; }

  bool continues_last(PageEvent::Kind kind) const {
    return !events_.empty() && events_.back().kind == kind;
  }

  std::vector<PageEvent> events_;
};

}  // namespace openspec
