#include "core/step_times.h"

#include "check_test.h"
#include "core/draft_budget.h"

using namespace openspec;

namespace {

/// Qwen3-30B-A3B on an H200: milliseconds of the experts of all layers, and of all else.
constexpr double kPerExpert = 0.1, kElse = 1.4;

std::vector<StepTable::Point> points_of(const std::vector<int>& sizes, double per_row = 0.0) {
  const ExpertSharing unrelated(128, 8);
  std::vector<StepTable::Point> points;
  for (const int rows : sizes) {
    const double experts = unrelated.expected(1, rows);
    points.push_back({1, rows, kElse + kPerExpert * experts + per_row * rows, experts});
  }
  return points;
}

StepPrices prices_of(const StepTable& table, int num_seqs, const ExpertSharing& sharing) {
  return {table.of(num_seqs), table.of(num_seqs, &StepTable::Point::num_experts),
          table.seconds_per_expert(), num_seqs, sharing};
}

}  // namespace

TEST(unrelated_rows_go_to_the_experts_that_chance_gives) {
  const ExpertSharing sharing(128, 8);
  CHECK_NEAR(sharing.expected(1, 1), 8.0, 1e-9);
  CHECK_NEAR(sharing.expected(1, 2), 15.5, 1e-9);
  CHECK_NEAR(sharing.expected(4, 4), 29.1, 0.1);
  CHECK_NEAR(sharing.expected(16, 16), 82.4, 0.1);
  CHECK_NEAR(sharing.expected(64, 256), 128.0, 0.1);
}

TEST(what_rows_have_in_common_is_learned) {
  ExpertSharing sharing(128, 8);
  const ExpertSharing unrelated(128, 8);
  for (int i = 0; i < 300; ++i) {
    // Rows of four sequences count as 1 + 0.8 * 3, each of two drafts as 0.3 more.
    sharing.observe(4, 4, unrelated.expected(1, 3.4));
    sharing.observe(4, 6, unrelated.expected(1, 3.4 + 0.6));
    sharing.observe(64, 256, 127.9);  // which says nothing
    sharing.observe(1, 1, 8.0);
  }
  CHECK_NEAR(sharing.of_sequences(), 0.8, 0.01);
  CHECK_NEAR(sharing.of_drafts(), 0.3, 0.01);
  CHECK_NEAR(sharing.expected(2, 4), unrelated.expected(1, 1.0 + 0.8 + 0.6), 0.1);
}

TEST(what_an_expert_takes_is_told_apart_from_what_a_row_does) {
  const StepTable table(points_of({1, 2, 4, 8, 16, 32, 64}), 0);
  CHECK_NEAR(table.seconds_per_expert(), kPerExpert, 1e-6);
  const StepTable dearer(points_of({1, 2, 4, 8, 16, 32, 64}, 0.05), 0);
  CHECK_NEAR(dearer.seconds_per_expert(), kPerExpert, 1e-6);
  // No guess from few points, or without experts.
  CHECK_EQ(StepTable(points_of({1, 2, 4}), 0).seconds_per_expert(), 0.0);
  CHECK_EQ(StepTable({{1, 1, 1.0}, {1, 2, 2.0}, {1, 4, 3.0}, {1, 8, 4.0}}, 0).seconds_per_expert(),
           0.0);
  // Nor one below zero.
  std::vector<StepTable::Point> falling = points_of({1, 2, 4, 8, 16});
  for (StepTable::Point& point : falling) point.seconds = 100.0 - point.num_experts;
  CHECK_EQ(StepTable(falling, 0).seconds_per_expert(), 0.0);
}

TEST(a_draft_costs_the_experts_that_it_brings) {
  const StepTable table(points_of({1, 2, 4, 8, 16, 32, 64, 128, 256}), 0);
  ExpertSharing unrelated(128, 8), alike(128, 8);
  for (int i = 0; i < 300; ++i) alike.observe(1, 3, unrelated.expected(1, 1.4));
  CHECK_NEAR(prices_of(table, 1, unrelated).seconds(2), table.of(1).seconds(2), 1e-6);
  CHECK_NEAR(prices_of(table, 1, alike).seconds(2), kElse + kPerExpert * 9.57, 0.02);
  // Of one request a draft takes a third of a step: an even chance does not pay, where drafts go to
  // the same experts it does.
  const std::vector<DraftOffer> one{{3, 0.3}};
  CHECK_EQ(spend_row_budget(one, 1, 1, 256, prices_of(table, 1, unrelated), 0.0).num_drafts, 0);
  CHECK_GT(spend_row_budget(one, 1, 1, 256, prices_of(table, 1, alike), 0.0).num_drafts, 0);
  // Of 64 requests all experts are read anyway.
  const std::vector<DraftOffer> many(64, {3, 0.3});
  const StepPrices busy = prices_of(table, 64, unrelated);
  CHECK_EQ(spend_row_budget(many, 64, 64, 256, busy, 0.0).num_drafts, 3 * 64);
}

TEST(padding_goes_to_no_expert) {
  // Five rows run as eight, of which three read nothing.
  const StepTable table(points_of({1, 2, 4, 8, 16}), /*most_sized_rows=*/16);
  const ExpertSharing unrelated(128, 8);
  const StepPrices prices = prices_of(table, 1, unrelated);
  CHECK_NEAR(prices.seconds(5), kElse + kPerExpert * unrelated.expected(1, 5), 1e-6);
  CHECK_NEAR(prices.seconds(8), table.of(1).seconds(8), 1e-6);
}
