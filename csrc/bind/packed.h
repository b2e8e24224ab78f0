#pragma once

/// What both modules show of grammars. Serialised ones cross processes compressed: the library
/// writes text, up to tens of MB.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "core/check.h"
#include "grammar/vocabulary.h"

namespace openspec {

/// With the GIL held; the work itself is done without.
inline pybind11::bytes packed(const std::string& data) {
  return pybind11::module_::import("zlib").attr("compress")(pybind11::bytes(data), 1);
}

inline std::string unpacked(const pybind11::bytes& data) {
  try {
    return pybind11::module_::import("zlib").attr("decompress")(data).cast<std::string>();
  } catch (const pybind11::error_already_set&) {
    throw ArgumentError("not a compiled grammar");
  }
}

/// Python's Vocabulary: pybind11 holds no pointers to const.
struct PythonVocabulary {
  std::shared_ptr<const Vocabulary> vocabulary;
};

inline pybind11::class_<PythonVocabulary> bind_vocabulary(pybind11::module_& m) {
  return pybind11::class_<PythonVocabulary>(m, "Vocabulary", pybind11::module_local())
      .def(pybind11::init([](const std::vector<std::string>& tokens, int vocab_size,
                             const std::vector<int32_t>& stop_ids) {
             pybind11::gil_scoped_release nogil;
             return PythonVocabulary{
                 std::make_shared<const Vocabulary>(tokens, vocab_size, stop_ids)};
           }),
           pybind11::arg("tokens"), pybind11::arg("vocab_size"), pybind11::arg("stop_ids"));
}

}  // namespace openspec
