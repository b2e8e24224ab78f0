#include "core/draft_budget.h"

#include <array>
#include <cmath>
#include <random>

#include "check_test.h"

using namespace openspec;

TEST(acceptance_is_a_ratio_that_does_not_drift_with_the_number_of_drafts) {
  for (int num_drafted : {1, 4, 16}) {
    std::mt19937 random(7);
    std::bernoulli_distribution is_accepted(0.8);
    AcceptanceEstimate estimate;
    double sum = 0.0;
    constexpr int kRounds = 4000;
    for (int i = 0; i < kRounds; ++i) {
      int num_accepted = 0;
      while (num_accepted < num_drafted && is_accepted(random)) ++num_accepted;
      estimate.observe(num_drafted, num_accepted);
      sum += estimate.ratio();
    }
    // The smoothed ratio wobbles, weighted by run length; its mean sits near the truth.
    CHECK_NEAR(sum / kRounds, 0.8, 0.03);
  }
}

TEST(estimate_falls_and_recovers) {
  AcceptanceEstimate estimate;
  for (int i = 0; i < 30; ++i) estimate.observe(1, 0);
  CHECK_LT(estimate.ratio(), 0.05);
  for (int i = 0; i < 30; ++i) estimate.observe(1, 1);
  CHECK_GT(estimate.ratio(), 0.9);
}

TEST(a_sequence_that_does_not_draft_becomes_like_the_others) {
  const AcceptanceEstimate all(0.7);
  AcceptanceEstimate unlucky = AcceptanceEstimate::among(all), hopeless = unlucky, good = unlucky;
  for (int i = 0; i < 10; ++i) unlucky.observe(8, 0);
  for (int i = 0; i < 50; ++i) hopeless.observe(8, 0);
  for (int i = 0; i < 50; ++i) good.observe(8, 8);
  const auto steps_to = [](AcceptanceEstimate estimate, double ratio) {
    int num_steps = 0;
    for (; estimate.ratio() < ratio && num_steps < 1000; ++num_steps) estimate.rest();
    return num_steps;
  };
  // With a third of its drafts accepted a tree of eight levels is about to pay.
  CHECK_LT(unlucky.ratio(), 0.33);
  CHECK_GT(steps_to(unlucky, 0.33), 4);
  CHECK_LT(steps_to(unlucky, 0.33), 20);
  CHECK_GT(steps_to(hopeless, 0.33), 20);
  CHECK_LT(steps_to(hopeless, 0.33), 50);
  // It ends at what the others show; what was better stays so.
  const double before = good.ratio();
  for (AcceptanceEstimate* estimate : {&unlucky, &hopeless, &good}) {
    for (int i = 0; i < 1000; ++i) estimate->rest();
  }
  CHECK_NEAR(unlucky.ratio(), 0.7, 1e-3);
  CHECK_NEAR(hopeless.ratio(), 0.7, 1e-3);
  CHECK_EQ(good.ratio(), before);
  // What was seen keeps its weight: a failure says as much as it did before.
  hopeless.observe(8, 0);
  CHECK_NEAR(hopeless.ratio(), 0.7 * (0.9 * 10 + 5) / (0.9 * 10 + 1 + 5), 0.01);
}

TEST(sequences_differ_from_what_all_show_and_a_few_steps_say_little) {
  AcceptanceEstimate all = AcceptanceEstimate::of_all();
  for (int i = 0; i < 200; ++i) all.observe(4, i % 2 == 0 ? 4 : 1);
  CHECK_NEAR(all.ratio(), 5.0 / 6.0, 0.02);
  AcceptanceEstimate unlucky = AcceptanceEstimate::among(all), bad = unlucky, good = unlucky;
  CHECK_EQ(unlucky.ratio(), all.ratio());
  for (int i = 0; i < 4; ++i) unlucky.observe(4, 0);
  for (int i = 0; i < 40; ++i) {
    bad.observe(4, 0);
    good.observe(4, 4);
  }
  CHECK_GT(unlucky.ratio(), 0.4);
  CHECK_LT(bad.ratio(), 0.3);
  CHECK_GT(good.ratio(), 0.95);
  // All change by little with each step of one, and a sequence with them.
  const double before = all.ratio(), of_bad = bad.ratio();
  for (int i = 0; i < 10; ++i) all.observe(4, 0);
  CHECK_GT(all.ratio(), before - 0.1);
  CHECK_LT(bad.ratio(), of_bad);
}

