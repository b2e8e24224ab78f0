#pragma once

#include <utility>

#include "core/check.h"

namespace openspec::library {

/// Throws ArgumentError with the message of what the library threw, without its place in the
/// library's source. Called while an exception is handled.
[[noreturn]] void rethrow_as_argument_error();

/// What `call` returns; what the library throws becomes an ArgumentError, but for
/// WorkStopped.
template <typename Call>
auto checked(Call&& call) {
  try {
    return std::forward<Call>(call)();
  } catch (...) {
    rethrow_as_argument_error();
  }
}

}  // namespace openspec::library
