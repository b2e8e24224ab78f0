#include "runtime/device/graph_book.h"

#include <algorithm>
#include <random>

#include "check_test.h"

using namespace openspec;

namespace {

// Drafters as the book sees them.
const GraphBook::Limits kPlain{.works_on_arrays = true};
const GraphBook::Limits kLookup{.max_draft_tokens = 4, .draft_room = 4, .works_on_arrays = true};
const GraphBook::Limits kOnHost{.max_draft_tokens = 4, .draft_room = 4};
const GraphBook::Limits kChain{
    .max_draft_tokens = 3, .draft_room = 3, .works_on_arrays = true, .is_costly = true};
const GraphBook::Limits kTree{.max_draft_tokens = 15,
                              .draft_room = 15,
                              .works_on_arrays = true,
                              .makes_trees = true,
                              .is_costly = true};

const GraphBook::Limits kHybrid{
    .max_draft_tokens = 4, .draft_room = 4, .takes_trees = false, .parts_spans = true};

GraphBook book_of(GraphBook::Limits limits, int max_num_seqs, int max_rows) {
  limits.max_num_seqs = max_num_seqs;
  limits.max_num_batched_tokens = limits.max_num_logits_rows = max_rows;
  return GraphBook(limits);
}

bool has_room(const StepShape& shape, const StepShape& least) {
  const bool serves_lengths = shape.is_general || !least.is_general;
  const bool serves_spans = shape.has_long_spans || !least.has_long_spans;
  return shape.num_rows >= least.num_rows && shape.num_spans >= least.num_spans &&
         shape.proposes == least.proposes && shape.has_trees == least.has_trees &&
         shape.keeps_rows == least.keeps_rows && serves_lengths && serves_spans;
}

// Any step that the limits allow.
StepShape random_step(const GraphBook::Limits& limits, std::mt19937& random) {
  const auto integer = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  StepShape step;
  step.num_spans = integer(1, limits.max_num_seqs);
  step.proposes = limits.proposes_on_device() && (!limits.is_costly || integer(0, 1) == 1);
  const int least_rows = step.num_spans * (step.proposes && limits.is_costly ? 2 : 1);
  step.num_rows = least_rows + integer(0, 1) * integer(0, 300);
  step.has_trees = step.proposes && limits.makes_trees;
  if (limits.max_draft_tokens > 0 && !limits.works_on_arrays && limits.takes_trees) {
    step.has_trees = integer(0, 1) == 1;
  }
  step.is_general = integer(0, 1) == 1;
  step.keeps_rows = !step.proposes && limits.is_costly && integer(0, 1) == 1;
  step.has_long_spans = integer(0, 1) == 1;
  return step;
}

}  // namespace

TEST(a_step_takes_the_smallest_graph_that_has_room) {
  std::mt19937 random(5);
  int num_found = 0, num_larger = 0;
  for (GraphBook::Limits limits : {kPlain, kLookup, kOnHost, kChain, kTree, kHybrid}) {
    for (const int max_num_seqs : {1, 2, 7, 64, 256}) {
      limits.max_num_seqs = max_num_seqs;
      limits.max_num_batched_tokens = max_num_seqs == 7 ? 40 : 2048;
      limits.max_num_logits_rows = 256;
      const GraphBook book(limits);
      const int most_rows = std::min(256, max_num_seqs == 7 ? 32 : 2048);
      for (int round = 0; round < 2000; ++round) {
        const StepShape step = random_step(limits, random);
        const StepShape* best = nullptr;
        for (const StepShape& shape : book.shapes()) {
          if (has_room(shape, step) && (best == nullptr || shape < *best)) best = &shape;
        }
        // Whatever has rows enough has all else.
        CHECK_EQ(best != nullptr, step.num_rows <= most_rows);
        CHECK(book.find(step) == best);
        const StepShape chosen = book.choose(step);
        if (best != nullptr) {
          CHECK(chosen == *best && book.shapes().contains(chosen));
          ++num_found;
        } else {
          StepShape as_it_is = step;
          as_it_is.is_general = true;
          CHECK(chosen == as_it_is && !book.shapes().contains(chosen));
          ++num_larger;
        }
      }
    }
  }
  CHECK_GT(num_found, 10000);
  CHECK_GT(num_larger, 1000);
}