TEST(a_bad_start_closes_the_gate_for_some_tens_of_steps_only) {
  // What a tree of 15 takes of one sequence on an H200, in milliseconds.
  const StepTimes plain({{1, 2.18}}), proposing({{2, 2.95}, {16, 3.2}});
  const auto share_drafted = [&](int num_bad, int first, int num_steps) {
    AcceptanceEstimate all = AcceptanceEstimate::of_all();
    for (int i = 0; i < 100; ++i) all.observe(8, 6);
    AcceptanceEstimate sequence = AcceptanceEstimate::among(all);
    DraftGate gate;
    int num_drafted = 0, num_counted = 0;
    for (int i = 0; i < num_steps; ++i) {
      const DraftOffer tree{.num_drafts = 15, .ratio = sequence.ratio(), .num_depths = 8};
      const RowBudget with = spend_row_budget(std::vector{tree}, 1, 1, 64, proposing, 0.0);
      if (gate.opens(with.tokens_per_second, 1.0 / plain.seconds(1))) {
        const int num_accepted = num_drafted++ < num_bad ? 0 : 5;
        num_counted += i >= first;
        sequence.observe(8, num_accepted);
        all.observe(8, num_accepted);
      } else {
        sequence.rest();
        all.rest();
      }
    }
    return static_cast<double>(num_counted) / (num_steps - first);
  };
  CHECK_GT(share_drafted(/*num_bad=*/5, 0, 200), 0.75);
  // A step with drafts takes half as long again: where none succeeds, two percent are lost, and
  // until what all showed before is forgotten some tens of steps.
  CHECK_LT(share_drafted(/*num_bad=*/5000, 0, 1000), 0.15);
  CHECK_LT(share_drafted(/*num_bad=*/5000, 1000, 5000), 0.05);
}

TEST(luck_alone_rests_no_sequence_for_long) {
  // One request; of four drafts each is right as often as others are, and their step takes half as
  // long again. Drafts at every step are 1.5 times as fast as none.
  const StepTimes plain({{1, 1.0}}), proposing({{2, 1.45}, {5, 1.48}});
  std::mt19937 random(3);
  std::bernoulli_distribution is_right(0.6);
  AcceptanceEstimate all = AcceptanceEstimate::of_all();
  DraftGate gate;
  StepYield yield;
  double seconds = 0.0, tokens = 0.0;
  for (int i = 0; i < 64; ++i) {
    AcceptanceEstimate sequence = AcceptanceEstimate::among(all);
    for (int length = 0; length < 150;) {
      const std::vector<DraftOffer> offers{{4, sequence.ratio()}};
      const RowBudget with = spend_row_budget(offers, 1, 1, 8, proposing, 0.0, yield);
      int num_right = 0;
      while (num_right < 4 && is_right(random)) ++num_right;
      const bool opens = with.num_drafts > 0 && gate.opens(with.tokens_per_second, 1.0);
      const int made = opens ? std::min(num_right, with.num_drafts) + 1 : 1;
      if (opens) {
        const int num_judged = std::min(4, with.num_drafts + 1);
        sequence.observe(num_judged, std::min(num_right, num_judged));
        all.observe(num_judged, std::min(num_right, num_judged));
        yield.observe(1, with.num_drafts, with.tokens, with.seconds, made, with.seconds);
      } else {
        sequence.rest();
        all.rest();
      }
      seconds += opens ? with.seconds : 1.0;
      tokens += made;
      length += made;
    }
  }
  CHECK_GT(tokens / seconds, 1.42);
}

TEST(step_times_interpolate_and_never_fall) {
  const StepTimes times({{1, 1.0}, {4, 0.9}, {8, 2.0}});
  CHECK_NEAR(times.seconds(1), 1.0, 1e-12);
  CHECK_NEAR(times.seconds(4), 1.0, 1e-12);
  CHECK_NEAR(times.seconds(6), 1.5, 1e-12);
  CHECK_NEAR(times.seconds(12), 3.0, 1e-12);
}

