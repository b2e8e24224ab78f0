#pragma once

#include <utility>

#include "core/check.h"

namespace openspec::library {

/// What the library says of a grammar, in words about its own insides.
struct Complaint : ArgumentError {
  using ArgumentError::ArgumentError;
};

/// Throws a Complaint with the message of what the library threw, without its place in the
/// library's source; our own ArgumentErrors and WorkStopped pass. Called while an exception is
/// handled.
[[noreturn]] void rethrow_as_complaint();

/// What `call` returns; what the library throws becomes a Complaint, but for WorkStopped.
template <typename Call>
auto checked(Call&& call) {
  try {
    return std::forward<Call>(call)();
  } catch (...) {
    rethrow_as_complaint();
  }
}

}  // namespace openspec::library
