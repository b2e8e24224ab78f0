#include "kernels/drafts/draft_memory.h"

#include <algorithm>
#include <vector>

#include "kernels/kernel_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

using Ids = std::vector<int32_t>;

struct Memory {
  explicit Memory(size_t capacity)
      : tokens(capacity), owners(capacity), places(DraftMemory::kNumLengths * capacity) {
    view = {tokens.data(), owners.data(), places.data(), static_cast<uint32_t>(capacity)};
  }
  void remember(uint64_t owner, const Ids& answer) {
    remember_cpu({}, {.memory = view,
                      .begin = num_written,
                      .owner = owner,
                      .tokens = answer.data(),
                      .num_tokens = static_cast<int>(answer.size())});
    num_written += static_cast<uint32_t>(answer.size()) + 1;
  }
  Ids tokens;
  std::vector<uint64_t> owners;
  std::vector<uint32_t> places;
  DraftMemory view;
  uint32_t num_written = 0;
};

struct Copy {
  Ids drafts;
  int match_len = 0;
};

/// A copy for one text that has one of its own, of a match of so many tokens.
Copy recall_one(const Memory& memory, uint64_t owner, const Ids& text, int num_wanted,
                int own_match = 0, int max_drafts = 15) {
  const int32_t num_tokens = static_cast<int32_t>(text.size()), slot = 0, wanted = num_wanted;
  Ids drafts(static_cast<size_t>(max_drafts), 77);
  int32_t num_drafts = own_match > 0 ? 2 : 0, match_len = own_match;
  recall_cpu({}, {.memory = memory.view,
                  .history = text.data(),
                  .history_stride = num_tokens,
                  .num_tokens = &num_tokens,
                  .seq = &slot,
                  .owners = &owner,
                  .num_wanted = &wanted,
                  .num_seqs = 1,
                  .max_drafts = max_drafts,
                  .drafts = drafts.data(),
                  .num_drafts = &num_drafts,
                  .match_len = &match_len});
  drafts.resize(static_cast<size_t>(num_drafts));
  return {drafts, match_len};
}

Ids range(int first, int count) {
  Ids ids;
  for (int i = 0; i < count; ++i) ids.push_back(first + i);
  return ids;
}

}  // namespace

TEST(an_answer_is_copied_up_to_its_end) {
  Memory memory(1000);
  memory.remember(1, range(100, 30));
  const Copy copy = recall_one(memory, 1, range(100, 5), 15);
  CHECK_EQ(copy.drafts, range(105, 15));
  CHECK_EQ(copy.match_len, 5);
  CHECK_EQ(recall_one(memory, 1, range(100, 27), 15).drafts, range(127, 3));
  CHECK_EQ(recall_one(memory, 1, range(100, 27), 15).match_len, kMaxMatchLen);
  CHECK_EQ(recall_one(memory, 1, range(100, 27), 2).drafts, range(127, 2));
  CHECK_EQ(recall_one(memory, 1, range(100, 30), 15).match_len, 0);  // there it ends
  CHECK_EQ(recall_one(memory, 1, range(100, 3), 15).match_len, 0);   // too few are alike
  CHECK_EQ(recall_one(memory, 1, range(100, 5), 0).match_len, 0);
}

TEST(the_longest_match_wins_and_the_latest_place) {
  Memory memory(1000);
  Ids old = range(100, 20), later = range(112, 8);
  later.insert(later.end(), {7, 8, 9});
  memory.remember(1, old);
  memory.remember(1, later);
  CHECK_EQ(recall_one(memory, 1, range(112, 8), 3).drafts, (Ids{7, 8, 9}));
  CHECK_EQ(recall_one(memory, 1, range(100, 19), 3).drafts, range(119, 1));  // 16 alike
  // A text's own copy stays unless the match is longer.
  CHECK_EQ(recall_one(memory, 1, range(112, 8), 3, /*own_match=*/8).drafts, (Ids{77, 77}));
  CHECK_EQ(recall_one(memory, 1, range(112, 8), 3, /*own_match=*/7).drafts, (Ids{7, 8, 9}));
}

TEST(another_owners_answers_are_not_seen) {
  Memory memory(1000);
  memory.remember(1, range(100, 30));
  CHECK_EQ(recall_one(memory, 2, range(100, 10), 15).match_len, 0);
  // Also where both have a place of the same hash.
  for (uint32_t& place : memory.places) place = 10;
  CHECK_EQ(recall_one(memory, 2, range(100, 10), 15).match_len, 0);
  CHECK_EQ(recall_one(memory, 1, range(100, 10), 15).drafts, range(110, 15));
}

TEST(the_oldest_answers_go) {
  Rng rng(3);
  Memory memory(200);
  std::vector<Ids> answers;
  int num_found = 0;
  for (int i = 0; i < 400; ++i) {
    Ids answer;
    for (int k = rng.integer(5, 40); k > 0; --k) answer.push_back(rng.integer(0, 9999));
    memory.remember(1, answer);
    answers.push_back(answer);
    // The last answers that fit are found, nearly always; what is found is what was written.
    size_t num_kept = 0, age = 0;
    for (auto it = answers.rbegin(); it != answers.rend() && age < 20; ++it, ++age) {
      num_kept += it->size() + 1;
      const auto length =
          static_cast<std::ptrdiff_t>(rng.integer(4, static_cast<int>(it->size()) - 1));
      const Copy copy = recall_one(memory, 1, Ids(it->begin(), it->begin() + length), 15);
      if (num_kept > 200 + it->size()) CHECK_EQ(copy.match_len, 0);
      if (copy.match_len == 0) continue;
      const auto count = static_cast<std::ptrdiff_t>(copy.drafts.size());
      CHECK(std::equal(copy.drafts.begin(), copy.drafts.end(), it->begin() + length) || count == 0);
    }
    num_found += recall_one(memory, 1, Ids(answer.begin(), answer.begin() + 4), 1).match_len > 0;
  }
  // Others of the same hash take the place of some.
  CHECK_GT(num_found, 280);
}

TEST(an_answer_may_wrap_around) {
  for (uint32_t begin : {uint32_t{0}, uint32_t{180}, uint32_t{199}, uint32_t{4000000000}}) {
    Memory memory(200);
    memory.num_written = begin;
    memory.remember(5, range(300, 60));
    CHECK_EQ(recall_one(memory, 5, range(300, 40), 15).drafts, range(340, 15));
    CHECK_EQ(recall_one(memory, 5, range(300, 18), 15).drafts, range(318, 15));
  }
}