TEST(rows_past_the_measured_ones_are_not_free) {
  // A step reads the weights whatever it has of a few rows. Two points of these say nothing of
  // eight sequences, where a row takes a tenth of their step: by the slope drafts would be free.
  const StepTimes times({{1, 15.4}, {5, 17.2}});
  CHECK_NEAR(times.seconds(8), 17.2 * 8 / 5, 1e-9);
  CHECK_NEAR(times.seconds(16), 17.2 * 16 / 5, 1e-9);
  const std::vector<DraftOffer> doubtful(8, {4, 0.65}), one{{4, 0.65}};
  CHECK_EQ(spend_row_budget(doubtful, 8, 8, 64, times, 0.0).num_drafts, 0);
  CHECK_EQ(spend_row_budget(one, 1, 1, 64, times, 0.0).num_drafts, 4);
  // Measured, as on the machine of these figures, they are as dear. Of four sequences one more row
  // is nearly free.
  const StepTimes whole({{1, 15.4}, {5, 17.2}, {8, 25.6}, {16, 50.3}, {40, 119.8}});
  CHECK_EQ(spend_row_budget(doubtful, 8, 8, 64, whole, 4.0).num_drafts, 0);
  CHECK_EQ(spend_row_budget(std::span(doubtful).first(4), 4, 4, 64, whole, 0.0).num_drafts, 1);
}

TEST(flat_cost_verifies_everything) {
  const StepTimes times({{1, 1.0}, {64, 1.0}});
  const std::vector<DraftOffer> offers{{4, 0.5}, {2, 0.1}};
  CHECK_EQ(spend_row_budget(offers, 2, 2, 64, times, 0.0).counts, (std::vector<int>{4, 2}));
}

TEST(drafts_that_promise_next_to_nothing_are_not_taken) {
  // Half a token more than eight, in a step that takes 5 % longer, or 2.5 %.
  const std::vector<DraftOffer> offers{{1, 0.5}};
  const StepTimes even({{8, 8.0}, {9, 8.42}}), cheap({{8, 8.0}, {9, 8.2}});
  CHECK_EQ(spend_row_budget(offers, 8, 8, 64, even, 0.0).num_drafts, 0);
  CHECK_EQ(spend_row_budget(offers, 8, 8, 64, cheap, 0.0).num_drafts, 1);
  // What counts is the whole: of many sequences each draft promises little.
  const std::vector<DraftOffer> many(100, {1, 0.5});
  const StepTimes flat({{100, 1.0}, {200, 1.1}});
  CHECK_EQ(spend_row_budget(many, 100, 100, 200, flat, 0.0).num_drafts, 100);
}

TEST(a_drafts_token_is_worth_less_than_a_whole_one) {
  // 0.9 of a token more than eight, in a step that takes 9 % longer, or 5 %.
  const std::vector<DraftOffer> offers{{1, 0.9}};
  const StepTimes dear({{8, 8.0}, {9, 8.72}}), cheap({{8, 8.0}, {9, 8.4}});
  CHECK_EQ(spend_row_budget(offers, 8, 8, 64, dear, 0.0).num_drafts, 0);
  const RowBudget budget = spend_row_budget(offers, 8, 8, 64, cheap, 0.0);
  CHECK_EQ(budget.num_drafts, 1);
  CHECK_NEAR(budget.tokens, 8.9, 1e-9);
  CHECK_NEAR(budget.tokens_per_second, 8.9 / 8.4, 1e-9);
}

TEST(linear_cost_verifies_nothing) {
  const StepTimes times({{1, 1.0}, {64, 64.0}});
  const std::vector<DraftOffer> offers{{4, 0.9}};
  CHECK_EQ(spend_row_budget(offers, 1, 1, 64, times, 0.0).counts, (std::vector<int>{0}));
}

TEST(drafts_beside_a_prompt_pay_for_their_own_time) {
  // A row takes a second: no draft is worth that. Beside a prompt of 99 rows, whose time was its
  // own, two drafts would seem to bring 1.75 tokens in 102 seconds instead of 1 in 100.
  const StepTimes times({{1, 1.0}, {200, 200.0}});
  const std::vector<DraftOffer> offers{{2, 0.5}};
  CHECK_EQ(spend_row_budget(offers, 100, 1, 200, times, 0.0).counts, (std::vector<int>{2}));
  CHECK_EQ(spend_row_budget(offers, 100, 1, 200, times, -99.0).counts, (std::vector<int>{0}));
  // Where rows beside it cost nothing they all are.
  const StepTimes flat({{1, 1.0}, {99, 100.0}, {200, 100.0}});
  CHECK_EQ(spend_row_budget(offers, 100, 1, 200, flat, -99.0).counts, (std::vector<int>{2}));
}

TEST(host_time_per_step_makes_drafts_pay) {
  const StepTimes times({{1, 1.0}, {64, 64.0}});
  const std::vector<DraftOffer> offers{{2, 0.95}};
  CHECK_EQ(spend_row_budget(offers, 1, 1, 64, times, 10.0).counts, (std::vector<int>{2}));
}

