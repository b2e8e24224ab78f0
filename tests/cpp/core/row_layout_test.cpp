#include "core/row_layout.h"

#include "check_test.h"
#include "core/check.h"

using namespace openspec;

namespace {
using Ids = std::vector<int32_t>;
constexpr int kNoScoring = 1 << 30;

RowLayout fresh() {
  RowLayout layout;
  layout.clear();
  return layout;
}

Draft chain(const Ids& tokens) {
  Draft draft;
  for (int32_t token : tokens) draft.append(token);
  return draft;
}
}  // namespace

TEST(decode_span_with_drafts) {
  RowLayout layout = fresh();
  const Ids tokens{5, 6, 7}, pages{3, 1};
  layout.append(
      {.slot = 2, .num_new_tokens = 1, .kv_len = 2, .num_tokens = 3, .draft = chain({8, 9})},
      tokens, pages, 4, kNoScoring, 2);
  CHECK_EQ(layout.token, (Ids{7, 8, 9}));
  CHECK_EQ(layout.position, (Ids{2, 3, 4}));
  CHECK_EQ(layout.parent, (Ids{-1, 0, 1}));
  CHECK_EQ(layout.kv_slot, (std::vector<int64_t>{14, 15, 4}));
  CHECK_EQ(layout.sample_row, (Ids{0, 1, 2}));
  CHECK_EQ(layout.score_token, (Ids{-1, -1, -1}));
  CHECK_EQ(layout.first_choice, (Ids{0}));
  CHECK_EQ(layout.span_seq, (Ids{2}));
}

TEST(prefill_chunk_samples_only_at_the_end) {
  RowLayout layout = fresh();
  const Ids tokens{1, 2, 3, 4, 5}, pages{0, 1, 2};
  layout.append({.slot = 0, .num_new_tokens = 3, .kv_len = 0, .num_tokens = 5, .draft = {}}, tokens,
                pages, 2, kNoScoring, 5);
  CHECK(layout.sample_row.empty());
  CHECK_EQ(layout.first_choice, (Ids{-1}));
  layout.append({.slot = 1, .num_new_tokens = 2, .kv_len = 3, .num_tokens = 5, .draft = {}}, tokens,
                pages, 2, kNoScoring, 5);
  CHECK_EQ(layout.span_begin, (Ids{0, 3, 5}));
  CHECK_EQ(layout.sample_row, (Ids{4}));
  CHECK_EQ(layout.parent, (Ids{-1, 0, 1, -1, 3}));
  CHECK_EQ(layout.first_choice, (Ids{-1, 0}));
}

TEST(prompt_rows_score_the_token_that_follows) {
  RowLayout layout = fresh();
  const Ids tokens{1, 2, 3}, pages{0};
  layout.append({.slot = 0, .num_new_tokens = 3, .kv_len = 0, .num_tokens = 3, .draft = {}}, tokens,
                pages, 4, 0, 3);
  CHECK_EQ(layout.sample_row, (Ids{0, 1, 2}));
  CHECK_EQ(layout.score_token, (Ids{2, 3, -1}));
  CHECK_EQ(layout.first_choice, (Ids{2}));
}

TEST(tree_rows_take_their_position_from_the_depth) {
  RowLayout layout = fresh();
  Draft tree;
  tree.tokens = {10, 11, 12, 13};
  tree.parents = {-1, -1, 0, 2};
  const Ids tokens{7}, pages{0, 1};
  layout.append({.slot = 0, .num_new_tokens = 1, .kv_len = 0, .num_tokens = 1, .draft = tree},
                tokens, pages, 4, kNoScoring, 1);
  CHECK_EQ(layout.position, (Ids{0, 1, 1, 2, 3}));
  CHECK_EQ(layout.parent, (Ids{-1, 0, 0, 1, 3}));
  CHECK_EQ(layout.kv_slot, (std::vector<int64_t>{0, 1, 2, 3, 4}));
}

