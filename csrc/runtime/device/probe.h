#pragma once

#include <vector>

#include "runtime/device/rank_team.h"

namespace openspec {

/// Looks at what the last collected step left on the first rank's device, or on another's, for
/// tests; see StepBackend.
class DeviceProbe {
 public:
  explicit DeviceProbe(RankTeam& ranks) : rank_(&ranks.first()) {}

  void look_at(const RankStep& rank) { rank_ = &rank; }
  void note_collected(int num_spans, int num_rows, int num_samples);
  std::vector<float> logits() const;
  std::vector<float> features(int num_captures) const;
  std::vector<Draft> drafts() const;

 private:
  const RunnerConfig& config() const { return rank_->context().config; }
  template <typename T>
  std::vector<T> download(const T* from, size_t count) const;

  const RankStep* rank_;
  int num_spans_ = 0, num_rows_ = 0, num_logits_ = 0;
};

}  // namespace openspec
