// Compiling grammars as Python sees it, without torch. See python/openspec/_grammar.pyi.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bind/packed.h"
#include "grammar/compiled_grammar.h"
#include "grammar/grammar_state.h"
#include "grammar/library.h"

namespace py = pybind11;

namespace openspec {
namespace {

/// All tokens where the answer has ended.
std::vector<int32_t> mask_of(GrammarState& state) {
  std::vector<int32_t> mask(static_cast<size_t>(state.vocabulary().num_mask_words()), -1);
  state.fill(mask);
  return mask;
}

}  // namespace
}  // namespace openspec

PYBIND11_MODULE(_grammar, m) {
  using namespace openspec;
  m.doc() = "Grammars: compiled for a vocabulary, and matched.";
  py::register_exception<library::Complaint>(m, "Complaint", PyExc_ValueError);
  bind_vocabulary(m)
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
      "compile_structural_tag",
      [](const PythonVocabulary& vocabulary, const std::string& json) {
        std::string data;
        {
          py::gil_scoped_release nogil;
          data = CompiledGrammar::structural_tag(vocabulary.vocabulary, json)->serialize();
        }
        return packed(data);
      },
      py::arg("vocabulary"), py::arg("json"));
  m.def("lark_as_ebnf", &lark_as_ebnf, py::arg("lark"));
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
             const std::vector<int32_t> mask = mask_of(self);
             return py::bytes(reinterpret_cast<const char*>(mask.data()),
                              mask.size() * sizeof(int32_t));
           })
      .def("allowed",
           [](GrammarState& self) {
             const std::vector<int32_t> mask = mask_of(self);
             std::vector<int> ids;
             for (int id = 0; id < self.vocabulary().size(); ++id) {
               const auto word = static_cast<uint32_t>(mask[static_cast<size_t>(id / 32)]);
               if ((word >> (id % 32) & 1) != 0) ids.push_back(id);
             }
             return ids;
           })
      .def("offer", &GrammarState::offer, py::arg("most"));
}
