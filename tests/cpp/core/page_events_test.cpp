#include "core/page_events.h"

#include <map>
#include <random>

#include "check_test.h"
#include "core/check.h"
#include "core/page_pool.h"

using namespace openspec;

namespace {

const PrefixHasher kHasher({1, 2});

/// What a subscriber knows, made from events alone.
struct Follower {
  struct Page {
    std::vector<int32_t> tokens;
    std::optional<PageHash> parent;
  };
  std::map<std::pair<uint64_t, uint64_t>, Page> pages;

  static std::pair<uint64_t, uint64_t> key(const PageHash& hash) { return {hash.high, hash.low}; }

  void apply(const std::vector<PageEvent>& events, size_t page_size) {
    for (const PageEvent& event : events) {
      if (event.kind == PageEvent::Kind::kCleared) pages.clear();
      std::optional<PageHash> parent = event.parent;
      for (size_t i = 0; i < event.hashes.size(); ++i) {
        const PageHash& hash = event.hashes[i];
        if (event.kind == PageEvent::Kind::kRemoved) {
          CHECK_EQ(pages.erase(key(hash)), 1u);
        } else {
          const auto tokens = std::span(event.tokens).subspan(i * page_size, page_size);
          const bool is_new =
              pages.try_emplace(key(hash), Page{{tokens.begin(), tokens.end()}, parent}).second;
          CHECK(is_new);
          parent = hash;
        }
      }
    }
  }
};

}  // namespace

TEST(pages_of_one_sequence_make_one_event) {
  PageEventLog log;
  const std::vector<int32_t> tokens{1, 2};
  const PageHash first = kHasher.extend({}, tokens), second = kHasher.extend(first, tokens);
  log.stored(first, std::nullopt, tokens, "salt");
  log.stored(second, first, tokens, "salt");
  log.stored(first, second, tokens, "salt");
  log.stored(second, second, tokens, "salt");
  log.removed(first);
  log.removed(second);
  log.cleared();
  const std::vector<PageEvent> events = log.take();
  CHECK_EQ(events.size(), 4u);
  CHECK_EQ(events[0].hashes.size(), 3u);
  CHECK(!events[0].parent);
  CHECK_EQ(events[0].salt, "salt");
  CHECK_EQ(events[0].tokens.size(), 6u);
  CHECK(events[1].parent == second);
  CHECK_EQ(events[1].salt, "");
  CHECK_EQ(events[2].hashes.size(), 2u);
  CHECK(events[3].kind == PageEvent::Kind::kCleared);
  CHECK(log.take().empty());
}

TEST(without_a_log_nothing_is_recorded) {
  PagePool pool(1);
  std::vector<PageId> held;
  pool.allocate(1, &held);
  CHECK(pool.publish(held[0], kHasher.extend({}, std::vector<int32_t>{1})));
  pool.reset_cache();
  pool.release(held[0]);
}

TEST(whoever_follows_the_events_knows_the_cache) {
  constexpr size_t kPageSize = 4;
  std::mt19937 random(3);
  PagePool pool(24);
  PageEventLog log;
  pool.set_event_log(&log);
  Follower follower;
  struct Sequence {
    std::vector<PageId> pages;
    std::vector<PageHash> hashes;
  };
  std::vector<Sequence> sequences;
  for (int i = 0; i < 20000; ++i) {
    const size_t which = sequences.empty() ? 0 : random() % sequences.size();
    switch (random() % 8) {
      case 0:
        sequences.emplace_back();
        break;
      case 1:
        if (sequences.empty()) break;
        for (PageId page : sequences[which].pages) pool.release(page);
        sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(which));
        break;
      default: {
        if (sequences.empty()) break;
        Sequence& sequence = sequences[which];
        const std::vector<int32_t> tokens(kPageSize, static_cast<int32_t>(random() % 3));
        const bool is_first = sequence.hashes.empty();
        const PageHash parent = is_first ? PageHash{} : sequence.hashes.back();
        const PageHash hash = kHasher.extend(parent, tokens);
        PageId page = random() % 2 == 0 ? pool.find(hash) : -1;
        if (page < 0) {
          std::vector<PageId> fresh;
          if (!pool.allocate(1, &fresh)) break;
          page = fresh[0];
          if (pool.publish(page, hash)) {
            log.stored(hash, is_first ? std::nullopt : std::optional(parent), tokens, "");
          }
        }
        sequence.pages.push_back(page);
        sequence.hashes.push_back(hash);
      }
    }
    if (i % 3000 == 2999) pool.reset_cache();
    if (random() % 4 != 0) continue;
    follower.apply(log.take(), kPageSize);
    const std::vector<PageHash> published = pool.published_hashes();
    CHECK_EQ(published.size(), follower.pages.size());
    for (const PageHash& hash : published) {
      const auto found = follower.pages.find(Follower::key(hash));
      CHECK(found != follower.pages.end());
      const Follower::Page& page = found->second;
      CHECK(hash == kHasher.extend(page.parent.value_or(PageHash{}), page.tokens));
    }
  }
  for (const Sequence& sequence : sequences) {
    for (PageId page : sequence.pages) pool.release(page);
  }
}