TEST(impossible_spans_are_refused) {
  RowLayout layout = fresh();
  const Ids tokens{1, 2}, pages{0};
  CHECK_THROWS(
      layout.append({.slot = 0, .num_new_tokens = 3, .kv_len = 0, .num_tokens = 2, .draft = {}},
                    tokens, pages, 4, kNoScoring, 2),
      EngineError, "span");
  CHECK_THROWS(
      layout.append(
          {.slot = 0, .num_new_tokens = 1, .kv_len = 0, .num_tokens = 2, .draft = chain({3})},
          tokens, pages, 4, kNoScoring, 2),
      EngineError, "drafts");
}

TEST(chain_is_accepted_up_to_the_first_difference) {
  const Draft draft = chain({4, 5, 6});
  CHECK_EQ(accept_drafts(draft, Ids{4, 5, 6, 7}), (Ids{0, 1, 2}));
  CHECK_EQ(accept_drafts(draft, Ids{4, 9, 6, 7}), (Ids{0}));
  CHECK_EQ(accept_drafts(draft, Ids{3, 5, 6, 7}), (Ids{}));
  CHECK_EQ(accept_drafts({}, Ids{3}), (Ids{}));
  CHECK_EQ(accept_drafts(draft, Ids{4, -1, 6, 7}), (Ids{0}));
}

TEST(tree_follows_the_chosen_child) {
  Draft tree;
  tree.tokens = {4, 5, 6, 7, 8};
  tree.parents = {-1, -1, 1, 1, 3};
  // Root chooses 5, draft 1 chooses 7, draft 3 chooses 8, draft 4 ends the run.
  CHECK_EQ(accept_drafts(tree, Ids{5, 0, 7, 0, 8, 9}), (Ids{1, 3, 4}));
  CHECK_EQ(accept_drafts(tree, Ids{4, 5, 7, 0, 8, 9}), (Ids{0}));
}

TEST(a_cut_tree_is_a_tree) {
  Draft tree;
  tree.tokens = {4, 5, 6};
  tree.parents = {-1, 0, -1};
  tree.scores = {-0.5f, -0.7f, -0.9f};
  tree.truncate(2);
  CHECK_EQ(tree.parents, (Ids{-1, 0}));
  CHECK_EQ(tree.scores.size(), size_t{2});
}

TEST(choices_judge_one_depth_more_than_had_rows) {
  const auto judge = [](const Draft& offered, int num_granted, const Ids& chosen) {
    const DraftJudgement judgement = judge_drafts(offered, num_granted, chosen);
    return Ids{judgement.num_judged, judgement.num_right};
  };
  const Draft draft = chain({4, 5, 6});
  CHECK_EQ(judge(draft, 0, {4}), (Ids{1, 1}));
  CHECK_EQ(judge(draft, 0, {9}), (Ids{1, 0}));
  CHECK_EQ(judge(draft, 1, {4, 5}), (Ids{2, 2}));
  CHECK_EQ(judge(draft, 3, {4, 9, 6, 7}), (Ids{2, 1}));
  CHECK_EQ(judge(draft, 3, {4, 5, 6, 7}), (Ids{3, 3}));
  CHECK_EQ(judge({}, 0, {4}), (Ids{0, 0}));
  CHECK_EQ(judge(draft, 3, {-1, 5, 6, 7}), (Ids{0, 0}));
  CHECK_EQ(judge(draft, 3, {4, -1, 6, 7}), (Ids{1, 1}));
  Draft tree;
  tree.tokens = {4, 5, 6, 7, 8};
  tree.parents = {-1, -1, 1, 1, 3};
  CHECK_EQ(judge(tree, 5, {5, 0, 7, 0, 8, 9}), (Ids{3, 3}));
  CHECK_EQ(judge(tree, 5, {5, 0, 9, 0, 8, 9}), (Ids{2, 1}));
  // Draft 0 has no children: nothing more was tried.
  CHECK_EQ(judge(tree, 5, {4, 9, 9, 9, 9, 9}), (Ids{1, 1}));
  // The choice after draft 1 is known, that after draft 3 is not.
  CHECK_EQ(judge(tree, 2, {5, 0, 7}), (Ids{2, 2}));
  CHECK_EQ(judge(tree, 0, {5}), (Ids{1, 1}));
}