TEST(graphs_have_the_documented_numbers_of_rows) {
  for (const GraphBook::Limits& limits : {kPlain, kLookup, kOnHost, kChain, kTree}) {
    std::set<int> rows;
    const GraphBook book = book_of(limits, 64, 2048);
    for (const StepShape& shape : book.shapes()) {
      rows.insert(shape.num_rows);
      CHECK(shape.num_spans >= 1 && shape.num_spans <= std::min(64, shape.num_rows));
    }
    CHECK(rows == (std::set<int>{1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256}));
  }
}

TEST(the_graphs_of_a_small_engine) {
  using Shapes = std::set<StepShape>;
  CHECK(book_of(kPlain, 2, 4).shapes() == (Shapes{{1, 1}, {2, 2}, {4, 2}}));
  CHECK(book_of(kLookup, 2, 4).shapes() == (Shapes{{1, 1, true}, {2, 2, true}, {4, 2, true}}));
  CHECK(book_of(kOnHost, 2, 2).shapes() ==
        (Shapes{{1, 1}, {1, 1, false, true}, {2, 2}, {2, 2, false, true}}));
  // With and without the drafter; without, it learns now or later.
  const StepShape later{.num_rows = 1, .num_spans = 1, .keeps_rows = true};
  CHECK(book_of(kChain, 1, 1).shapes() == (Shapes{{1, 1}, later}));
  CHECK_EQ(book_of(kChain, 1, 2).shapes().size(), 5u);
  CHECK(book_of(kTree, 1, 2).shapes().contains({2, 1, true, true}));
  // Of few short sequences, and of one.
  StepShape few{8, 4, true};
  few.is_general = false;
  CHECK(book_of(kLookup, 64, 8).shapes().contains(few));
  few.num_spans = 1;
  CHECK(book_of(kLookup, 64, 8).shapes().contains(few));
  CHECK_EQ(book_of(kLookup, 64, 8).shapes().size(), 6u);
  // Of more, where so many are attended to at once.
  GraphBook::Limits limits = kPlain;
  limits.most_short_spans = 11;
  const GraphBook book = book_of(limits, 64, 32);
  const auto room_of = [&](int num_rows) {
    return book.find({.num_rows = num_rows, .num_spans = num_rows, .is_general = false});
  };
  CHECK(!room_of(8)->is_general && room_of(8)->num_spans == 8);
  CHECK(!room_of(11)->is_general && room_of(11)->num_spans == 11);
  CHECK(room_of(12)->is_general && room_of(24)->is_general);
}

TEST(every_graph_is_timed_and_nothing_twice) {
  for (const GraphBook::Limits& limits : {kPlain, kLookup, kOnHost, kChain, kTree}) {
    const GraphBook book = book_of(limits, 64, 1024);
    const std::vector<StepKind> kinds = book.step_kinds();
    for (size_t i = 0; i < kinds.size(); ++i) {
      CHECK(kinds[i].num_seqs >= 1 && kinds[i].num_rows >= kinds[i].num_seqs);
      for (size_t j = 0; j < i; ++j) CHECK(!(kinds[i] == kinds[j]));
      if (i > 0) CHECK(kinds[i].num_rows >= kinds[i - 1].num_rows);
    }
    for (const StepShape& shape : book.shapes()) {
      const StepKind wanted{shape.num_spans, shape.num_rows, shape.proposes && limits.is_costly};
      CHECK_EQ(std::count(kinds.begin(), kinds.end(), wanted), 1);
    }
    CHECK_EQ(kinds.back().num_rows, 1024);
  }
}

TEST(larger_steps_reach_the_most_rows) {
  const auto sizes = [](const GraphBook& book) {
    std::vector<int> rows;
    for (const StepShape& shape : book.larger_shapes()) {
      CHECK(!book.shapes().contains(shape));
      CHECK_LT(2 * shape.num_spans, shape.num_rows + 1);
      if (!shape.proposes) rows.push_back(shape.num_rows);
    }
    return rows;
  };
  CHECK_EQ(sizes(book_of(kPlain, 16, 2000)), (std::vector<int>{512, 1024, 2000}));
  CHECK_EQ(sizes(book_of(kTree, 16, 300)), (std::vector<int>{300}));
  CHECK_EQ(sizes(book_of(kChain, 400, 512)), (std::vector<int>{512}));
  CHECK(sizes(book_of(kChain, 16, 256)).empty());
  CHECK_EQ(book_of(kTree, 16, 300).larger_shapes().size(), 2);
}
