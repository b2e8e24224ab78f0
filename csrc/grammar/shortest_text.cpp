#include "grammar/shortest_text.h"

#include <grammar_impl.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "core/check.h"

namespace openspec {

namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
// More than any limit, and small enough to add and multiply.
constexpr int64_t kMost = int64_t{1} << 30;

/// A transition that reads texts of a rule, one after another.
struct Call {
  int state, target, rule;
  int64_t num_texts;  // at least
};

/// The fewest bytes of each rule's texts, by Knuth's generalisation of Dijkstra's algorithm (A
/// generalization of Dijkstra's algorithm, 1977): places are settled in the order of their
/// distance from the start of their rule, and a rule's length is known when its first end is.
class ShortestTexts {
 public:
  explicit ShortestTexts(const xgrammar::Grammar& grammar)
      : grammar_(grammar),
        num_bytes_(static_cast<size_t>(grammar->NumRules()), kNone),
        waiting_(num_bytes_.size()) {
    const auto num_states = static_cast<size_t>(grammar_->complete_fsm.NumStates());
    distance_.assign(num_states, kNone);
    is_settled_.assign(num_states, false);
    ended_rule_.assign(num_states, -1);
    for (int rule = 0; rule < grammar_->NumRules(); ++rule) {
      const auto& fsm = grammar_->per_rule_fsms[static_cast<size_t>(rule)]->GetFsm();
      for (const int state : fsm.GetEnds()) ended_rule_[static_cast<size_t>(state)] = rule;
      reach(fsm.GetStart(), 0);
    }
    while (!queue_.empty()) {
      const auto [bytes, state] = queue_.top();
      queue_.pop();
      if (!is_settled_[static_cast<size_t>(state)]) settle(state, bytes);
    }
  }

  /// kNone: no text ends.
  int64_t num_bytes(int rule) const { return num_bytes_[static_cast<size_t>(rule)]; }

 private:
  void reach(int state, int64_t bytes) {
    bytes = std::min(bytes, kMost);
    if (bytes >= distance_[static_cast<size_t>(state)]) return;
    distance_[static_cast<size_t>(state)] = bytes;
    queue_.emplace(bytes, state);
  }
  void settle(int state, int64_t bytes) {
    is_settled_[static_cast<size_t>(state)] = true;
    const int ended = ended_rule_[static_cast<size_t>(state)];
    if (ended >= 0 && num_bytes(ended) == kNone) {
      num_bytes_[static_cast<size_t>(ended)] = bytes;
      for (const Call& call : waiting_[static_cast<size_t>(ended)]) pass(call);
    }
    for (const auto& edge : grammar_->complete_fsm.GetEdges(state)) {
      if (edge.IsRuleRef()) {
        pass({state, edge.target, edge.GetRefRuleId(), 1});
      } else if (edge.IsRepeatRef()) {
        const auto repeat = grammar_->complete_fsm.GetRepeatEdgeInfo(edge.GetAuxIndex());
        pass({state, edge.target, repeat.RuleId(), repeat.Lower()});
      } else {
        reach(edge.target, bytes + (edge.IsEpsilon() ? 0 : 1));
      }
    }
  }
  void pass(const Call& call) {
    const int64_t bytes = call.num_texts == 0 ? 0 : num_bytes(call.rule);
    if (bytes == kNone) {
      waiting_[static_cast<size_t>(call.rule)].push_back(call);
    } else {
      reach(call.target, distance_[static_cast<size_t>(call.state)] + call.num_texts * bytes);
    }
  }

  const xgrammar::Grammar& grammar_;
  std::vector<int64_t> num_bytes_;          // by rule
  std::vector<std::vector<Call>> waiting_;  // for the length of a rule
  std::vector<int64_t> distance_;           // by state, from the start of its rule
  std::vector<bool> is_settled_;
  std::vector<int> ended_rule_;  // by state; -1: none
  std::priority_queue<std::pair<int64_t, int>, std::vector<std::pair<int64_t, int>>, std::greater<>>
      queue_;
};

/// By rule, whether a text of the grammar may come to it.
std::vector<bool> reachable_rules(const xgrammar::Grammar& grammar) {
  std::vector<bool> is_seen(static_cast<size_t>(grammar->complete_fsm.NumStates()), false),
      is_reachable(static_cast<size_t>(grammar->NumRules()), false);
  std::vector<int> states;
  const auto see = [&](int state) {
    if (!is_seen[static_cast<size_t>(state)]) states.push_back(state);
    is_seen[static_cast<size_t>(state)] = true;
  };
  const auto enter = [&](int rule) {
    is_reachable[static_cast<size_t>(rule)] = true;
    see(grammar->per_rule_fsms[static_cast<size_t>(rule)]->GetFsm().GetStart());
  };
  enter(grammar->GetRootRuleId());
  while (!states.empty()) {
    const int state = states.back();
    states.pop_back();
    for (const auto& edge : grammar->complete_fsm.GetEdges(state)) {
      see(edge.target);
      if (edge.IsRuleRef()) enter(edge.GetRefRuleId());
      if (edge.IsRepeatRef()) {
        enter(grammar->complete_fsm.GetRepeatEdgeInfo(edge.GetAuxIndex()).RuleId());
      }
    }
  }
  return is_reachable;
}

}  // namespace

void check_texts_end(const xgrammar::CompiledGrammar& compiled) {
  const xgrammar::Grammar grammar = compiled.GetGrammar();
  const ShortestTexts shortest(grammar);
  const std::vector<bool> is_reachable = reachable_rules(grammar);
  // The last one: those before it may only lead to it.
  for (int rule = grammar->NumRules() - 1; rule >= 0; --rule) {
    OPENSPEC_CHECK_ARG(
        !is_reachable[static_cast<size_t>(rule)] || shortest.num_bytes(rule) != kNone,
        "no text of the rule ", grammar->GetRule(rule).name, " ends");
  }
  const int64_t bytes = shortest.num_bytes(grammar->GetRootRuleId());
  OPENSPEC_CHECK_ARG(bytes <= kMostShortestBytes, "the shortest text of the grammar has more than ",
                     kMostShortestBytes, " bytes");
}

}  // namespace openspec
