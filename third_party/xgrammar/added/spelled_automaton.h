// A pattern that is an automaton spelled out, over bytes:
//
//   automaton:NUM_STATES;END,END,...;FROM,LOW,HIGH,TO;FROM,LOW,HIGH,TO;...
//
// Decimal numbers. State 0 is the start, and a state may be an end; a transition takes the bytes
// LOW to HIGH. Of one state no two transitions share a byte, so the automaton is deterministic.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsm.h"
#include "support/utils.h"

namespace xgrammar {

class SpelledAutomaton {
 public:
  static bool Is(std::string_view pattern) { return pattern.substr(0, kMark.size()) == kMark; }

  static Result<SpelledAutomaton> Parse(std::string_view pattern) {
    SpelledAutomaton made;
    const std::string error = made.Read(pattern.substr(kMark.size()));
    if (!error.empty()) return ResultErr("a spelled-out automaton: " + error);
    return ResultOk(std::move(made));
  }

  bool MatchesEmpty() const { return std::find(ends_.begin(), ends_.end(), 0) != ends_.end(); }

  FSMWithStartEnd Build() const {
    FSM fsm(num_states_);
    for (const auto& [from, low, high, to] : transitions_) fsm.AddEdge(from, to, low, high);
    return FSMWithStartEnd(fsm, 0, ends_);
  }

 private:
  static constexpr std::string_view kMark = "automaton:";
  static constexpr int kMostStates = 1 << 20;

  // Numbers with commas between them, up to a semicolon, which is taken away with them; nothing
  // where there is more.
  static std::optional<std::vector<int>> Numbers(std::string_view& text) {
    const std::string_view part = text.substr(0, text.find(';'));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
    std::vector<int> numbers;
    const char* at = part.data();
    const char* const end = at + part.size();
    while (at != end) {
      if (!numbers.empty() && *at++ != ',') return std::nullopt;
      int number = 0;
      const auto [after, failure] = std::from_chars(at, end, number);
      if (failure != std::errc() || number < 0 || *at == '-') return std::nullopt;
      numbers.push_back(number);
      at = after;
    }
    return numbers;
  }

  std::string Read(std::string_view text) {
    const auto count = Numbers(text);
    if (!count || count->size() != 1 || (*count)[0] < 1 || (*count)[0] > kMostStates) {
      return "it begins with its number of states";
    }
    num_states_ = (*count)[0];
    const auto is_state = [this](int id) { return id < num_states_; };
    const auto ends = Numbers(text);
    if (!ends || !std::all_of(ends->begin(), ends->end(), is_state)) {
      return "after the number of states come those that are ends";
    }
    ends_ = *ends;
    while (!text.empty()) {
      const auto numbers = Numbers(text);
      if (!numbers || numbers->size() != 4) return "a transition is FROM,LOW,HIGH,TO";
      const std::array<int, 4> one = {(*numbers)[0], (*numbers)[1], (*numbers)[2], (*numbers)[3]};
      if (!is_state(one[0]) || !is_state(one[3]))
        return "a transition names a state that is not there";
      if (one[1] > one[2] || one[2] > 255) return "a transition takes the bytes LOW to HIGH";
      transitions_.push_back(one);
    }
    std::sort(transitions_.begin(), transitions_.end());
    for (size_t i = 1; i < transitions_.size(); ++i) {
      const auto& before = transitions_[i - 1];
      if (before[0] == transitions_[i][0] && before[2] >= transitions_[i][1]) {
        return "two transitions of a state share a byte";
      }
    }
    return "";
  }

  int num_states_ = 0;
  std::vector<int> ends_;
  std::vector<std::array<int, 4>> transitions_;  // from, low, high, to; sorted
};

}  // namespace xgrammar
