#pragma once

#include <sstream>
#include <stdexcept>

namespace openspec {

/// A broken invariant of the engine. Crosses into Python as `openspec.EngineError`.
class EngineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An argument that the caller must mend. Crosses into Python as `ValueError`.
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

namespace detail {
template <typename Error, typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}
}  // namespace detail

}  // namespace openspec

/// For values that cross a layer: throws ArgumentError with the given message parts.
#define OPENSPEC_CHECK_ARG(condition, ...)                                              \
  do {                                                                                  \
    if (!(condition)) ::openspec::detail::fail<::openspec::ArgumentError>(__VA_ARGS__); \
  } while (false)

/// For what must hold inside the engine: throws EngineError with the given message parts.
#define OPENSPEC_CHECK(condition, ...)                                                \
  do {                                                                                \
    if (!(condition)) ::openspec::detail::fail<::openspec::EngineError>(__VA_ARGS__); \
  } while (false)
