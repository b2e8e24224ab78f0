/// Work on grammars within its time: meters, places of sequences, masks made beside the steps.

#include "grammar/grammar_work.h"

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check_test.h"
#include "core/check.h"
#include "grammar/compiled_grammar.h"
#include "grammar/grammar_place.h"
#include "grammar/work_meter.h"

namespace openspec::testing {
namespace {

using Ids = std::vector<int32_t>;
constexpr int32_t kEnd = 0, kA = 1, kB = 2, kX = 3;

std::shared_ptr<const CompiledGrammar> grammar(const std::string& rules) {
  static const auto words = std::make_shared<const Vocabulary>(
      std::vector<std::string>{"<end>", "a", "b", "x"}, 4, Ids{kEnd});
  return CompiledGrammar::structural_tag(
      words, R"({"type": "structural_tag", "format": {"type": "grammar", "grammar": ")" + rules +
                 R"("}})");
}

/// Of texts whose states pile up: each token's work grows with the text.
std::shared_ptr<const CompiledGrammar> ambiguous() {
  return grammar(R"(root ::= root root | \"a\" | \"\")");
}

Ids mask_of(GrammarPlace& place, const Ids& output) {
  Ids mask(1, 0);
  const bool is_done = place.use(output, 1, [&](GrammarState& state) { CHECK(state.fill(mask)); });
  return is_done ? mask : Ids{};
}

