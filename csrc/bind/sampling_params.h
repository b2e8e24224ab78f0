#pragma once

/// What the core keeps of openspec.messages.SamplingParams: a new parameter is a line here.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/fields.h"
#include "core/check.h"
#include "runtime/state/sequence_table.h"

namespace openspec {

inline constexpr Field<SequenceParams> kSamplingFields[] = {
    {"temperature", read_as<&SequenceParams::temperature>},
    {"top_k", [](SequenceParams& params,
                 const pybind11::handle& value) { params.top_k = std::max(value.cast<int>(), 0); }},
    {"top_p", read_as<&SequenceParams::top_p>},
    {"min_p", read_as<&SequenceParams::min_p>},
    {"presence_penalty", read_as<&SequenceParams::presence_penalty>},
    {"frequency_penalty", read_as<&SequenceParams::frequency_penalty>},
    {"repetition_penalty", read_as<&SequenceParams::repetition_penalty>},
    {"min_tokens", read_as<&SequenceParams::min_tokens>},
    // Any integer is a seed: its low 64 bits.
    {"seed",
     [](SequenceParams& params, const pybind11::handle& value) {
       if (!value.is_none()) params.seed = PyLong_AsUnsignedLongLongMask(value.ptr());
     }},
    {"stop_token_ids",
     [](SequenceParams& params, const pybind11::handle& value) {
       params.lists.stop_ids = value.cast<std::vector<int32_t>>();
     }},
    {"allowed_token_ids",
     [](SequenceParams& params, const pybind11::handle& value) {
       if (value.is_none()) return;
       params.lists.allowed_ids = value.cast<std::vector<int32_t>>();
     }},
    {"logit_bias",
     [](SequenceParams& params, const pybind11::handle& value) {
       for (const auto& [id, bias] : value.cast<std::map<int32_t, float>>()) {
         params.lists.bias_ids.push_back(id);
         params.lists.bias_values.push_back(bias);
       }
     }},
    {"bad_word_ids",
     [](SequenceParams& params, const pybind11::handle& value) {
       const auto words = value.cast<std::vector<std::vector<int32_t>>>();
       auto& list = params.lists.bad_words;
       list.resize(words.size());
       for (size_t i = 0; i < words.size(); ++i) {
         list.insert(list.end(), words[i].begin(), words[i].end());
         list[i] = static_cast<int32_t>(list.size());
       }
       params.num_bad_words = static_cast<int32_t>(words.size());
     }},
    {"logprobs",
     [](SequenceParams& params, const pybind11::handle& value) {
       if (!value.is_none()) params.num_logprobs = value.cast<int>();
     }},
    {"logprobs_mode",
     [](SequenceParams& params, const pybind11::handle& value) {
       params.raw_logprobs = value.cast<std::string>() == "raw";
     }},
};

/// What a request's grammar is to Python: pybind11 holds no pointers to const.
struct PythonGrammar {
  std::shared_ptr<const CompiledGrammar> grammar;
};

inline SequenceParams make_sequence_params(
    const pybind11::object& sampling, int max_tokens, int num_prompt_logprobs, bool reports_steps,
    const std::optional<PythonGrammar>& grammar,
    const std::optional<std::shared_ptr<GrammarTally>>& tally, const std::string& owner) {
  SequenceParams params;
  params.owner = owner;
  if (tally) params.grammar_tally = *tally;
  if (grammar) params.grammar = grammar->grammar;
  read_fields(params, sampling, kSamplingFields);
  params.max_tokens = max_tokens;
  params.num_prompt_logprobs = num_prompt_logprobs;
  params.reports_steps = reports_steps;
  OPENSPEC_CHECK_ARG(params.num_logprobs <= kMaxLogprobs && num_prompt_logprobs <= kMaxLogprobs,
                     "at most ", kMaxLogprobs, " logprobs");
  return params;
}

}  // namespace openspec
