// Compiling grammars as Python sees it, without torch. See python/openspec/_grammar.pyi.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/packed.h"
#include "core/check.h"
#include "grammar/compiled_grammar.h"
#include "grammar/grammar_state.h"
#include "grammar/vocabulary.h"

namespace py = pybind11;

namespace openspec {
namespace {

using VocabularyPtr = std::shared_ptr<const Vocabulary>;
using CompiledPtr = std::shared_ptr<const CompiledGrammar>;

/// Python's Vocabulary: pybind11 holds no pointers to const.
struct PythonVocabulary {
  VocabularyPtr vocabulary;
};

template <typename Compile>
py::bytes compiled(const Compile& compile) {
  std::string data;
  {
    py::gil_scoped_release nogil;
    data = compile()->serialize();
  }
  return packed(data);
}

std::vector<int32_t> mask_of(GrammarState& state, bool& is_applied) {
  std::vector<int32_t> mask(static_cast<size_t>(state.vocabulary().num_mask_words()), -1);
  is_applied = state.fill(mask);
  return mask;
}

}  // namespace
}  // namespace openspec

PYBIND11_MODULE(_grammar, m) {
  using namespace openspec;
  m.doc() = "Grammars: compiled for a vocabulary, and matched.";
  py::class_<PythonVocabulary>(m, "Vocabulary", py::module_local())
      .def(py::init([](const std::vector<std::string>& tokens, int vocab_size,
                       const std::vector<int32_t>& stop_ids) {
             py::gil_scoped_release nogil;
             return PythonVocabulary{
                 std::make_shared<const Vocabulary>(tokens, vocab_size, stop_ids)};
           }),
           py::arg("tokens"), py::arg("vocab_size"), py::arg("stop_ids"))
      .def_property_readonly("size",
                             [](const PythonVocabulary& self) { return self.vocabulary->size(); })
      .def_property_readonly(
          "max_token_chars",
          [](const PythonVocabulary& self) { return self.vocabulary->max_token_chars(); })
      .def(
          "tokenize",
          [](const PythonVocabulary& self, const std::string& text, int most) {
            return self.vocabulary->tokenize(text, most);
          },
          py::arg("text"), py::arg("most"));
  m.def(
      "compile_json_schema",
      [](const PythonVocabulary& vocabulary, const std::string& schema, bool any_whitespace,
         bool strict, bool any_order, int max_whitespace, int num_threads) {
        return compiled([&] {
          return CompiledGrammar::json_schema(vocabulary.vocabulary, schema,
                                              {.any_whitespace = any_whitespace,
                                               .strict = strict,
                                               .any_order = any_order,
                                               .max_whitespace = max_whitespace},
                                              num_threads);
        });
      },
      py::arg("vocabulary"), py::arg("schema"), py::kw_only(), py::arg("any_whitespace") = true,
      py::arg("strict") = true, py::arg("any_order") = false, py::arg("max_whitespace") = -1,
      py::arg("num_threads") = 1);
  m.def(
      "compile_json_object",
      [](const PythonVocabulary& vocabulary, int num_threads) {
        return compiled(
            [&] { return CompiledGrammar::json_object(vocabulary.vocabulary, num_threads); });
      },
      py::arg("vocabulary"), py::kw_only(), py::arg("num_threads") = 1);
  m.def(
      "compile_regex",
      [](const PythonVocabulary& vocabulary, const std::string& pattern, int num_threads) {
        return compiled(
            [&] { return CompiledGrammar::regex(vocabulary.vocabulary, pattern, num_threads); });
      },
      py::arg("vocabulary"), py::arg("pattern"), py::kw_only(), py::arg("num_threads") = 1);
  m.def(
      "compile_ebnf",
      [](const PythonVocabulary& vocabulary, const std::string& text, int num_threads) {
        return compiled(
            [&] { return CompiledGrammar::ebnf(vocabulary.vocabulary, text, num_threads); });
      },
      py::arg("vocabulary"), py::arg("text"), py::kw_only(), py::arg("num_threads") = 1);
  m.def(
      "compile_structural_tag",
      [](const PythonVocabulary& vocabulary, const std::string& json, int num_threads) {
        return compiled([&] {
          return CompiledGrammar::structural_tag(vocabulary.vocabulary, json, num_threads);
        });
      },
      py::arg("vocabulary"), py::arg("json"), py::kw_only(), py::arg("num_threads") = 1);
  m.def(
      "json_schema_rules",
      [](const std::string& schema) {
        py::gil_scoped_release nogil;
        return CompiledGrammar::json_schema_rules(schema);
      },
      py::arg("schema"));
  py::class_<GrammarState>(m, "Matcher", py::module_local())
      .def(py::init([](const PythonVocabulary& vocabulary, const py::bytes& packed) {
             const std::string data = unpacked(packed);
             py::gil_scoped_release nogil;
             return std::make_unique<GrammarState>(
                 CompiledGrammar::deserialize(vocabulary.vocabulary, data));
           }),
           py::arg("vocabulary"), py::arg("data"))
      .def("accept", &GrammarState::accept, py::arg("token_id"))
      .def("rollback", &GrammarState::rollback, py::arg("num_tokens"))
      .def_property_readonly("is_terminated", &GrammarState::is_ended)
      .def("bitmask",
           [](GrammarState& self) {
             bool is_applied;
             const std::vector<int32_t> mask = mask_of(self, is_applied);
             return py::bytes(reinterpret_cast<const char*>(mask.data()),
                              mask.size() * sizeof(int32_t));
           })
      .def("allowed",
           [](GrammarState& self) {
             bool is_applied;
             const std::vector<int32_t> mask = mask_of(self, is_applied);
             std::vector<int> ids;
             for (int id = 0; id < self.vocabulary().size(); ++id) {
               const auto word = static_cast<uint32_t>(mask[static_cast<size_t>(id / 32)]);
               if (!is_applied || (word >> (id % 32) & 1) != 0) ids.push_back(id);
             }
             return ids;
           })
      .def("offer", &GrammarState::offer, py::arg("most"));
}
