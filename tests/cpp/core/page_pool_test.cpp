#include "core/page_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <random>

#include "check_test.h"
#include "core/check.h"

using namespace openspec;

namespace {
const PrefixHasher kHasher({1, 2});
PageHash hash_of(int32_t token) { return kHasher.extend({}, std::vector<int32_t>{token}); }
}  // namespace

TEST(siphash128_matches_reference_vectors) {
  // First vectors of the reference implementation: key 00..0f, message 00, 01, 02 ...
  const PrefixHasher::Key key{0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
  const PageHash empty = siphash128(key, {});
  CHECK_EQ(empty.low, 0xe6a825ba047f81a3u);
  CHECK_EQ(empty.high, 0x930255c71472f66du);
  const std::vector<uint8_t> one{0};
  CHECK_EQ(siphash128(key, one).low, 0x44af996bd8c187dau);
  CHECK_EQ(siphash128(key, one).high, 0x45fc229b11597634u);
}

TEST(hash_depends_on_key_parent_tokens_and_salt) {
  const std::vector<int32_t> tokens{1, 2, 3};
  const PageHash base = kHasher.extend({}, tokens);
  CHECK(base == kHasher.extend({}, tokens));
  CHECK(!(base == PrefixHasher({1, 3}).extend({}, tokens)));
  CHECK(!(base == kHasher.extend(base, tokens)));
  CHECK(!(base == kHasher.extend({}, std::vector<int32_t>{1, 2, 4})));
  CHECK(!(kHasher.root(std::vector<uint8_t>{1}) == kHasher.root({})));
}

TEST(allocation_is_all_or_nothing_and_last_in_first_out) {
  PagePool pool(4);
  std::vector<PageId> held;
  CHECK(pool.allocate(3, &held));
  CHECK(!pool.allocate(2, &held));
  CHECK_EQ(held.size(), 3);
  CHECK_EQ(pool.num_available(), 1);
  const PageId last = held.back();
  pool.release(last);
  held.pop_back();
  CHECK(pool.allocate(1, &held));
  CHECK_EQ(held.back(), last);
  pool.check_integrity(held);
  for (PageId page : held) pool.release(page);
}

TEST(dropped_lease_restores_the_pool_exactly) {
  PagePool pool(8);
  std::vector<PageId> before, after;
  {
    PageLease lease(pool, 5);
    CHECK(lease.ok());
    before.assign(lease.pages().begin(), lease.pages().end());
  }
  CHECK_EQ(pool.num_available(), 8);
  PageLease lease(pool, 5);
  after.assign(lease.pages().begin(), lease.pages().end());
  CHECK_EQ(before, after);
}

TEST(lease_keeps_a_prefix) {
  PagePool pool(8);
  PageLease lease(pool, 5);
  const std::vector<PageId> pages(lease.pages().begin(), lease.pages().end());
  lease.keep(2);
  CHECK_EQ(pool.num_available(), 6);
  const std::vector<PageId> kept(pages.begin(), pages.begin() + 2);
  pool.check_integrity(kept);
  for (PageId page : kept) pool.release(page);
}

TEST(failed_lease_takes_nothing) {
  PagePool pool(2);
  PageLease lease(pool, 3);
  CHECK(!lease.ok());
  CHECK_EQ(pool.num_available(), 2);
}

TEST(published_pages_are_found_shared_and_evicted_least_recently_used_first) {
  PagePool pool(3);
  std::vector<PageId> held;
  pool.allocate(3, &held);
  for (int32_t i = 0; i < 3; ++i) pool.publish(held[static_cast<size_t>(i)], hash_of(i));
  CHECK_EQ(pool.find(hash_of(1)), held[1]);
  pool.check_integrity(std::vector<PageId>{held[0], held[1], held[1], held[2]});
  pool.release(held[1]);
  for (PageId page : held) pool.release(page);  // 0 is now the least recently used
  CHECK_EQ(pool.num_available(), 3);
  const PageId revived = pool.find(hash_of(0));
  CHECK_EQ(revived, held[0]);
  pool.release(revived);  // now 1 is
  std::vector<PageId> fresh;
  pool.allocate(1, &fresh);
  CHECK_EQ(fresh[0], held[1]);
  CHECK_EQ(pool.find(hash_of(1)), -1);
  pool.check_integrity(fresh);
  pool.release(fresh[0]);
}

TEST(second_page_of_the_same_content_stays_private) {
  PagePool pool(2);
  std::vector<PageId> held;
  pool.allocate(2, &held);
  pool.publish(held[0], hash_of(7));
  pool.publish(held[1], hash_of(7));
  CHECK_EQ(pool.find(hash_of(7)), held[0]);
  pool.release(held[0]);
  pool.release(held[0]);
  pool.release(held[1]);
  pool.check_integrity({});
}

TEST(reset_forgets_prefixes_but_not_holders) {
  PagePool pool(3);
  std::vector<PageId> held;
  pool.allocate(2, &held);
  pool.publish(held[0], hash_of(1));
  pool.publish(held[1], hash_of(2));
  pool.release(held[1]);
  pool.reset_cache();
  CHECK_EQ(pool.find(hash_of(1)), -1);
  CHECK_EQ(pool.find(hash_of(2)), -1);
  pool.check_integrity(std::span(held).first(1));
  pool.release(held[0]);
  CHECK_EQ(pool.num_available(), 3);
}

TEST(releasing_a_free_page_is_an_error) {
  PagePool pool(1);
  CHECK_THROWS(pool.release(0), EngineError, "not held");
  CHECK_THROWS(pool.release(5), EngineError, "outside");
}

TEST(integrity_check_finds_a_wrong_holder) {
  PagePool pool(2);
  std::vector<PageId> held;
  pool.allocate(1, &held);
  CHECK_THROWS(pool.check_integrity({}), EngineError, "holders");
  pool.release(held[0]);
}

TEST(leak_is_fatal) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    std::freopen("/dev/null", "w", stderr);
    {
      PagePool pool(1);
      std::vector<PageId> held;
      pool.allocate(1, &held);
    }
    _exit(0);  // not reached
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) != 0);
}

TEST(random_use_keeps_every_page_in_exactly_one_place) {
  std::mt19937 random(1);
  PagePool pool(16);
  std::vector<PageId> held;
  int32_t next_token = 0;
  for (int i = 0; i < 20000; ++i) {
    switch (random() % 5) {
      case 0:
        pool.allocate(static_cast<int>(random() % 4), &held);
        break;
      case 1:
      case 2:
        if (!held.empty()) {
          std::swap(held[random() % held.size()], held.back());
          pool.release(held.back());
          held.pop_back();
        }
        break;
      case 3:
        if (!held.empty()) pool.publish(held[random() % held.size()], hash_of(next_token++ % 40));
        break;
      default:
        if (const PageId page = pool.find(hash_of(static_cast<int32_t>(random() % 40)));
            page >= 0) {
          held.push_back(page);
        }
    }
    if (i % 50 == 0) pool.check_integrity(held);
    if (i % 5000 == 4999) pool.reset_cache();
  }
  pool.check_integrity(held);
  for (PageId page : held) pool.release(page);
  CHECK_EQ(pool.num_available(), 16);
}