TEST(rows_go_to_the_drafts_most_likely_to_survive) {
  // Room for three more rows.
  const StepTimes times({{1, 1.0}, {64, 1.0}});
  const std::vector<DraftOffer> offers{{4, 0.9}, {4, 0.5}};
  CHECK_EQ(spend_row_budget(offers, 2, 2, 5, times, 0.0).counts, (std::vector<int>{3, 0}));
}

TEST(budget_looks_across_a_step_in_the_cost) {
  // The second row is dear, the next six are free.
  const StepTimes times({{1, 1.0}, {2, 1.9}, {8, 1.9}});
  const std::vector<DraftOffer> offers{{7, 0.9}};
  CHECK_EQ(spend_row_budget(offers, 1, 1, 64, times, 0.0).counts, (std::vector<int>{7}));
}

TEST(known_survivals_take_the_place_of_the_ratio) {
  const StepTimes times({{1, 1.0}, {64, 1.0}});
  const std::vector<float> likely = {-0.1f, -0.2f, -3.0f}, unlikely = {-0.15f, -4.0f, -5.0f};
  const std::vector<DraftOffer> offers{{.num_drafts = 3, .ratio = 0.1, .scores = likely},
                                       {.num_drafts = 3, .ratio = 0.9, .scores = unlikely}};
  CHECK_EQ(spend_row_budget(offers, 2, 2, 5, times, 0.0).counts, (std::vector<int>{2, 1}));
}

TEST(a_tree_promises_what_its_depths_do) {
  // Twelve drafts of three depths: 0.5 + 0.25 + 0.125 tokens in expectation.
  const StepTimes times({{1, 1.0}, {64, 1.0}});
  const DraftOffer tree{.num_drafts = 12, .ratio = 0.5, .num_depths = 3};
  const RowBudget budget = spend_row_budget(std::vector{tree}, 1, 1, 64, times, 0.0);
  CHECK_EQ(budget.counts, (std::vector<int>{12}));
  CHECK_NEAR(budget.tokens_per_second, 1.875, 1e-9);
  const DraftOffer limited{.num_drafts = 2, .ratio = 0.5, .num_depths = 3};
  CHECK_NEAR(spend_row_budget(std::vector{limited}, 1, 1, 64, times, 0.0).tokens_per_second, 1.75,
             1e-9);
}

TEST(a_trees_first_drafts_bring_most_of_what_it_does) {
  // 0.8 + ... + 0.8^5 = 2.69 tokens by 15 drafts: the first brings 0.72, all alike would bring
  // 0.18.
  const DraftOffer tree{.num_drafts = 15, .ratio = 0.8, .num_depths = 5};
  const DraftOffer chain{.num_drafts = 15, .ratio = 0.7};
  const StepTimes flat({{1, 1.0}, {3, 1.0}});
  CHECK_NEAR(spend_row_budget(std::vector{tree}, 1, 1, 2, flat, 0.0).tokens, 1.72, 1e-9);
  // Only such drafts are worth a row each that takes a third of a step.
  const StepTimes dear({{1, 1.0}, {64, 22.0}});
  const int num_drafts = spend_row_budget(std::vector{tree}, 1, 1, 64, dear, 0.0).num_drafts;
  CHECK(num_drafts >= 1 && num_drafts <= 4);
  CHECK_EQ(spend_row_budget(std::vector{chain, tree}, 2, 2, 3, flat, 0.0).counts,
           (std::vector<int>{0, 1}));
}

TEST(drafts_make_no_step_larger_than_what_was_measured) {
  const StepTimes times({{1, 1.0}, {8, 1.0}});
  const std::vector<DraftOffer> offers{{16, 0.9}};
  CHECK_EQ(spend_row_budget(offers, 1, 1, 64, times, 0.0).num_drafts, 7);
  // A step that is larger anyway, such as one with a prompt: they take what its rows do.
  const std::vector<DraftOffer> likely{{1, 0.3}}, unlikely{{1, 0.04}};
  CHECK_EQ(spend_row_budget(likely, 20, 1, 64, times, -1.5).num_drafts, 1);
  CHECK_EQ(spend_row_budget(unlikely, 20, 1, 64, times, -1.5).num_drafts, 0);
}

