#include "runtime/drafting/drafter.h"

#include <charconv>

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

std::string DrafterConfig::text(const std::string& name, const std::string& fallback) const {
  const auto found = options.find(name);
  if (found == options.end()) return fallback;
  const auto* value = std::get_if<std::string>(&found->second);
  OPENSPEC_CHECK_ARG(value != nullptr, name, " must be a string");
  return *value;
}

double DrafterConfig::number(const std::string& name, double fallback) const {
  const auto found = options.find(name);
  if (found == options.end()) return fallback;
  if (const auto* whole = std::get_if<int64_t>(&found->second)) {
    return static_cast<double>(*whole);
  }
  const auto* value = std::get_if<double>(&found->second);
  OPENSPEC_CHECK_ARG(value != nullptr, name, " must be a number");
  return *value;
}

bool DrafterConfig::flag(const std::string& name, bool fallback) const {
  const auto found = options.find(name);
  if (found == options.end()) return fallback;
  const auto* value = std::get_if<bool>(&found->second);
  OPENSPEC_CHECK_ARG(value != nullptr, name, " must be true or false");
  return *value;
}

std::vector<float> DrafterConfig::numbers(const std::string& name) const {
  const auto found = options.find(name);
  if (found == options.end()) return {};
  const auto* values = std::get_if<std::vector<double>>(&found->second);
  OPENSPEC_CHECK_ARG(values != nullptr, name, " must be a list of numbers");
  return {values->begin(), values->end()};
}

std::vector<int> DrafterConfig::layers(const std::string& name) const {
  const std::string list = text(name, "");
  std::vector<int> layers;
  const char* at = list.data();
  const char* end = at + list.size();
  while (at < end) {
    int layer = 0;
    const auto [next, error] = std::from_chars(at, end, layer);
    OPENSPEC_CHECK_ARG(error == std::errc() && (next == end || *next == ','), name,
                       " must be numbers with commas between, got ", list);
    OPENSPEC_CHECK_ARG(layer >= 0 && layer < target.num_layers, name, ": layer ", layer,
                       " is outside the target's ", target.num_layers);
    OPENSPEC_CHECK_ARG(layers.empty() || layer > layers.back(), name, " must rise, got ", list);
    layers.push_back(layer);
    at = next == end ? end : next + 1;
  }
  OPENSPEC_CHECK_ARG(!layers.empty(), name, " is empty");
  return layers;
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
