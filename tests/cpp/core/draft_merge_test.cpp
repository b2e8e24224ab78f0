#include "core/draft_merge.h"

#include <random>

#include "check_test.h"

using namespace openspec;

namespace {
using Ids = std::vector<int32_t>;
using Floats = std::vector<float>;

Draft chain(const Ids& tokens) {
  Draft draft;
  for (int32_t token : tokens) draft.append(token);
  return draft;
}

/// Two branches: 1 2 3 with a sibling 4 of the 2, and 5 6.
Draft tree() {
  return {.tokens = {1, 5, 2, 4, 6, 3},
          .parents = {-1, -1, 0, 0, 1, 2},
          .scores = {-0.25f, -0.5f, -0.75f, -1.0f, -1.25f, -1.5f}};
}

MergedDraft merged(const Ids& grammar, Draft drafter) {
  MergedDraft result;
  result.add(kGrammarDrafts, chain(grammar));
  result.add(kDrafterDrafts, std::move(drafter));
  return result;
}

/// The tokens from the known ones to each draft.
std::vector<Ids> paths_of(const Draft& draft) {
  std::vector<Ids> paths;
  for (size_t i = 0; i < draft.tokens.size(); ++i) {
    const int32_t parent = draft.parents[i];
    paths.push_back(parent < 0 ? Ids{} : paths[static_cast<size_t>(parent)]);
    paths.back().push_back(draft.tokens[i]);
  }
  return paths;
}
}  // namespace

TEST(a_source_alone_is_what_it_offers) {
  CHECK_EQ(merged({}, tree()).draft.tokens, tree().tokens);
  CHECK_EQ(merged({}, tree()).draft.parents, tree().parents);
  CHECK_EQ(merged({7, 8}, {}).draft.tokens, (Ids{7, 8}));
  CHECK(merged({}, {}).draft.tokens.empty());
}

TEST(a_drafter_that_agrees_goes_on_after_the_grammar) {
  const MergedDraft all = merged({1, 2}, chain({1, 2, 3, 4}));
  CHECK_EQ(all.draft.tokens, (Ids{1, 2, 3, 4}));
  CHECK_EQ(all.draft.parents, (Ids{-1, 0, 1, 2}));
  CHECK_EQ(all.num_offered[kGrammarDrafts], 2);
  CHECK_EQ(all.num_offered[kDrafterDrafts], 2);
}

TEST(a_drafter_that_disagrees_or_ends_before_adds_nothing) {
  for (const Draft& other : {chain({1, 9, 3, 4}), chain({1}), chain({9}), chain({1, 2})}) {
    const MergedDraft all = merged({1, 2}, other);
    CHECK_EQ(all.draft.tokens, (Ids{1, 2}));
    CHECK_EQ(all.draft.parents, (Ids{-1, 0}));
    CHECK_EQ(all.num_offered[kDrafterDrafts], 0);
  }
}

TEST(of_a_tree_stays_what_is_below_the_grammars_tokens) {
  const MergedDraft one = merged({1}, tree());
  CHECK_EQ(one.draft.tokens, (Ids{1, 2, 4, 3}));
  CHECK_EQ(one.draft.parents, (Ids{-1, 0, 0, 1}));
  // As likely as they were after the 1.
  CHECK_EQ(one.draft.scores, (Floats{0.0f, -0.5f, -0.75f, -1.25f}));
  const MergedDraft two = merged({1, 2}, tree());
  CHECK_EQ(two.draft.tokens, (Ids{1, 2, 3}));
  CHECK_EQ(two.draft.scores, (Floats{0.0f, 0.0f, -0.75f}));
  const MergedDraft other = merged({5, 6, 7, 8, 9, 10, 11}, tree());
  CHECK_EQ(other.draft.tokens, (Ids{5, 6, 7, 8, 9, 10, 11}));
}

TEST(two_sources_beside_a_grammar_follow_each_other) {
  MergedDraft all = merged({1}, chain({1, 2}));
  all.add(kDrafterDrafts, tree());
  CHECK_EQ(all.draft.tokens, (Ids{1, 2, 3}));
  CHECK_EQ(all.draft.parents, (Ids{-1, 0, 1}));
  CHECK_EQ(all.num_offered[kGrammarDrafts], 1);
  CHECK_EQ(all.num_offered[kDrafterDrafts], 2);
  // Nothing follows all of a tree.
  MergedDraft first = merged({}, tree());
  first.add(kDrafterDrafts, chain({1, 2, 3, 8}));
  CHECK_EQ(first.draft.tokens, tree().tokens);
}

