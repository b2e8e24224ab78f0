# What of the library's source is changed: a copy of it in the build folder, OPENSPEC_XGRAMMAR_EDITED, is compiled instead.
# The text that an edit takes out must be there exactly once, so that no edit is lost with another version.
set(OPENSPEC_XGRAMMAR_EDITED ${CMAKE_CURRENT_BINARY_DIR}/edited)
set(edited_files "")

# edit(FILE FOUND REPLACEMENT)
function(edit file found replacement)
  if(NOT file IN_LIST edited_files)
    list(APPEND edited_files ${file})
    set(edited_files "${edited_files}" PARENT_SCOPE)
    file(READ ${OPENSPEC_XGRAMMAR_TREE}/${file} content)
  else()
    set(content "${edited_${file}}")
  endif()
  string(FIND "${content}" "${found}" first)
  string(FIND "${content}" "${found}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(FATAL_ERROR "third_party/xgrammar/edits.cmake: ${file} does not hold this exactly once:\n${found}")
  endif()
  string(REPLACE "${found}" "${replacement}" content "${content}")
  set(edited_${file} "${content}" PARENT_SCOPE)
endfunction()

# A pattern may be an automaton spelled out. It is deterministic and minimal, where the library's own are neither.
edit(cpp/fsm_builder.cc [==[#include "support/utils.h"
]==] [==[#include "support/utils.h"
#include "spelled_automaton.h"
]==])
edit(cpp/fsm_builder.cc [==[  auto ir_result = ParseRegexToIR(regex, builder, rule_hint);
]==] [==[  if (SpelledAutomaton::Is(regex)) {
    auto spelled = SpelledAutomaton::Parse(regex);
    if (spelled.IsErr()) return ResultErr(std::move(spelled).UnwrapErr());
    return ResultOk(std::move(spelled).Unwrap().Build());
  }
  auto ir_result = ParseRegexToIR(regex, builder, rule_hint);
]==])
edit(cpp/fsm_builder.cc [==[  auto ir_result = ParseRegexToIR(regex, nullptr, "");
]==] [==[  if (SpelledAutomaton::Is(regex)) {
    auto spelled = SpelledAutomaton::Parse(regex);
    if (spelled.IsErr()) return ResultErr(std::move(spelled).UnwrapErr());
    return ResultOk(std::move(spelled).Unwrap().MatchesEmpty());
  }
  auto ir_result = ParseRegexToIR(regex, nullptr, "");
]==])

# States without successors are merged with each other, but not with what a state was merged with in the same round: that
# may have successors, and others would get them. (`(|[b])[\u{0}-\u{60}b-\u{d7ff}]*9` allowed "ba".)
edit(cpp/fsm.cc [==[      if (outgoing_count == 0) {
        if (result.IsEndState(i)) {]==] [==[      if (outgoing_count == 0) {
        if (union_find_set.Count(i)) continue;
        if (result.IsEndState(i)) {]==])

# The tokens behind a token that a state refuses are left out with it where they begin with it, and not where they hold
# it further on: "ccb" was refused with "cb".
edit(cpp/tokenizer_info.cc [==[(token.find(prefix_stack.top().first) == std::string::npos)]==]
     [==[(token.compare(0, prefix_stack.top().first.size(), prefix_stack.top().first) != 0)]==])

# All rules of a compiled grammar have one FSM, which is written and read once, not once for each rule: 48 kB of schema had
# 85 MB, and as many copies in memory.
edit(cpp/fsm.cc [==[picojson::value SerializeJSONValue(const CompactFSM& value) {
  return]==] [==[// What is written or read as `complete_fsm`, before the rules.
thread_local CompactFSM shared_fsm{NullObj()};

picojson::value SerializeJSONValue(const CompactFSM& value) {
  shared_fsm = value;
  return]==])
edit(cpp/fsm.cc [==[  return detail::json_serializer::AutoDeserializeJSONValuePImpl(result, value, type_name);
}

struct CompactFSMWithStartEndSerializeHelper {]==] [==[  auto error = detail::json_serializer::AutoDeserializeJSONValuePImpl(result, value, type_name);
  shared_fsm = *result;
  return error;
}

struct CompactFSMWithStartEndSerializeHelper {]==])
edit(cpp/fsm.cc [==[  CompactFSMWithStartEndSerializeHelper() = default;

  std::optional<std::string> Validate]==] [==[  CompactFSMWithStartEndSerializeHelper() : fsm(shared_fsm) {}

  std::optional<std::string> Validate]==])
edit(cpp/fsm.cc [==[    &CompactFSMWithStartEndSerializeHelper::fsm,
]==] "")
edit(cpp/fsm.cc [==[  return AutoSerializeJSONValue(CompactFSMWithStartEndSerializeHelper(value));]==]
     [==[  XGRAMMAR_CHECK(value.fsm_.ImplPtr() == shared_fsm.ImplPtr());
  return AutoSerializeJSONValue(CompactFSMWithStartEndSerializeHelper(value));]==])
edit(cpp/grammar.cc [==[    const CompactFSM& fsm = per_rule_fsms[rule_id]->GetFsm().GetFsm();
]==] [==[    const CompactFSM& fsm = per_rule_fsms[rule_id]->GetFsm().GetFsm();
    if (fsm.ImplPtr() == complete_fsm.ImplPtr()) continue;
]==])

# What must follow is looked for as far as it is wanted: it may be long, or have no end.
edit(include/xgrammar/matcher.h [==[std::string FindJumpForwardString();]==]
     [==[std::string FindJumpForwardString(int most_bytes);]==])
edit(cpp/grammar_matcher.cc [==[  std::string FindJumpForwardString();]==]
     [==[  std::string FindJumpForwardString(int most_bytes);]==])
edit(cpp/grammar_matcher.cc [==[std::string GrammarMatcher::Impl::FindJumpForwardString() {]==]
     [==[std::string GrammarMatcher::Impl::FindJumpForwardString(int most_bytes) {]==])
edit(cpp/grammar_matcher.cc [==[return trial.FindJumpForwardString();]==]
     [==[return trial.FindJumpForwardString(most_bytes);]==])
edit(cpp/grammar_matcher.cc [==[  while (can_find_next_char) {]==]
     [==[  while (can_find_next_char && num_accepted_chars < most_bytes) {]==])
edit(cpp/grammar_matcher.cc
     [==[std::string GrammarMatcher::FindJumpForwardString() { return pimpl_->FindJumpForwardString(); }]==]
     [==[std::string GrammarMatcher::FindJumpForwardString(int most_bytes) {
  return pimpl_->FindJumpForwardString(most_bytes);
}]==])

# Work is counted: of the parser by state, and of masks by state, token and word.
edit(cpp/earley_parser.cc [==[#include "support/logging.h"
]==] [==[#include "support/logging.h"
#include "work.h"
]==])
edit(cpp/earley_parser.cc [==[    Scan(state, ch);
]==] [==[    SpendWork(1);
    Scan(state, ch);
]==])
edit(cpp/earley_parser.cc [==[    ScanAtomicToken(state, token_id);
]==] [==[    SpendWork(1);
    ScanAtomicToken(state, token_id);
]==])
edit(cpp/earley_parser.cc [==[  // Check if the rule has a corresponding FSM.
]==] [==[  SpendWork(4);
  // Check if the rule has a corresponding FSM.
]==])
edit(cpp/earley_parser.cc [==[  const auto& parent_states_map = rule_id_to_completable_states_[state.rule_start_pos];
  for (const auto& [ref_id, parent_state] : parent_states_map) {
]==] [==[  const auto& parent_states_map = rule_id_to_completable_states_[state.rule_start_pos];
  for (const auto& [ref_id, parent_state] : parent_states_map) {
    SpendWork(1);
]==])
foreach(indent "      " "        ")
  edit(cpp/earley_parser.cc "
${indent}const auto in_vec = [&](const ParserState& state_) {
" "
${indent}const auto in_vec = [&](const ParserState& state_) {
${indent}  SpendWork(rule_id_to_completable_states_.Back().size() / 8 + 1);
")
endforeach()
edit(cpp/grammar_matcher.cc [==[#include "support/logging.h"
]==] [==[#include "support/logging.h"
#include "work.h"
]==])
edit(cpp/grammar_matcher.cc [==[  std::vector<int32_t> tokens_to_check = adaptive_token_mask.uncertain_indices;
]==] [==[  SpendWork(vocab.size());
  std::vector<int32_t> tokens_to_check = adaptive_token_mask.uncertain_indices;
]==])
edit(cpp/grammar_matcher.cc [==[  for (const auto& state : latest_states) {
    auto adaptive_token_mask_it]==] [==[  for (const auto& state : latest_states) {
    SpendWork(tokenizer_info_.GetVocabSize() / 256 + 1);
    auto adaptive_token_mask_it]==])
edit(cpp/grammar_matcher.cc [==[      const auto cur_token_idx = *token_it++;
]==] [==[      const auto cur_token_idx = *token_it++;
      SpendWork(1);
]==])
edit(cpp/grammar_matcher.cc [==[      IntsetUnion(&tmp_rejected_indices_delta_, adaptive_token_mask.rejected_indices);
]==] [==[      SpendWork(tmp_rejected_indices_.size() / 8 + adaptive_token_mask.rejected_indices.size() / 8);
      IntsetUnion(&tmp_rejected_indices_delta_, adaptive_token_mask.rejected_indices);
]==])

# Copies what is not edited, writes what is, and leaves alone what is as it was, so that nothing is compiled again for it.
file(GLOB_RECURSE originals RELATIVE ${OPENSPEC_XGRAMMAR_TREE} CONFIGURE_DEPENDS
     ${OPENSPEC_XGRAMMAR_TREE}/cpp/*.cc ${OPENSPEC_XGRAMMAR_TREE}/cpp/*.h ${OPENSPEC_XGRAMMAR_TREE}/include/*.h
     ${OPENSPEC_XGRAMMAR_TREE}/3rdparty/dlpack/include/*.h ${OPENSPEC_XGRAMMAR_TREE}/3rdparty/picojson/*.h)
foreach(file IN LISTS originals)
  if(file IN_LIST edited_files)
    file(CONFIGURE OUTPUT ${OPENSPEC_XGRAMMAR_EDITED}/${file} CONTENT "${edited_${file}}" @ONLY)
  else()
    get_filename_component(folder ${OPENSPEC_XGRAMMAR_EDITED}/${file} DIRECTORY)
    file(MAKE_DIRECTORY ${folder})
    configure_file(${OPENSPEC_XGRAMMAR_TREE}/${file} ${OPENSPEC_XGRAMMAR_EDITED}/${file} COPYONLY)
  endif()
endforeach()
