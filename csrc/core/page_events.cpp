#include "core/page_events.h"

#include "core/check.h"

namespace openspec {

void PageEventLog::stored(const PageHash& hash, const PageHash& parent,
                          std::span<const int32_t> tokens, const std::string& salt) {
  OPENSPEC_CHECK(!tokens.empty() && tokens.size() % page_size_ == 0, tokens.size(),
                 " tokens are not whole pages of ", page_size_);
  const size_t last = tokens.size() - page_size_;
  std::optional<PageHash> own_parent;
  if (last > 0) {
    if (const auto found = hashes_.find(parent); found != hashes_.end()) {
      own_parent = found->second;
    } else {  // it has made room for others
      own_parent = hasher_.root({reinterpret_cast<const uint8_t*>(salt.data()), salt.size()});
      for (size_t at = 0; at < last; at += page_size_) {
        own_parent = hasher_.extend(*own_parent, tokens.subspan(at, page_size_));
      }
    }
  }
  const std::span<const int32_t> page = tokens.subspan(last);
  const PageHash before = own_parent.value_or(
      hasher_.root({reinterpret_cast<const uint8_t*>(salt.data()), salt.size()}));
  const PageHash own = hasher_.extend(before, page);
  hashes_[hash] = own;
  const bool continues = continues_last(PageEvent::Kind::kStored) && own_parent &&
                         *own_parent == events_.back().hashes.back();
  PageEvent& event = continues ? events_.back() : begin(PageEvent::Kind::kStored);
  if (!continues) {
    event.parent = own_parent;
    if (!own_parent) event.salt = salt;
  }
  event.hashes.push_back(own);
  event.tokens.insert(event.tokens.end(), page.begin(), page.end());
}

void PageEventLog::removed(const PageHash& hash) {
  const auto found = hashes_.find(hash);
  OPENSPEC_CHECK(found != hashes_.end(), "a page is removed that was never stored");
  PageEvent& event =
      continues_last(PageEvent::Kind::kRemoved) ? events_.back() : begin(PageEvent::Kind::kRemoved);
  event.hashes.push_back(found->second);
  hashes_.erase(found);
}

void PageEventLog::cleared() {
  hashes_.clear();
  begin(PageEvent::Kind::kCleared);
}

PageEvent& PageEventLog::begin(PageEvent::Kind kind) {
  PageEvent& event = events_.emplace_back();
  event.kind = kind;
  return event;
}

}  // namespace openspec