TEST(any_tree_after_any_chain_keeps_its_paths) {
  std::mt19937 random(1);
  const auto integer = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  for (int round = 0; round < 2000; ++round) {
    Draft offered;
    float score = 0.0f;
    for (int i = 0, count = integer(0, 20); i < count; ++i) {
      offered.append(integer(0, 2));
      offered.parents.back() = integer(-1, i - 1);
      offered.scores.push_back(score -= 0.125f * static_cast<float>(integer(0, 2)));
    }
    Ids lead;
    for (int i = 0, count = integer(0, 4); i < count; ++i) lead.push_back(integer(0, 2));
    // The path that is followed: the first child that agrees, down to the end.
    const std::vector<int32_t> way = drafts_of_run(offered, lead);
    const bool is_held = way.size() == lead.size();
    Draft expected = chain(lead);
    std::vector<Ids> paths = paths_of(expected);
    Floats scores(lead.size(), 0.0f);
    const std::vector<Ids> all = paths_of(offered);
    std::vector<bool> is_below(all.size(), lead.empty());
    for (size_t i = 0; i < all.size() && is_held; ++i) {
      const int32_t parent = offered.parents[i];
      if (!lead.empty()) {
        is_below[i] =
            parent == way.back() || (parent >= 0 && is_below[static_cast<size_t>(parent)]);
      }
      if (!is_below[i]) continue;
      paths.push_back(all[i]);
      const float before = lead.empty() ? 0.0f : offered.scores[static_cast<size_t>(way.back())];
      scores.push_back(offered.scores[i] - before);
    }
    const MergedDraft result = merged(lead, offered);
    CHECK(paths_of(result.draft) == paths);
    for (size_t i = 0; i < result.draft.parents.size(); ++i) {
      CHECK(result.draft.parents[i] < static_cast<int32_t>(i));
    }
    if (!offered.scores.empty()) CHECK_EQ(result.draft.scores, scores);
    CHECK_EQ(result.num_offered[kGrammarDrafts], static_cast<int>(lead.size()));
  }
}

TEST(counts_go_to_the_first_source_first) {
  MergedDraft all = merged({1, 2}, chain({1, 2, 3, 4, 5}));
  all.num_refused[kDrafterDrafts] = 3;
  const auto of = [&](const DraftCounts& counts) { return all.deal(counts); };
  const auto few =
      of({.num_offered = 5, .num_drafts = 1, .num_accepted = 1, .num_judged = 2, .num_right = 1});
  CHECK_EQ(few[kGrammarDrafts].num_drafts, 1);
  CHECK_EQ(few[kGrammarDrafts].num_judged, 2);
  CHECK_EQ(few[kGrammarDrafts].num_right, 1);
  CHECK_EQ(few[kDrafterDrafts].num_offered, 3);
  CHECK_EQ(few[kDrafterDrafts].num_drafts, 3);  // all of them refused
  CHECK_EQ(few[kDrafterDrafts].num_judged, 0);
  const auto many =
      of({.num_offered = 5, .num_drafts = 4, .num_accepted = 3, .num_judged = 4, .num_right = 3});
  CHECK_EQ(many[kGrammarDrafts].num_accepted, 2);
  CHECK_EQ(many[kDrafterDrafts].num_accepted, 1);
  CHECK_EQ(many[kDrafterDrafts].num_judged, 2);
  CHECK_EQ(many[kDrafterDrafts].num_right, 1);
}

TEST(a_copy_that_is_not_taken_makes_room_and_stays_to_be_judged) {
  MergedDraft all;
  all.add(kGrammarDrafts, chain({1, 2}));
  all.copied = {{1, 2, 3, 4}, 5};
  all.add(kCopiedDrafts, chain({1, 2, 3, 4}), /*num_refused=*/2);
  CHECK_EQ(all.draft.tokens, (Ids{1, 2, 3, 4}));
  CHECK_EQ(all.num_offered[kCopiedDrafts], 2);
  const auto of_copy =
      all.deal({.num_offered = 4, .num_drafts = 3, .num_accepted = 3, .num_judged = 4})[1];
  CHECK_EQ(of_copy.num_accepted, 1);
  CHECK_EQ(of_copy.num_drafts, 3);  // with those refused
  all.drop_copied();
  CHECK_EQ(all.draft.tokens, (Ids{1, 2}));
  all.add(kDrafterDrafts, tree());
  CHECK_EQ(all.num_offered, (BySource<int>{2, 0, 1}));
  CHECK_EQ(all.num_refused, (BySource<int>{0, 0, 0}));
  CHECK_EQ(all.copied.tokens, (Ids{1, 2, 3, 4}));
}

TEST(a_copy_is_judged_by_the_run_of_chosen_tokens) {
  const auto judge = [](const Ids& copied, const Ids& run) {
    const CopyJudgement of = judge_copy({copied, 9, kAgrees}, run);
    CHECK_EQ(of.copy_class, copy_class(9, kAgrees));
    return std::pair(of.num_judged, of.num_right);
  };
  CHECK(judge({1, 2, 3}, {1, 2, 9, 3}) == std::pair(3, 2));
  CHECK(judge({1, 2, 3}, {1, 2, 3, 4}) == std::pair(3, 3));
  CHECK(judge({1, 2, 3}, {1, 2}) == std::pair(2, 2));  // what follows is not known
  CHECK(judge({9, 2, 3}, {1, 2, 3}) == std::pair(1, 0));
  CHECK(judge({1, 2}, {}) == std::pair(0, 0));
  CHECK(judge({}, {1}) == std::pair(0, 0));
  CHECK_EQ(judge_copy({}, Ids{1}).copy_class, -1);
}
