#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/drafting/draft_source.h"
#include "runtime/drafting/drafter.h"
#include "runtime/drafting/runner_config.h"

namespace openspec {

/// Offers what a drafter proposes, whether it works on arrays in host memory or sequence by
/// sequence.
class DrafterSource final : public DraftSource {
 public:
  DrafterSource(const RunnerConfig& config, Drafter& drafter, const SequenceTable& table,
                const ExecContext& exec)
      : config_(config), drafter_(drafter), table_(table), exec_(exec) {}

  DraftSourceId id() const override { return kDrafterDrafts; }
  void offer(std::span<const ProposeRequest> wanted, std::span<Draft> drafts) override;

 private:
  void offer_arrays(std::span<const ProposeRequest> wanted, std::span<Draft> drafts);

  const RunnerConfig& config_;
  Drafter& drafter_;
  const SequenceTable& table_;
  const ExecContext& exec_;
  std::vector<int32_t> seq_, num_wanted_, drafts_, num_drafts_, parents_;
  std::vector<float> scores_;
};

}  // namespace openspec
