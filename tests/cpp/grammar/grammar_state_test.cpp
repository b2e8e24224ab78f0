/// Grammars without a model: states that go forward and back, masks of chains and trees.

#include "grammar/grammar_state.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check_test.h"
#include "grammar/compiled_grammar.h"
#include "kernels/choose/choose.h"
#include "runtime/drafting/row_masks.h"

namespace openspec::testing {
namespace {

using Ids = std::vector<int32_t>;
constexpr int32_t kEnd = 0;
// Ids 1 .. 26 are the letters; "ab" is a token too, 28 has no bytes, and 29 is padding.
constexpr int32_t kAb = 27;
constexpr int kVocabSize = 30;

int32_t letter(char c) { return 1 + (c - 'a'); }

std::shared_ptr<const Vocabulary> vocabulary() {
  std::vector<std::string> tokens = {"<end>"};
  for (char c = 'a'; c <= 'z'; ++c) tokens.push_back(std::string(1, c));
  tokens.push_back("ab");
  tokens.push_back("");
  return std::make_shared<const Vocabulary>(tokens, kVocabSize, Ids{kEnd});
}

std::shared_ptr<const CompiledGrammar> regex(const std::string& pattern) {
  return CompiledGrammar::structural_tag(
      vocabulary(), R"({"type": "structural_tag", "format": {"type": "regex", "pattern": ")" +
                        pattern + R"("}})");
}

Ids ids_of(std::span<const int32_t> mask) {
  Ids ids;
  for (int32_t id = 0; id < kVocabSize; ++id) {
    if ((static_cast<uint32_t>(mask[static_cast<size_t>(id / 32)]) >> (id % 32) & 1) != 0) {
      ids.push_back(id);
    }
  }
  return ids;
}

Ids allowed(GrammarState& state) {
  Ids mask(1, 0);
  return state.fill(mask) ? ids_of(mask) : Ids{};
}

Draft draft_of(const std::vector<std::pair<int32_t, int32_t>>& nodes) {
  Draft draft;
  for (const auto& [token, parent] : nodes) {
    draft.append(token);
    draft.parents.back() = parent;
  }
  return draft;
}

TEST(a_state_follows_the_tokens_and_goes_back) {
  GrammarState state(regex("abc|abd|x"));
  CHECK_EQ(allowed(state), (Ids{letter('a'), letter('x'), kAb}));
  state.sync(Ids{kAb});
  CHECK_EQ(allowed(state), (Ids{letter('c'), letter('d')}));
  state.sync(Ids{letter('a'), letter('b'), letter('d')});
  CHECK_EQ(allowed(state), (Ids{kEnd}));
  state.sync(Ids{letter('a'), letter('b'), letter('d'), kEnd, letter('q')});
  CHECK(state.is_ended());
  CHECK_EQ(allowed(state), Ids{});
  CHECK(!state.accept(kEnd));
  state.sync(Ids{letter('x')});
  CHECK(!state.is_ended());
  CHECK_EQ(allowed(state), (Ids{kEnd}));
  CHECK_THROWS(state.sync(Ids{letter('q')}), EngineError, "allows there");
}

TEST(an_end_that_comes_too_early_ends_the_answer) {
  GrammarState state(regex("abc"));
  state.sync(Ids{letter('a'), kEnd});
  CHECK(state.is_ended());
  state.sync(Ids{letter('a')});
  CHECK_EQ(allowed(state), (Ids{letter('b')}));
}

TEST(a_draft_loses_what_the_grammar_refuses) {
  GrammarState state(regex("a(b|c)d"));
  // a, then b and c side by side, z below b, d below c, and the end and more below d.
  Draft draft = draft_of({{letter('a'), -1},
                          {letter('b'), 0},
                          {letter('z'), 1},
                          {letter('c'), 0},
                          {letter('d'), 3},
                          {kEnd, 4},
                          {letter('a'), 5},
                          {28, -1},
                          {-1, -1}});
  draft.scores.assign(9, -1.0f);
  CHECK_EQ(state.prune(draft), 4);
  CHECK_EQ(draft.tokens, (Ids{letter('a'), letter('b'), letter('c'), letter('d'), kEnd}));
  CHECK_EQ(draft.parents, (Ids{-1, 0, 0, 2, 3}));
  CHECK_EQ(draft.scores.size(), size_t{5});
  CHECK_EQ(allowed(state), (Ids{letter('a'), kAb}));
}

