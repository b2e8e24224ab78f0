#include "core/page_events.h"

#include "core/check.h"

namespace openspec {

void PageEventLog::stored(const PageHash& hash, const PageHash& parent,
                          std::span<const int32_t> tokens, const std::string& salt) {
  OPENSPEC_CHECK(!tokens.empty() && tokens.size() % page_size_ == 0, tokens.size(),
                 " tokens are not whole pages of ", page_size_);
  const size_t last = tokens.size() - page_size_;
  PageHash before = hasher_.root({reinterpret_cast<const uint8_t*>(salt.data()), salt.size()});
  if (const auto found = hashes_.find(parent); last > 0 && found != hashes_.end()) {
    before = found->second;
  } else {  // it has made room for others
    for (size_t at = 0; at < last; at += page_size_) {
      before = hasher_.extend(before, tokens.subspan(at, page_size_));
    }
  }
  const std::span<const int32_t> page = tokens.subspan(last);
  const PageHash own = hasher_.extend(before, page);
  hashes_[hash] = own;
  const bool continues = last > 0 && continues_last(PageEvent::Kind::kStored) &&
                         before == events_.back().hashes.back();
  PageEvent& event = continues ? events_.back() : begin(PageEvent::Kind::kStored);
  if (!continues && last > 0) event.parent = before;
  if (!continues && last == 0) event.salt = salt;
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
