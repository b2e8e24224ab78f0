/// Rules that are automata spelled out over bytes: masks against an oracle of sets of states.

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check_test.h"
#include "core/check.h"
#include "grammar/compiled_grammar.h"
#include "grammar/grammar_state.h"

namespace openspec::testing {
namespace {

using Ids = std::vector<int32_t>;
constexpr int32_t kEnd = 0;
constexpr const char* kBytes = "abc\xc3\xa9";  // three letters and the two bytes of one more

struct Edge {
  int from, low, high, to;
};

/// A deterministic automaton of which every state is reached and reaches an end.
struct Automaton {
  int num_states = 0;
  std::set<int> ends;
  std::vector<Edge> edges;

  std::string spelled() const {
    std::string text = "automaton:" + std::to_string(num_states) + ";";
    for (const int end : ends) text += (text.back() == ';' ? "" : ",") + std::to_string(end);
    for (const Edge& edge : edges) {
      text += ";";
      for (const int number : {edge.from, edge.low, edge.high})
        text += std::to_string(number) + ",";
      text += std::to_string(edge.to);
    }
    return text;
  }
};

std::vector<int> distances(const Automaton& automaton, std::set<int> from, bool is_backward) {
  std::vector<int> distance(static_cast<size_t>(automaton.num_states), -1);
  for (int steps = 0; !from.empty(); ++steps) {
    std::set<int> next;
    for (const int state : from) distance[static_cast<size_t>(state)] = steps;
    for (const Edge& edge : automaton.edges) {
      const int begin = is_backward ? edge.to : edge.from;
      const int end = is_backward ? edge.from : edge.to;
      if (from.contains(begin) && distance[static_cast<size_t>(end)] < 0) next.insert(end);
    }
    from = next;
  }
  return distance;
}

Automaton random_automaton(std::mt19937& random) {
  while (true) {
    Automaton made;
    made.num_states = 1 + static_cast<int>(random() % 7);
    const auto any_state = [&] { return static_cast<int>(random() % 1000) % made.num_states; };
    const std::vector<std::pair<int, int>> ranges = {
        {'a', 'a'}, {'b', 'b'}, {'c', 'c'}, {0xa0, 0xbf}, {0xc3, 0xc3}};
    for (int from = 0; from < made.num_states; ++from) {
      for (const auto& [low, high] : ranges) {
        if (random() % 5 < 3) made.edges.push_back({from, low, high, any_state()});
      }
      if (random() % 3 == 0) made.ends.insert(from);
    }
    const auto ahead = distances(made, {0}, false), back = distances(made, made.ends, true);
    const auto is_missing = [](int distance) { return distance < 0; };
    if (std::none_of(ahead.begin(), ahead.end(), is_missing) &&
        std::none_of(back.begin(), back.end(), is_missing)) {
      return made;
    }
  }
}

/// Automata one behind the other, of which some may be left out: where each stands.
struct Oracle {
  struct Part {
    Automaton automaton;
    bool is_optional;
  };
  std::vector<Part> parts;
  std::set<std::pair<int, int>> places = {};

  void enter(int part) {
    for (; part < static_cast<int>(parts.size()); ++part) {
      const Part& one = parts[static_cast<size_t>(part)];
      places.insert({part, 0});
      if (!one.is_optional && !one.automaton.ends.contains(0)) return;
    }
    places.insert({part, 0});  // the end
  }
  bool read(unsigned char byte) {
    const auto before = std::move(places);
    places = {};
    for (const auto& [part, state] : before) {
      if (part == static_cast<int>(parts.size())) continue;
      const Automaton& automaton = parts[static_cast<size_t>(part)].automaton;
      for (const Edge& edge : automaton.edges) {
        if (edge.from != state || byte < edge.low || byte > edge.high) continue;
        places.insert({part, edge.to});
        if (automaton.ends.contains(edge.to)) enter(part + 1);
      }
    }
    return !places.empty();
  }
  bool read(std::string_view bytes) {
    return std::all_of(bytes.begin(), bytes.end(),
                       [this](char byte) { return read(static_cast<unsigned char>(byte)); });
  }
  bool is_complete() const { return places.contains({static_cast<int>(parts.size()), 0}); }
};

/// The end, every byte, and random texts of two to four bytes.
std::shared_ptr<const Vocabulary> vocabulary(std::mt19937& random) {
  std::vector<std::string> tokens = {"<end>"};
  for (const char* byte = kBytes; *byte != 0; ++byte) tokens.push_back(std::string(1, *byte));
  while (tokens.size() < 60) {
    std::string token(2 + random() % 3, ' ');
    for (char& byte : token) byte = kBytes[random() % 5];
    if (std::find(tokens.begin(), tokens.end(), token) == tokens.end()) tokens.push_back(token);
  }
  return std::make_shared<const Vocabulary>(tokens, 64, Ids{kEnd});
}

std::shared_ptr<const CompiledGrammar> grammar_of(std::shared_ptr<const Vocabulary> words,
                                                  const std::string& rules) {
  return CompiledGrammar::structural_tag(
      std::move(words), R"({"type": "structural_tag", "format": {"type": "grammar", "grammar": ")" +
                            rules + R"("}})");
}

