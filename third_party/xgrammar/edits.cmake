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
