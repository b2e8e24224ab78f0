#include "runtime/drafting/drafter.h"

#include <map>

#include "core/check.h"

namespace openspec {

namespace {
// A function's static: registrations in other files may run first.
std::map<std::string, DrafterFactory>& registry() {
  static std::map<std::string, DrafterFactory> factories;
  return factories;
}
}  // namespace

DrafterRegistration::DrafterRegistration(const std::string& name, DrafterFactory factory) {
  registry().emplace(name, factory);
}

std::vector<std::string> drafter_names() {
  std::vector<std::string> names;
  for (const auto& [name, factory] : registry()) names.push_back(name);
  return names;
}

std::unique_ptr<Drafter> make_drafter(const RunnerConfig& config) {
  const auto found = registry().find(config.method);
  if (found == registry().end()) {
    std::string known;
    for (const std::string& other : drafter_names()) known += (known.empty() ? "" : ", ") + other;
    detail::fail<ArgumentError>("no drafter is called ", config.method, "; there are: ", known);
  }
  return found->second(config);
}

}  // namespace openspec