Ids allowed(GrammarState& state) {
  Ids mask(static_cast<size_t>(state.vocabulary().num_mask_words())), ids;
  if (!state.fill(mask)) return ids;
  for (int32_t id = 0; id < state.vocabulary().size(); ++id) {
    if ((static_cast<uint32_t>(mask[static_cast<size_t>(id / 32)]) >> (id % 32) & 1) != 0) {
      ids.push_back(id);
    }
  }
  return ids;
}

Ids expected(const Oracle& oracle, const Vocabulary& words) {
  Ids ids;
  if (oracle.is_complete()) ids.push_back(kEnd);
  for (int32_t id = 1; id < words.library_size(); ++id) {
    Oracle trial = oracle;
    if (trial.read(words.bytes(id))) ids.push_back(id);
  }
  return ids;
}

void check_walk(Oracle oracle, const std::string& rules, std::mt19937& random) {
  const auto words = vocabulary(random);
  GrammarState state(grammar_of(words, rules));
  oracle.enter(0);
  for (int step = 0; step < 12; ++step) {
    const Ids ids = expected(oracle, *words);
    CHECK_EQ(allowed(state), ids);
    const size_t first = ids.front() == kEnd ? 1 : 0;
    if (ids.size() == first) return;
    const int32_t token = ids[first + random() % (ids.size() - first)];
    CHECK(state.accept(token));
    CHECK(oracle.read(words->bytes(token)));
  }
}

TEST(masks_of_one_automaton) {
  std::mt19937 random(1);
  for (int i = 0; i < 60; ++i) {
    const Automaton one = random_automaton(random);
    const std::string rules = R"(root ::= Regex(\")" + one.spelled() + R"(\"))";
    check_walk({.parts = {{one, false}}}, rules, random);
  }
}

TEST(masks_of_automata_behind_each_other) {
  std::mt19937 random(2);
  for (int i = 0; i < 60; ++i) {
    Oracle oracle;
    std::string root = "root ::= ", rules;
    for (int part = 0; part < 3; ++part) {
      const Automaton one = random_automaton(random);
      const bool is_optional = random() % 2 == 0;
      oracle.parts.push_back({one, is_optional});
      const std::string name = "part" + std::to_string(part);
      root += is_optional ? "(" + name + R"( | \"\") )" : name + " ";
      rules += R"(\n)" + name + R"( ::= Regex(\")" + one.spelled() + R"(\"))";
    }
    check_walk(oracle, root + rules, random);
  }
}

TEST(what_is_no_automaton_is_refused) {
  std::mt19937 random(3);
  const auto words = vocabulary(random);
  for (const std::string text :
       {"", "0;", "x;0", "1,2;0", "2;2;0,97,97,1", "2;1;0,97,97", "2;1;0,97,97,2", "2;1;0,98,97,1",
        "2;1;0,97,256,1", "2;1;0,-1,97,1", "2;1;0,97,98,1;0,98,98,0", "2;1;;0,97,97,1",
        "2;1;0,97,97,1,", "99999999999999999999;0", "1048577;0"}) {
    CHECK_THROWS(grammar_of(words, R"(root ::= Regex(\"automaton:)" + text + R"(\"))"),
                 ArgumentError, "spelled-out automaton");
  }
}

// What a split of a set of characters, at the surrogates for one, did behind something optional.
TEST(states_that_end_do_not_get_the_successors_of_others) {
  std::mt19937 random(4);
  const auto words = vocabulary(random);
  for (const std::string pattern : {"(|[b])[^a]*c", "(|b)[b-cé-é]*c", "b?[^a]*c"}) {
    GrammarState state(CompiledGrammar::structural_tag(
        words, R"({"type": "structural_tag", "format": {"type": "regex", "pattern": ")" + pattern +
                   R"("}})"));
    for (const int32_t id : allowed(state)) CHECK(words->bytes(id).find('a') == std::string::npos);
  }
}

}  // namespace
}  // namespace openspec::testing
