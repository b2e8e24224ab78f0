#pragma once

/// Serialised grammars cross processes compressed: the library writes text, up to tens of MB.

#include <pybind11/pybind11.h>

#include <string>

#include "core/check.h"

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

}  // namespace openspec