TEST(a_step_table_knows_steps_by_sequences_and_rows) {
  const std::vector<StepTable::Point> points = {{1, 1, 1.0}, {1, 4, 2.0}, {4, 4, 3.0},
                                                {4, 8, 4.0}, {2, 4, 2.5}, {8, 8, 5.0}};
  // In sizes: what has room for the sequences and the rows.
  const StepTable sizes(points, /*most_sized_rows=*/8);
  CHECK_NEAR(sizes.of(1).seconds(1), 1.0, 1e-12);
  CHECK_NEAR(sizes.of(1).seconds(3), 2.0, 1e-12);
  CHECK_NEAR(sizes.of(2).seconds(2), 2.5, 1e-12);
  CHECK_NEAR(sizes.of(3).seconds(5), 4.0, 1e-12);
  CHECK_NEAR(sizes.of(5).seconds(8), 5.0, 1e-12);
  CHECK(sizes.of(9).empty());
  // Up to a number of rows.
  const StepTable some({{1, 1, 1.0}, {4, 4, 2.0}, {4, 8, 4.0}}, /*most_sized_rows=*/4);
  CHECK_NEAR(some.of(1).seconds(2), 2.0, 1e-12);
  CHECK_NEAR(some.of(1).seconds(6), 3.0, 1e-12);
  // Else the next smaller number of sequences, and a line between its points.
  const StepTable lines(points, /*most_sized_rows=*/0);
  CHECK_NEAR(lines.of(1).seconds(2.5), 1.5, 1e-12);
  CHECK_NEAR(lines.of(3).seconds(4), 2.5, 1e-12);
  CHECK_NEAR(lines.of(7).seconds(6), 3.5, 1e-12);
  CHECK_NEAR(lines.of(100).seconds(8), 5.0, 1e-12);
  CHECK(StepTable().of(1).empty());
}

TEST(what_a_drafter_adds_does_not_hang_on_the_rows) {
  const StepTable plain({{1, 1, 1.0}, {1, 4, 1.3}, {1, 16, 4.0}}, /*most_sized_rows=*/0);
  // For one sequence it takes half a second, for four 0.7 s.
  const std::vector<StepTable::Point> timed = {{1, 1, 1.5}, {4, 4, 2.0}};
  const StepTable proposing(plain.with_drafter(timed), /*most_sized_rows=*/0);
  for (const double rows : {1.0, 2.5, 4.0, 10.0}) {
    CHECK_NEAR(proposing.of(1).seconds(rows), plain.of(1).seconds(rows) + 0.5, 1e-12);
  }
  for (const double rows : {4.0, 10.0, 16.0}) {
    CHECK_NEAR(proposing.of(5).seconds(rows), plain.of(5).seconds(rows) + 0.7, 1e-12);
  }
  // A reading that is faster than the step without is noise.
  const std::vector<StepTable::Point> noisy = {{1, 1, 0.9}};
  CHECK_NEAR(StepTable(plain.with_drafter(noisy), 0).of(1).seconds(4), 1.3, 1e-12);
  CHECK(plain.with_drafter({}).empty());
}

TEST(steps_that_take_longer_than_expected_are_no_longer_taken) {
  // Drafts look free, and take twice as long as a step without.
  const StepTimes times({{1, 1.0}, {64, 1.0}});
  const std::vector<DraftOffer> offers{{4, 0.3}};
  StepYield yield;
  CHECK_EQ(spend_row_budget(offers, 1, 1, 64, times, 0.0, yield).num_drafts, 4);
  for (int i = 0; i < 20; ++i) {
    for (int num_drafts = 1; num_drafts <= 4; ++num_drafts) {
      yield.observe(1, num_drafts, 1.4, 1.0, 1.4, 2.0);
    }
    yield.observe(1, 0, 1.0, 1.0, 1.0, 1.0);
  }
  const RowBudget budget = spend_row_budget(offers, 1, 1, 64, times, 0.0, yield);
  CHECK_EQ(budget.num_drafts, 0);
  CHECK_EQ(budget.counts, (std::vector<int>{0}));
  // Of other numbers of sequences nothing is known, and in time it is forgotten.
  CHECK_NEAR(yield.of(4, 4).seconds, 0.0, 1e-12);
  CHECK_GT(yield.of(1, 4).seconds, 0.9);
  for (int i = 0; i < 2000; ++i) yield.observe(1, 0, 1.0, 1.0, 1.0, 1.0);
  CHECK_LT(yield.of(1, 4).seconds, 0.2);
}

TEST(other_drafts_bring_other_tokens_and_take_as_long) {
  StepYield yield;
  for (int i = 0; i < 20; ++i) yield.observe(1, 4, 3.0, 1.0, 1.0, 2.0);
  CHECK_LT(yield.of(1, 4).tokens, 0.5);
  const double seconds = yield.of(1, 4).seconds;
  CHECK_GT(seconds, 0.9);
  yield.forget_tokens();
  CHECK_EQ(yield.of(1, 4).tokens, 1.0);
  CHECK_EQ(yield.of(1, 4).seconds, seconds);
}

