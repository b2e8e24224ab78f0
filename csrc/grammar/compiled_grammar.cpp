#include "grammar/compiled_grammar.h"

#include <grammar_impl.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <sstream>
#include <utility>
#include <variant>

#include "grammar/classes_library.h"
#include "grammar/library.h"
#include "grammar/shortest_text.h"

namespace openspec {

namespace {

/// What python/openspec/grammar calls its rules with a budget of characters (formats.py).
constexpr std::string_view kLengthRule = "text_of_length";

/// Rules with attributes that make a mask depend on how the text came about, or change more than
/// the mask. The library prints them after a rule's name, at the beginning of a line, and line
/// breaks within strings as escapes.
void check_attributes(const xgrammar::Grammar& grammar) {
  std::istringstream lines(grammar.ToString());
  for (std::string line; std::getline(lines, line);) {
    const std::string_view head = std::string_view(line).substr(0, line.find("::="));
    const size_t bracket = head.find('[');
    const auto is_name = [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.' || c == '-';
    };
    if (bracket == 0 || bracket == head.npos) continue;
    const std::string_view name = head.substr(0, bracket);
    if (!std::all_of(name.begin(), name.end(), is_name)) continue;
    const std::string_view list = head.substr(bracket, head.find('"') - bracket);
    for (const std::string attribute : {"max_tokens", "max_chars", "temperature"}) {
      if (list.find(attribute + "=") == list.npos) continue;
      // Of characters without an end of their own, so that the budget is never exceeded.
      if (attribute == "max_chars" && name.starts_with(kLengthRule)) continue;
      throw ArgumentError("the rule " + std::string(name) + " has " + attribute +
                          ", which is not supported: leave it out");
    }
  }
}

std::vector<int32_t> named_tokens(const xgrammar::Grammar& grammar) {
  std::set<int32_t> found;
  const auto& fsm = grammar->complete_fsm;
  for (int state = 0; state < fsm.NumStates(); ++state) {
    for (const auto& edge : fsm.GetEdges(state)) {
      if (!edge.IsToken()) continue;
      const auto info = fsm.GetTokenEdgeInfo(edge.GetAuxIndex());
      found.insert(info.TokenIds(), info.TokenIds() + info.Count());
    }
  }
  return {found.begin(), found.end()};
}

}  // namespace

CompiledGrammar::CompiledGrammar(std::shared_ptr<const Vocabulary> vocabulary,
                                 std::unique_ptr<Library> library)
    : vocabulary_(std::move(vocabulary)), library_(std::move(library)) {}

CompiledGrammar::~CompiledGrammar() = default;

template <typename Make>
std::shared_ptr<const CompiledGrammar> CompiledGrammar::make(
    std::shared_ptr<const Vocabulary> vocabulary, const Make& make) {
  auto library = library::checked([&] {
    auto made = std::make_unique<Library>(Library{make()});
    made->tags = named_tokens(made->grammar.GetGrammar());
    return made;
  });
  return std::shared_ptr<const CompiledGrammar>(
      new CompiledGrammar(std::move(vocabulary), std::move(library)));
}

std::shared_ptr<const CompiledGrammar> CompiledGrammar::structural_tag(
    std::shared_ptr<const Vocabulary> vocabulary, const std::string& json) {
  return make(vocabulary, [&] {
    const xgrammar::TokenizerInfo& info = vocabulary->library().info;
    const auto made = xgrammar::Grammar::FromStructuralTag(json, info);
    if (const auto* error = std::get_if<xgrammar::StructuralTagError>(&made)) {
      std::visit([](const auto& one) { throw library::Complaint(one.what()); }, *error);
    }
    const auto& grammar = std::get<xgrammar::Grammar>(made);
    check_attributes(grammar);
    xgrammar::CompiledGrammar compiled =
        xgrammar::GrammarCompiler(info, /*max_threads=*/1, /*cache_enabled=*/false)
            .CompileGrammar(grammar);
    check_texts_end(compiled);
    return compiled;
  });
}

std::shared_ptr<const CompiledGrammar> CompiledGrammar::deserialize(
    std::shared_ptr<const Vocabulary> vocabulary, std::string_view data) {
  return make(vocabulary, [&] {
    auto made =
        xgrammar::CompiledGrammar::DeserializeJSON(std::string(data), vocabulary->library().info);
    if (const auto* error = std::get_if<xgrammar::SerializationError>(&made)) {
      std::visit([](const auto& one) { throw library::Complaint(one.what()); }, *error);
    }
    return std::get<xgrammar::CompiledGrammar>(std::move(made));
  });
}

std::string CompiledGrammar::serialize() const {
  return library::checked([&] { return library_->grammar.SerializeJSON(); });
}

size_t CompiledGrammar::num_bytes() const { return library_->grammar.MemorySizeBytes(); }

std::string lark_as_ebnf(const std::string& lark) {
  return library::checked([&] { return xgrammar::Grammar::FromLark(lark).ToString(); });
}

}  // namespace openspec