TEST(rows_of_a_tree_have_masks_by_their_ancestors) {
  GrammarState state(regex("a(bx|cy)"));
  const Draft draft = draft_of({{letter('a'), -1},
                                {letter('c'), 0},
                                {letter('b'), 0},
                                {letter('y'), 1},
                                {letter('y'), 2},
                                {kEnd, 3}});
  std::vector<int32_t> words(8), index(7);
  MaskRows masks{.num_words = 1, .words = words, .num_rows = 1};  // one is there already
  state.fill_rows(draft, masks, index);
  CHECK_EQ(masks.num_rows, 6);
  const auto row = [&](size_t i) { return ids_of(masks.row(index[i])); };
  CHECK_EQ(row(0), (Ids{letter('a'), kAb}));
  CHECK_EQ(row(1), (Ids{letter('b'), letter('c')}));
  CHECK_EQ(row(2), (Ids{letter('y')}));
  CHECK_EQ(row(3), (Ids{letter('x')}));
  CHECK_EQ(row(4), (Ids{kEnd}));
  CHECK_EQ(index[5], -1);  // y does not follow b
  CHECK_EQ(index[6], -1);  // nothing follows the end
  CHECK_EQ(allowed(state), (Ids{letter('a'), kAb}));
}

TEST(offers_are_the_longest_tokens_that_fit) {
  GrammarState state(regex("abab(x|y)"));
  CHECK_EQ(state.offer(8), (Ids{kAb, kAb}));
  CHECK_EQ(state.offer(1), (Ids{kAb}));
  state.sync(Ids{letter('a')});
  CHECK_EQ(state.offer(8), (Ids{letter('b'), kAb}));
  state.sync(Ids{kAb, kAb, letter('x')});
  CHECK_EQ(state.offer(8), (Ids{kEnd}));
}

TEST(a_token_that_a_grammar_names_is_offered) {
  const auto grammar = CompiledGrammar::structural_tag(
      vocabulary(), R"({"type": "structural_tag", "format": {"type": "sequence", "elements": [
        {"type": "token", "token": 27}, {"type": "const_string", "value": "xy"},
        {"type": "token", "token": 27}]}})");
  GrammarState state(grammar);
  CHECK_EQ(allowed(state), (Ids{kAb}));
  CHECK_EQ(state.offer(8), (Ids{kAb, letter('x'), letter('y'), kAb, kEnd}));
  CHECK(!state.accept(letter('a')));
}

TEST(a_token_beside_bytes_is_a_choice) {
  const auto grammar = CompiledGrammar::structural_tag(
      vocabulary(), R"({"type": "structural_tag", "format": {"type": "sequence", "elements": [
        {"type": "optional", "content": {"type": "token", "token": 27}},
        {"type": "const_string", "value": "xy"}]}})");
  GrammarState state(grammar);
  CHECK_EQ(state.offer(8), Ids{});
  state.sync(Ids{kAb});
  CHECK_EQ(state.offer(8), (Ids{letter('x'), letter('y'), kEnd}));
}

TEST(offers_are_spelt_as_the_model_did_last) {
  const auto grammar = regex("x(abab(x|y))*");
  GrammarState state(grammar), other(grammar);
  state.sync(Ids{letter('x')});
  CHECK_EQ(state.offer(8), Ids{});
  state.sync(Ids{letter('x'), letter('a')});
  CHECK_EQ(state.offer(8), (Ids{letter('b'), kAb}));
  state.sync(Ids{letter('x'), letter('a'), letter('b')});
  CHECK_EQ(state.offer(1), Ids{kAb});
  // Seen when all of it is out, and by every sequence of the grammar, from each of its tokens on.
  state.sync(Ids{letter('x'), letter('a'), letter('b'), letter('a'), letter('b')});
  other.sync(Ids{letter('x'), letter('a')});
  CHECK_EQ(other.offer(8), (Ids{letter('b'), letter('a'), letter('b')}));
  CHECK_EQ(other.offer(2), (Ids{letter('b'), letter('a')}));
  other.sync(Ids{letter('x'), letter('a'), letter('b')});
  CHECK_EQ(other.offer(8), (Ids{letter('a'), letter('b')}));
  // A text that goes back is not taken for a spelling.
  other.sync(Ids{letter('x')});
  CHECK_EQ(other.offer(8), Ids{});
}