void await(const GrammarPlace& place) {
  for (int i = 0; i < 3000 && place.is_away(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(!place.is_away());
}

struct Sequence {
  explicit Sequence(GrammarWork& work, std::shared_ptr<const CompiledGrammar> rules,
                    std::shared_ptr<GrammarTally> its_tally = std::make_shared<GrammarTally>())
      : tally(its_tally), place(std::move(rules), std::move(its_tally), work) {}
  std::shared_ptr<GrammarTally> tally;
  GrammarPlace place;
};

TEST(a_meter_stops_work) {
  GrammarState state(ambiguous());
  const WorkMeter meter(0.05);
  CHECK_THROWS(state.sync(Ids(100000, kA)), WorkStopped, "stopped");
  CHECK_LT(meter.seconds(), 1.0);
}

TEST(work_that_nobody_wants_stops) {
  std::atomic<bool> is_unwanted{true};
  GrammarState state(ambiguous());
  const WorkMeter meter(100.0, &is_unwanted);
  CHECK_THROWS(state.sync(Ids(100000, kA)), WorkStopped, "stopped");
}

TEST(ordinary_masks_are_made_in_the_step) {
  GrammarWork work;
  work.begin_step();
  Sequence one(work, grammar(R"(root ::= \"a\" (\"b\" | \"x\"))"));
  CHECK_EQ(mask_of(one.place, {kA}), (Ids{1 << kB | 1 << kX}));
  CHECK(!one.place.is_slow());
  CHECK_EQ(one.tally->seconds(), 0.0);
}

TEST(a_mask_for_which_the_step_has_no_time_is_made_beside_it) {
  GrammarWork work;
  work.begin_step();
  work.spend_step(1.0);
  Sequence one(work, grammar(R"(root ::= \"a\" (\"b\" | \"x\"))"));
  CHECK_EQ(mask_of(one.place, {kA}), Ids{});
  CHECK(!one.place.made(Ids{kA}));
  one.place.make(Ids{kA});
  await(one.place);
  const auto made = one.place.made(Ids{kA});
  CHECK(made.has_value());
  CHECK_EQ(Ids(made->begin(), made->end()), (Ids{1 << kB | 1 << kX}));
  CHECK(!one.place.made(Ids{kA, kB}));
  // The next one is made in the step again, from the state that came back.
  work.begin_step();
  CHECK_EQ(mask_of(one.place, {kA, kB}), (Ids{1 << kEnd}));
  CHECK_EQ(one.tally->seconds(), 0.0);
}

TEST(slow_masks_are_made_beside_the_steps_until_they_are_ordinary) {
  GrammarWork work;
  work.times.mask = work.times.token = work.times.mask_per_id = 0.0;  // nothing is ordinary
  work.begin_step();
  Sequence one(work, grammar(R"(root ::= \"a\"* (\"b\" | \"x\"))"));
  CHECK_EQ(mask_of(one.place, {kA}), (Ids{1 << kA | 1 << kB | 1 << kX}));
  CHECK(one.place.is_slow());
  CHECK_GT(one.tally->seconds(), 0.0);
  CHECK_EQ(mask_of(one.place, {kA, kA}), Ids{});
  work.times.mask = 1.0;
  one.place.make_if_slow(Ids{kA, kA});
  await(one.place);
  CHECK(one.place.made(Ids{kA, kA}).has_value());
  CHECK(!one.place.is_slow());
  one.place.make_if_slow(Ids{kA, kA, kA});
  CHECK(!one.place.is_away());
  work.begin_step();
  CHECK_EQ(mask_of(one.place, {kA, kA, kA}), (Ids{1 << kA | 1 << kB | 1 << kX}));
}

TEST(work_in_a_step_breaks_off_when_its_time_is_over) {
  GrammarWork work;
  work.times.step = 0.02;
  work.begin_step();
  Sequence slow(work, ambiguous()), other(work, grammar(R"(root ::= \"a\" \"b\")"));
  CHECK_EQ(mask_of(slow.place, Ids(5000, kA)), Ids{});
  CHECK(slow.place.is_slow());
  CHECK_EQ(mask_of(other.place, {kA}), Ids{});  // nothing is left of the step
  CHECK(!other.place.is_slow());
  work.begin_step();
  CHECK_EQ(mask_of(other.place, {kA}), (Ids{1 << kB}));
}

TEST(a_request_has_a_limit_for_all_its_sequences) {
  GrammarWork work;
  work.times.request = 0.1;
  work.begin_step();
  const auto tally = std::make_shared<GrammarTally>();
  Sequence one(work, ambiguous(), tally), two(work, ambiguous(), tally);
  one.place.make(Ids(5000, kA));
  await(one.place);
  CHECK(!one.place.made(Ids(5000, kA)));
  CHECK(one.place.failure().message.find("make it less ambiguous") != std::string::npos);
  CHECK(one.place.failure().is_request);
  two.place.make(Ids(5000, kA));
  await(two.place);
  CHECK(!two.place.made(Ids(5000, kA)));
  CHECK(!two.place.failure().message.empty());
  CHECK_LT(tally->seconds(), 1.5);
}

TEST(ordinary_masks_do_not_wait_for_slow_ones) {
  GrammarWork work;
  work.times.request = 1.0;
  std::vector<std::unique_ptr<Sequence>> slow;
  for (int i = 0; i < 8; ++i) {
    slow.push_back(std::make_unique<Sequence>(work, ambiguous()));
    slow.back()->place.make(Ids(5000, kA));
  }
  Sequence one(work, grammar(R"(root ::= \"a\" \"b\")"));
  one.place.make(Ids{kA});
  await(one.place);
  CHECK(one.place.made(Ids{kA}).has_value());
  int num_away = 0;
  for (const auto& other : slow) num_away += other->place.is_away();
  CHECK_GE(num_away, 4);
  // Whoever leaves does not wait for them either.
}

TEST(a_wait_ends_with_the_first_mask) {
  GrammarWork work;
  Sequence one(work, grammar(R"(root ::= \"a\" \"b\")"));
  one.place.make(Ids{kA});
  const auto begin = std::chrono::steady_clock::now();
  work.await(30.0);
  CHECK_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 20.0);
  CHECK(!one.place.is_away());
  work.await(0.001);  // nothing else comes
}

TEST(grammars_whose_texts_never_end_are_refused) {
  for (const std::string rules :
       {R"(root ::= \"a\" root)", R"(root ::= \"a\" more\nmore ::= x more\nx ::= \"x\")",
        R"(root ::= \"a\" | \"b\" more\nmore ::= \"x\" more)",
        R"(root ::= one\none ::= \"a\" two\ntwo ::= \"b\" one)"}) {
    CHECK_THROWS(grammar(rules), ArgumentError, "no text of the rule");
  }
}

TEST(grammars_whose_shortest_text_is_too_long_are_refused) {
  const auto repeat = [](int64_t outer, int64_t inner) {
    return R"({"type": "structural_tag", "format": {"type": "repeat", "min": )" +
           std::to_string(outer) + R"(, "max": )" + std::to_string(outer) +
           R"(, "content": {"type": "repeat", "min": )" + std::to_string(inner) + R"(, "max": )" +
           std::to_string(inner) + R"(, "content": {"type": "const_string", "value": "a"}}}})";
  };
  const auto compile = [&](int64_t outer, int64_t inner) {
    return CompiledGrammar::structural_tag(
        std::make_shared<const Vocabulary>(std::vector<std::string>{"<end>", "a"}, 2, Ids{kEnd}),
        repeat(outer, inner));
  };
  for (const auto& [outer, inner] : std::vector<std::pair<int64_t, int64_t>>{
           {1000000, 1000000}, {1000000000, 1000000000}, {1, 10000000}, {1025, 1024}}) {
    CHECK_THROWS(compile(outer, inner), ArgumentError, "shortest text");
  }
  compile(1024, 1024);
  compile(1, 1000);
}

TEST(texts_of_every_kind_of_rule_end) {
  for (const std::string rules :
       {R"(root ::= \"a\" root | \"b\")", R"(root ::= \"a\"*)",
        R"(root ::= [ab]{2,9} x?\nx ::= \"x\")", R"(root ::= Regex(\"(ab)+x\"))",
        R"(root ::= TagDispatch((\"ab\", more))\nmore ::= \"x\")", R"(root ::= \"\")"}) {
    grammar(rules);
  }
}

}  // namespace
}  // namespace openspec::testing