TEST(what_holds_up_every_step_says_nothing_against_drafts) {
  // Long contexts: a second more for any step, of which only those with drafts were seen.
  const StepTimes times({{1, 1.0}, {2, 1.2}, {64, 64.0}});
  const std::vector<DraftOffer> offers{{1, 0.5}};
  StepYield yield;
  for (int i = 0; i < 300; ++i) yield.observe(1, 1, 1.5, 1.2, 1.5, 2.2);
  CHECK_NEAR(yield.of(1, 0).seconds, 1.0, 1e-3);
  const RowBudget budget = spend_row_budget(offers, 1, 1, 64, times, 0.0, yield);
  CHECK_EQ(budget.num_drafts, 1);
  CHECK_NEAR(budget.tokens_per_second, 1.5 / 2.2, 1e-3);
  CHECK_NEAR(budget.seconds, 1.2, 1e-12);
}

TEST(steps_without_drafts_are_what_they_were_seen_to_be) {
  // Only steps with drafts are late. Nothing says so until others are seen.
  StepYield yield;
  for (int i = 0; i < 300; ++i) yield.observe(32, 96, 80.0, 1.5, 80.0, 2.5);
  CHECK(yield.is_known(32, 96) && !yield.is_known(32, 0));
  CHECK_NEAR(yield.of(32, 0).seconds, 1.0, 1e-3);
  yield.observe(32, 0, 32.0, 1.0, 32.0, 1.01);
  CHECK(yield.is_known(32, 0));
  CHECK_NEAR(yield.of(32, 0).seconds, 0.01, 1e-6);
  // And nothing takes that back but such steps.
  for (int i = 0; i < 2000; ++i) yield.observe(32, 96, 80.0, 1.5, 80.0, 2.5);
  CHECK_NEAR(yield.of(32, 0).seconds, 0.01, 1e-6);
  // One that is what was thought, by little, is one among others.
  StepYield other;
  for (int i = 0; i < 300; ++i) other.observe(32, 96, 80.0, 1.5, 80.0, 1.5);
  other.observe(32, 0, 32.0, 1.0, 32.0, 1.09);
  CHECK_NEAR(other.of(32, 0).seconds, 0.03, 0.01);
}

TEST(the_pace_of_the_machine_says_nothing_about_what_was_not_seen_since) {
  // Steps with drafts take half as long again as expected, others what is expected, until the
  // machine's pace changes. Without it in the account the ratio would be 2.1 and 4.2 in the end.
  for (const double slowness : {0.7, 1.4}) {
    StepYield yield(StepYield::Common::kPace);
    const auto ratio = [&] {
      return (2.0 + yield.of(4, 8).seconds) / (1.0 + yield.of(4, 0).seconds);
    };
    for (int i = 0; i < 500; ++i) {
      yield.observe(4, 8, 4.0, 2.0, 4.0, 3.0);
      yield.observe(4, 0, 4.0, 1.0, 4.0, 1.0);
    }
    CHECK_NEAR(ratio(), 3.0, 0.1);
    for (int i = 0; i < 300; ++i) yield.observe(4, 8, 4.0, 2.0, 4.0, 3.0 * slowness);
    CHECK_NEAR(ratio(), 3.0, 0.5);
  }
  // Nor is what a kind takes too long held against another that was never seen.
  StepYield yield(StepYield::Common::kPace);
  for (int i = 0; i < 300; ++i) yield.observe(4, 8, 4.0, 2.0, 4.0, 3.0);
  CHECK_NEAR(yield.of(4, 0).seconds, 0.0, 1e-12);
}

TEST(drafts_that_bring_less_than_expected_are_no_longer_taken) {
  const StepTimes times({{1, 1.0}, {2, 1.2}, {64, 64.0}});
  const std::vector<DraftOffer> offers{{1, 0.5}};
  StepYield yield;
  for (int i = 0; i < 300; ++i) yield.observe(1, 1, 1.5, 1.2, 1.1, 1.2);
  CHECK_EQ(spend_row_budget(offers, 1, 1, 64, times, 0.0, yield).num_drafts, 0);
  CHECK_NEAR(yield.of(1, 7).tokens, 1.1 / 1.5, 1e-3);
  CHECK_NEAR(yield.of(1, 0).tokens, 1.0, 1e-12);
  // In time they are tried again.
  for (int i = 0; i < 2000; ++i) yield.observe(1, 0, 1.0, 1.0, 1.0, 1.0);
  CHECK_EQ(spend_row_budget(offers, 1, 1, 64, times, 0.0, yield).num_drafts, 1);
}

