#include "model/targets/target.h"

#include <map>

#include "core/check.h"

namespace openspec {

namespace {
// A function's static: registrations in other files may run first.
std::map<std::string, TargetKind>& registry() {
  static std::map<std::string, TargetKind> kinds;
  return kinds;
}
}  // namespace

TargetRegistration::TargetRegistration(const std::string& name, const TargetKind& kind) {
  registry().emplace(name, kind);
}

const TargetKind& target_kind(const std::string& name) {
  const auto found = registry().find(name);
  if (found == registry().end()) {
    std::string known;
    for (const auto& [other, kind] : registry()) known += (known.empty() ? "" : ", ") + other;
    detail::fail<ArgumentError>("no kind of target is called ", name, "; there are: ", known);
  }
  return found->second;
}

}  // namespace openspec
