#include "runtime/step/draft_planner.h"

#include <cmath>

#include "check_test.h"

using namespace openspec;

namespace {

constexpr int kDrafts = 3, kCopied = 15;

/// What a step of one sequence is planned to be before it is known what there is to copy.
struct Planned {
  bool proposes;
  int num_drafts;
  double tokens;
};

/// `copies`: acceptance after their first token; `availability`: of those that begin rightly.
Planned plan(double head, int max_copied, double copies, AcceptanceEstimate availability) {
  RunnerConfig config;
  config.max_model_len = 64;
  config.max_num_batched_tokens = 256;
  config.max_draft_tokens = kDrafts;
  config.max_copied_drafts = max_copied;
  DrafterNeeds needs;
  needs.is_costly = true;
  SequenceTable table(1, config.max_model_len, config.page_size, kCopied);
  const int slot = table.add(std::vector<int32_t>(9), 9, {}, {});
  table.estimate(slot, kDrafterDrafts) = {AcceptanceEstimate(head), AcceptanceEstimate(1.0)};
  table.estimate(slot, kCopiedDrafts) = {AcceptanceEstimate(copies), availability};
  DraftPlanner planner(config, table, needs, StepYield::Common::kDelay);
  // An H200's, with an EAGLE-3 head beside a model of four billion parameters.
  planner.set_step_times(
      StepTable({{1, 1, 2.93}, {1, 2, 2.93}, {1, 4, 2.97}, {1, 8, 3.00}, {1, 16, 3.17}}, 16),
      StepTable({{1, 2, 3.42}, {1, 4, 3.44}, {1, 8, 3.48}, {1, 16, 3.67}}, 16));
  StepLease lease;
  lease.requests = {{slot, 1, kCopied}};
  lease.is_sampled = {true};
  lease.offers.resize(1);
  const bool proposes = planner.drafter_pays(lease, /*may_be_absent=*/true, 0.0);
  const auto expected = planner.expected_offers(lease, proposes, /*may_be_absent=*/true);
  const RowBudget budget = planner.plan(lease, expected.offers, proposes, 0.0);
  lease.state = StepLease::State::kClosed;
  table.remove(slot);
  return {proposes, budget.num_drafts, budget.tokens};
}

Planned plan_alone(double head) { return plan(head, 0, 0.0, AcceptanceEstimate(0.0)); }

}  // namespace

TEST(steps_that_sample_are_known_by_themselves) {
  RunnerConfig config;
  config.max_model_len = 64;
  config.max_num_batched_tokens = 256;
  config.max_draft_tokens = kDrafts;
  DrafterNeeds needs;
  needs.is_costly = true;
  SequenceTable table(2, config.max_model_len, config.page_size, kDrafts);
  DraftPlanner planner(config, table, needs, StepYield::Common::kDelay);
  planner.set_step_times(StepTable({{1, 1, 3.0}, {1, 4, 3.0}}, 4), StepTable({{1, 4, 3.5}}, 4));
  StepLease lease;
  const auto rate_of = [&](int slot) {
    lease.requests = {{slot, 1, kDrafts}};
    lease.is_sampled = {true};
    const std::vector<DraftOffer> offers = {{.num_drafts = kDrafts, .ratio = 0.8}};
    return planner.plan(lease, offers, /*proposes=*/true, 0.0).tokens_per_second;
  };
  const int greedy = table.add(std::vector<int32_t>(9), 9, {}, {});
  SequenceParams params;
  params.temperature = 1.0f;
  const int sampled = table.add(std::vector<int32_t>(9), 9, params, {});
  const double rate = rate_of(sampled);
  CHECK_NEAR(rate_of(greedy), rate, 1e-12);
  // Steps that sample take twice as long.
  for (int i = 0; i < 40; ++i) {
    rate_of(sampled);
    lease.results.assign(1, {});
    lease.results[0].num_computed = 1;
    lease.results[0].token_ids = {1, 2, 3};
    planner.observe_time(lease, 7.0);
  }
  CHECK_LT(rate_of(sampled), 0.7 * rate);
  CHECK_NEAR(rate_of(greedy), rate, 1e-12);
  lease.state = StepLease::State::kClosed;
  for (const int slot : {greedy, sampled}) table.remove(slot);
}

TEST(where_nothing_is_found_to_copy_steps_are_those_of_the_drafter_alone) {
  AcceptanceEstimate seldom(0.5);
  for (int i = 0; i < 60; ++i) seldom.observe(1, 0);
  for (const double head : {0.05, 0.2, 0.4, 0.6, 0.8, 0.95}) {
    const Planned alone = plan_alone(head);
    for (const double copies : {0.1, 0.5, 0.9}) {
      const Planned beside = plan(head, kCopied, copies, seldom);
      CHECK_EQ(beside.proposes, alone.proposes);
      CHECK_EQ(beside.num_drafts, alone.num_drafts);
      CHECK_NEAR(beside.tokens, alone.tokens, 0.02);
    }
  }
}

TEST(copies_count_where_they_are_likelier_than_the_drafters_drafts) {
  const double head = 0.7, share = 0.3;
  const Planned alone = plan_alone(head);
  const Planned beside = plan(head, kCopied, 0.2, AcceptanceEstimate(share));
  CHECK(beside.proposes && alone.proposes);
  CHECK_EQ(beside.num_drafts, alone.num_drafts);
  CHECK_NEAR(beside.tokens, alone.tokens + share * (1.0 - head), 1e-5);
}

TEST(the_drafter_stands_in_for_a_copy_that_is_absent) {
  const double head = 0.75, copies = 0.9;
  const Planned planned = plan(head, kCopied, copies, AcceptanceEstimate(0.5));
  CHECK(planned.proposes);
  CHECK_EQ(planned.num_drafts, kCopied);
  double tokens = 1.0;
  for (int i = 0; i < kCopied; ++i) {
    tokens += 0.5 * std::pow(copies, i) + (i < kDrafts ? 0.5 * std::pow(head, i + 1) : 0.0);
  }
  CHECK_NEAR(planned.tokens, tokens, 1e-5);
}

TEST(steps_go_without_a_drafter_where_there_is_always_a_copy) {
  const Planned planned = plan(0.75, kCopied, 0.95, AcceptanceEstimate(0.97));
  CHECK(!planned.proposes);
  CHECK_EQ(planned.num_drafts, kCopied);
}