TEST(a_number_of_drafts_that_met_with_bad_luck_is_taken_again) {
  // Four drafts are all right, but in the first steps, before the estimates knew, they were not.
  const StepTimes times({{1, 1.0}, {4, 1.02}, {5, 1.04}});
  StepYield yield;
  AcceptanceEstimate acceptance;
  int num_whole = 0;
  for (int i = 0; i < 40; ++i) {
    const std::vector<DraftOffer> offers{{4, acceptance.ratio()}};
    const RowBudget budget = spend_row_budget(offers, 1, 1, 5, times, 0.0, yield);
    // A step judges one draft more than it verifies.
    const int num_judged = std::min(4, budget.num_drafts + 1);
    acceptance.observe(num_judged, i < 3 ? 0 : num_judged);
    yield.observe(1, budget.num_drafts, budget.tokens, budget.seconds,
                  i < 3 ? 1 : 1 + budget.num_drafts, budget.seconds);
    num_whole += budget.num_drafts == 4;
  }
  CHECK_GT(num_whole, 30);
}

TEST(the_last_drafts_of_a_block_may_be_worse_than_the_first_let_expect) {
  StepYield yield(StepYield::Common::kDelay, StepYield::Tokens::kByDrafts);
  for (int i = 0; i < 300; ++i) {
    yield.observe(1, 4, 3.0, 1.0, 3.0, 1.0);
    yield.observe(1, 15, 6.0, 1.0, 3.0, 1.0);
  }
  CHECK_NEAR(yield.of(1, 4).tokens, 1.0, 0.01);
  CHECK_NEAR(yield.of(1, 15).tokens, 0.5, 0.01);
  // What was not seen lies between them.
  CHECK_NEAR(yield.of(1, 1).tokens, 0.75, 0.05);
}

TEST(a_correction_is_a_mean_that_one_held_up_step_does_not_spoil) {
  StepYield yield;
  for (int i = 0; i < 200; ++i) yield.observe(2, 3, 4.0, 1.0, i % 2 == 0 ? 6.0 : 2.0, 1.25);
  CHECK_NEAR(yield.of(2, 3).tokens, 1.0, 0.05);
  CHECK_NEAR(yield.of(2, 3).seconds, 0.25, 0.01);
  yield.observe(2, 3, 4.0, 1.0, 4.0, 1000.0);
  CHECK_LT(yield.of(2, 3).seconds, 0.35);
}

TEST(a_gate_tries_the_opposite_now_and_then_ever_more_rarely) {
  const auto steps_to_trial = [](DraftGate& gate, double with, double without,
                                 double duration = 1.0) {
    const bool pays = with > without;
    int num_steps = 0;
    while (gate.opens(with, without, duration) == pays) ++num_steps;
    for (int i = 1; i < 6; ++i) CHECK_EQ(gate.opens(with, without, duration), !pays);
    return num_steps;
  };
  DraftGate closed, open, clear;
  for (const int interval : {16, 32, 64, 128, 256, 512, 512}) {
    CHECK_EQ(steps_to_trial(closed, 1.0, 1.0), interval - 1);
    // Where drafts win there is more to lose.
    CHECK_EQ(steps_to_trial(open, 1.2, 1.0), 4 * interval - 1);
    CHECK_EQ(steps_to_trial(clear, 2.0, 1.0), 16 * interval - 1);
  }
  // Trials that cost ten times as much are as much rarer, from the first on.
  DraftGate costly;
  for (int i = 0; i < 2; ++i) CHECK_EQ(steps_to_trial(costly, 0.5, 1.0, 10.0), 10 * 512 - 1);
  // Where only a guess says that drafts pay, the guess is tried soon, and then as ever.
  DraftGate guess;
  for (const bool is_guess : {true, false}) {
    int num_steps = 0;
    while (guess.opens(1.2, 1.0, 1.0, is_guess)) ++num_steps;
    for (int i = 1; i < 6; ++i) CHECK(!guess.opens(1.2, 1.0, 1.0, is_guess));
    CHECK_EQ(num_steps, is_guess ? 7 : 63);
  }
  // One that stays a guess, as what its trials show is not timed, costs ever less.
  DraftGate unknown;
  int num_plain = 0, num_late = 0;
  for (int i = 0; i < 2600; ++i) {
    const bool is_plain = !unknown.opens(1.2, 1.0, 1.0, /*is_guess=*/true);
    num_plain += is_plain;
    num_late += is_plain && i >= 2000;
  }
  CHECK_LT(num_plain, 100);
  CHECK_LT(num_late, 13);
  // Other numbers of sequences are another matter.
  DraftGates gates;
  CHECK(gates.of(4).opens(2.0, 1.0));
  CHECK(&gates.of(4) == &gates.of(7));
  CHECK(&gates.of(4) != &gates.of(8));
}

