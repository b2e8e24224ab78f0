#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/drafting/draft_source.h"
#include "runtime/drafting/drafter.h"

namespace openspec {

/// Offers what a drafter proposes, whether it works on arrays in host memory or sequence by
/// sequence.
class DrafterSource final : public DraftSource {
 public:
  /// `max_drafts` of a sequence; `max_rows` of a step.
  DrafterSource(Drafter& drafter, const SequenceTable& table, const ExecContext& exec,
                int max_drafts, int max_rows)
      : drafter_(drafter),
        table_(table),
        exec_(exec),
        max_drafts_(max_drafts),
        max_rows_(max_rows) {}

  DraftSourceId id() const override { return kDrafterDrafts; }
  void offer(std::span<const ProposeRequest> wanted, std::span<Draft> drafts) override;

 private:
  void offer_arrays(std::span<const ProposeRequest> wanted, std::span<Draft> drafts);

  Drafter& drafter_;
  const SequenceTable& table_;
  const ExecContext& exec_;
  int max_drafts_, max_rows_;
  std::vector<int32_t> seq_, num_wanted_, drafts_, num_drafts_, parents_;
  std::vector<float> scores_;
};

}  // namespace openspec