TEST(a_grammar_survives_its_bytes) {
  const auto compiled = regex("(ab)*c");
  const auto read = CompiledGrammar::deserialize(vocabulary(), compiled->serialize());
  GrammarState one(compiled), other(read);
  for (const int32_t token : {kAb, letter('a'), letter('b'), letter('c')}) {
    CHECK_EQ(allowed(one), allowed(other));
    CHECK(one.accept(token) && other.accept(token));
  }
  CHECK_THROWS(CompiledGrammar::deserialize(vocabulary(), "{}"), ArgumentError, "");
}

/// Masks of a sequence with a grammar behind one output token.
std::vector<Ids> masks_of(SequenceParams params, const Draft& draft, std::string& failure) {
  SequenceTable table(1, 32, 4, 4);
  const int slot = table.add(Ids{9, letter('a')}, /*prompt_len=*/1, std::move(params), PageHash{});
  RowMasks masks(kVocabSize, Memory::kHost);
  masks.begin(static_cast<size_t>(2 + draft.size()));
  masks.add(slot, {9, letter('a')}, draft, 1);
  ThreadPool threads(2);
  masks.fill(table, threads);
  CHECK_EQ(masks.sample_mask()[0], -1);
  std::vector<Ids> rows;
  for (int row = 0; row <= draft.size(); ++row) {
    const int32_t mask = masks.sample_mask()[static_cast<size_t>(row) + 1];
    rows.push_back(mask < 0 ? Ids{mask} : ids_of({masks.masks() + mask, 1}));
  }
  failure = table.grammar(slot)->failure().message;
  table.remove(slot);
  return rows;
}

TEST(a_mask_is_never_empty) {
  SequenceParams params;
  std::string failure;
  const Draft draft = draft_of({{letter('b'), -1}});
  const auto masks = [&] { return masks_of(params, draft, failure); };
  params.grammar = regex("a(b|c)?");
  CHECK_EQ(masks(), (std::vector<Ids>{{kEnd, letter('b'), letter('c')}, {kEnd}}));
  // A row that other parameters leave nothing has no choice; the sequence goes on up to it.
  params.grammar = regex("a(b|c)x");
  params.lists.allowed_ids = {letter('b'), letter('z')};
  CHECK_EQ(masks(), (std::vector<Ids>{{letter('b')}, {kHeldMask}}));
  CHECK_EQ(failure, std::string());
  params.lists.allowed_ids = {};
  params.lists.bad_words = {3, letter('b'), letter('x')};  // "bx"
  params.num_bad_words = 1;
  CHECK_EQ(masks(), (std::vector<Ids>{{letter('b'), letter('c')}, {kHeldMask}}));
  CHECK_EQ(failure, std::string());
  // At the last known token it fails.
  params.num_bad_words = 0;
  params.lists.allowed_ids = {letter('z')};
  CHECK_EQ(masks(), (std::vector<Ids>{{kHeldMask}, {kHeldMask}}));
  CHECK(failure.find("allowed_token_ids") != std::string::npos);
}

TEST(a_text_that_the_grammar_refuses_fails_its_sequence_alone) {
  SequenceParams params;
  std::string failure;
  params.grammar = regex("b");
  CHECK_EQ(masks_of(params, Draft{}, failure), (std::vector<Ids>{{kHeldMask}}));
  CHECK(failure.find("not one that the request's grammar allows") != std::string::npos);
}

TEST(offers_are_looked_for_as_far_as_they_are_wanted) {
  GrammarState state(regex("(ab){5000}c"));
  CHECK_EQ(state.offer(3), (Ids{kAb, kAb, kAb}));
}

}  // namespace
}  // namespace openspec::testing
