#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/check.h"

namespace openspec {

/// Values of a type, each known under a name. A source file adds its own with a Registration at
/// namespace scope.
template <typename T>
class Registry {
 public:
  struct Registration {
    Registration(const std::string& name, const T& value) { values().emplace(name, value); }
  };

  static std::vector<std::string> names() {
    std::vector<std::string> names;
    for (const auto& [name, value] : values()) names.push_back(name);
    return names;
  }
  /// Throws ArgumentError naming the known ones if there is none of this name; `what` says of what.
  static const T& find(const char* what, const std::string& name) {
    const auto found = values().find(name);
    if (found != values().end()) return found->second;
    std::string known;
    for (const std::string& other : names()) known += (known.empty() ? "" : ", ") + other;
    detail::fail<ArgumentError>("no ", what, " is called ", name, "; there are: ", known);
  }

 private:
  // A function's static: registrations in other files may run first.
  static std::map<std::string, T>& values() {
    static std::map<std::string, T> values;
    return values;
  }
};

}  // namespace openspec
