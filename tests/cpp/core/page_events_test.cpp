#include "core/page_events.h"

#include <map>
#include <random>

#include "check_test.h"
#include "core/check.h"
#include "core/page_pool.h"

using namespace openspec;

namespace {

const PrefixHasher kHasher({1, 2});
const PrefixHasher kPublic({0, 0});

void follow(PagePool& pool, PageEventLog& log) {
  pool.on_forgotten([&log](const PageHash& hash, bool is_silent) {
    if (!is_silent) log.removed(hash);
  });
}

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
  PageEventLog log(2);
  const std::vector<int32_t> tokens{1, 2, 3, 4, 5, 6};
  const std::span<const int32_t> all(tokens);
  const PageHash hashes[] = {{1, 1}, {2, 2}, {3, 3}};
  log.stored(hashes[0], {}, all.first(2), "salt");
  log.stored(hashes[1], hashes[0], all.first(4), "salt");
  log.removed(hashes[0]);
  log.removed(hashes[1]);
  log.stored(hashes[2], hashes[1], all, "salt");  // its parent is gone
  log.stored(hashes[0], {}, all.first(2), "");
  log.cleared();
  const std::vector<PageEvent> events = log.take();
  CHECK_EQ(events.size(), 5u);
  CHECK_EQ(events[0].hashes.size(), 2u);
  CHECK(!events[0].parent);
  CHECK_EQ(events[0].salt, "salt");
  CHECK(events[0].tokens == std::vector<int32_t>({1, 2, 3, 4}));
  CHECK_EQ(events[1].hashes.size(), 2u);
  CHECK(events[1].hashes == events[0].hashes);
  CHECK(events[2].parent == events[0].hashes[1]);
  CHECK_EQ(events[2].salt, "");
  CHECK(events[2].tokens == std::vector<int32_t>({5, 6}));
  CHECK(!(events[3].hashes[0] == events[0].hashes[0]));  // another salt
  CHECK(events[4].kind == PageEvent::Kind::kCleared);
  CHECK(log.take().empty());
}

TEST(equal_pages_of_two_engines_have_equal_hashes) {
  const std::vector<int32_t> tokens{1, 2, 3, 4};
  std::vector<std::vector<PageEvent>> events;
  for (uint64_t key = 0; key < 2; ++key) {
    const PrefixHasher hasher({key, 7});
    PageEventLog log(4);
    log.stored(hasher.extend({}, tokens), {}, tokens, "");
    events.push_back(log.take());
  }
  CHECK(events[0][0].hashes == events[1][0].hashes);
}

TEST(a_page_that_was_never_stored_is_an_error) {
  PageEventLog log(4);
  CHECK_THROWS(log.removed({1, 2}), EngineError, "never stored");
  CHECK_THROWS(log.stored({1, 2}, {}, std::vector<int32_t>{1, 2}, ""), EngineError, "whole pages");
}

TEST(without_a_log_nothing_is_recorded) {
  PagePool pool(1);
  std::vector<PageId> held;
  pool.allocate(1, &held);
  CHECK(pool.publish(held[0], kHasher.extend({}, std::vector<int32_t>{1})));
  pool.reset_cache();
  pool.release(held[0]);
}

TEST(silent_pages_are_found_and_told_to_nobody) {
  PagePool pool(1);
  PageEventLog log(4);
  follow(pool, log);
  const PageHash hash = kHasher.extend({}, std::vector<int32_t>{-1});
  std::vector<PageId> held;
  pool.allocate(1, &held);
  CHECK(pool.publish(held[0], hash, /*is_silent=*/true));
  CHECK(pool.published_hashes().empty());
  pool.release(held[0]);
  CHECK_EQ(pool.find(hash), held[0]);
  pool.release(held[0]);
  pool.allocate(1, &held);
  CHECK_EQ(pool.find(hash), -1);
  CHECK(log.take().empty());
  pool.release(held[1]);
}

TEST(a_page_that_is_retracted_is_free_once_nobody_holds_it) {
  PagePool pool(2);
  std::vector<PageId> held;
  pool.allocate(2, &held);
  CHECK(pool.publish(held[0], {1, 1}) && pool.publish(held[1], {2, 2}));
  pool.release(held[1]);
  for (uint64_t name : {1, 2, 3}) pool.retract({name, name});
  CHECK(!pool.has({1, 1}) && !pool.has({2, 2}));
  pool.check_integrity(std::vector<PageId>{held[0]});
  CHECK(pool.publish(held[0], {2, 2}));
  pool.release(held[0]);
  CHECK_EQ(pool.find({2, 2}), held[0]);
  pool.check_integrity(std::vector<PageId>{held[0]});
  pool.release(held[0]);
}

TEST(whoever_follows_the_events_knows_the_cache) {
  constexpr size_t kPageSize = 4;
  std::mt19937 random(3);
  PagePool pool(24);
  PageEventLog log(kPageSize);
  follow(pool, log);
  Follower follower;
  struct Sequence {
    std::vector<PageId> pages;
    std::vector<PageHash> hashes;
    std::vector<int32_t> tokens;
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
        const PageHash parent = sequence.hashes.empty() ? PageHash{} : sequence.hashes.back();
        const PageHash hash = kHasher.extend(parent, tokens);
        std::vector<int32_t> known = sequence.tokens;
        known.insert(known.end(), tokens.begin(), tokens.end());
        PageId page = random() % 2 == 0 ? pool.find(hash) : -1;
        if (page < 0) {
          std::vector<PageId> fresh;
          if (!pool.allocate(1, &fresh)) break;
          page = fresh[0];
          if (pool.publish(page, hash)) log.stored(hash, parent, known, "");
        }
        sequence.pages.push_back(page);
        sequence.hashes.push_back(hash);
        sequence.tokens = std::move(known);
      }
    }
    if (i % 3000 == 2999) {
      pool.reset_cache();
      log.cleared();
    }
    if (random() % 4 != 0) continue;
    follower.apply(log.take(), kPageSize);
    const std::vector<PageHash> published = pool.published_hashes();
    CHECK_EQ(published.size(), follower.pages.size());
    for (const PageHash& hash : published) {
      const auto found = follower.pages.find(Follower::key(log.hash_of(hash)));
      CHECK(found != follower.pages.end());
      const Follower::Page& page = found->second;
      CHECK(log.hash_of(hash) ==
            kPublic.extend(page.parent.value_or(kPublic.root({})), page.tokens));
    }
  }
  for (const Sequence& sequence : sequences) {
    for (PageId page : sequence.pages) pool.release(page);
  }
}
