#include "core/check.h"
#include "runtime/drafting/drafter.h"

namespace openspec {
namespace {

/// Plain decoding: proposes nothing and needs nothing.
class NoDrafter final : public Drafter {
 public:
  const DrafterNeeds& needs() const override { return needs_; }

 private:
  DrafterNeeds needs_;
};

const DrafterRegistration kRegistration("none",
                                        [](const RunnerConfig& config) -> std::unique_ptr<Drafter> {
                                          OPENSPEC_CHECK_ARG(config.method_options.empty(),
                                                             "plain decoding takes no options");
                                          return std::make_unique<NoDrafter>();
                                        });

}  // namespace
}  // namespace openspec