TEST(an_offer_that_follows_is_as_likely_as_it_lasts) {
  const StepTimes flat({{1, 1.0}, {16, 1.0}});
  const std::vector<DraftOffer> offers = {
      {.num_drafts = 3, .ratio = 0.9},
      {.num_drafts = 4, .ratio = 0.6, .follows = true},
      {.num_drafts = 2, .ratio = 0.5},
  };
  CHECK_EQ(spend_row_budget(offers, 2, 2, 16, flat, 0.0).counts, (std::vector<int>{3, 4, 2}));
  // 0.9 0.81 0.73, then 0.44 0.26; and 0.5 0.25.
  CHECK_EQ(spend_row_budget(offers, 2, 2, 7, flat, 0.0).counts, (std::vector<int>{3, 1, 1}));
}

TEST(copies_are_known_by_their_match_and_by_what_the_drafter_says) {
  CHECK_EQ(match_class(kMinMatchLen), 0);
  CHECK_EQ(match_class(7), 0);
  CHECK_EQ(match_class(8), 1);
  CHECK_EQ(match_class(kMaxMatchLen), kNumMatchClasses - 1);
  CHECK_EQ(match_class(1000), kNumMatchClasses - 1);
  const std::vector<int32_t> drafts = {5, 6};
  CHECK_EQ(opinion_of(2, drafts.data(), 5), kAgrees);
  CHECK_EQ(opinion_of(2, drafts.data(), 6), kDiffers);
  CHECK_EQ(opinion_of(0, nullptr, 5), kNoOpinion);
  const int few = copy_class(7, kNoOpinion), more = copy_class(8, kNoOpinion),
            most = copy_class(kMaxMatchLen, kNoOpinion);
  CopyEstimate all;
  const double unseen = all.ratio(more), agreed = all.ratio(copy_class(7, kAgrees));
  CHECK_GT(all.ratio(most), unseen);
  CHECK_GT(agreed, all.ratio(copy_class(7, kDiffers)));
  for (int i = 0; i < 50; ++i) all.observe(copy_class(4, kDiffers), 1, 0);
  CHECK_LT(all.ratio(copy_class(7, kDiffers)), 0.05);
  CHECK_LT(all.ratio(few), 0.05);  // where nobody is asked, all count
  CHECK_EQ(all.ratio(more), unseen);
  CHECK_EQ(all.ratio(copy_class(7, kAgrees)), agreed);
  // A sequence begins with what others have shown, and soon goes by its own.
  CopyEstimate own = CopyEstimate::like(all);
  CHECK_NEAR(own.ratio(few), all.ratio(few), 1e-12);
  for (int i = 0; i < 10; ++i) own.observe(few, 5, 5);
  CHECK_GT(own.ratio(few), 0.8);
}

TEST(drafts_are_worth_what_they_bring_beyond_their_rows) {
  const DraftOffer chain{.num_drafts = 3, .ratio = 0.5};
  CHECK_NEAR(worth_of(chain, 0.0), 0.875, 1e-12);
  CHECK_NEAR(worth_of(chain, 0.2), 0.3 + 0.05, 1e-12);
  CHECK_EQ(worth_of(chain, 0.5), 0.0);
  float worth = 0.0f;
  for (int i = 0; i < 3; ++i) worth += worth_of_draft(i, 0.5f, nullptr, 0.2f);
  CHECK_NEAR(worth, 0.35f, 1e-6);
  const float scores[] = {std::log(0.5f), std::log(0.25f), std::log(0.125f)};
  for (int i = 0; i < 3; ++i) {
    CHECK_NEAR(worth_of_draft(i, 0.9f, scores, 0.2f), worth_of_draft(i, 0.5f, nullptr, 0.2f), 1e-6);
  }
  CHECK_EQ(worth_of_draft(0, 0.5f, std::array{NAN}.data(), 0.2f), 0.0f);
}
