#include "runtime/drafting/drafter.h"

#include "core/check.h"

namespace openspec {

namespace {
// A function's static: registrations in other files may run first.
std::map<std::string, DrafterFactory>& registry() {
  static std::map<std::string, DrafterFactory> factories;
  return factories;
}
}  // namespace

int DrafterConfig::integer(const std::string& name, int fallback, int low, int high) const {
  const auto found = options.find(name);
  if (found == options.end()) return fallback;
  const auto* value = std::get_if<int64_t>(&found->second);
  OPENSPEC_CHECK_ARG(value != nullptr, name, " must be an integer");
  OPENSPEC_CHECK_ARG(*value >= low && *value <= high, name, " must be in [", low, ", ", high,
                     "], got ", *value);
  return static_cast<int>(*value);
}

bool DrafterConfig::flag(const std::string& name, bool fallback) const {
  const auto found = options.find(name);
  if (found == options.end()) return fallback;
  const auto* value = std::get_if<bool>(&found->second);
  OPENSPEC_CHECK_ARG(value != nullptr, name, " must be true or false");
  return *value;
}

const HeadSpec& DrafterConfig::the_head() const {
  OPENSPEC_CHECK_ARG(head.has_value(), "this method needs a draft head");
  return *head;
}

DrafterRegistration::DrafterRegistration(const std::string& name, DrafterFactory factory) {
  registry().emplace(name, factory);
}

std::vector<std::string> drafter_names() {
  std::vector<std::string> names;
  for (const auto& [name, factory] : registry()) names.push_back(name);
  return names;
}

std::unique_ptr<Drafter> make_drafter(const std::string& name, const DrafterConfig& config) {
  const auto found = registry().find(name);
  if (found == registry().end()) {
    std::string known;
    for (const std::string& other : drafter_names()) known += (known.empty() ? "" : ", ") + other;
    detail::fail<ArgumentError>("no drafter is called ", name, "; there are: ", known);
  }
  return found->second(config);
}

}  // namespace openspec
