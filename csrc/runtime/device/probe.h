#pragma once

#include <vector>

#include "runtime/device/rank_team.h"

namespace openspec {

/// Looks at what the last collected step left on the first rank's device, or on another's, for
/// tests; see StepBackend.
class DeviceProbe {
 public:
  explicit DeviceProbe(RankTeam& ranks) : ranks_(ranks), rank_(&ranks.first()) {}

  void look_at(const RankStep& rank) { rank_ = &rank; }
  /// `num_enqueued`: the samples with those that were only made room for.
  void note_collected(int num_spans, int num_rows, int num_samples, int num_enqueued);
  /// Rows that were dealt are their ranks', whichever it looks at.
  std::vector<float> logits() const;
  std::vector<float> features(int num_captures) const;
  std::vector<Draft> drafts() const;

 private:
  const RunnerConfig& config() const { return rank_->context().config; }
  template <typename T>
  std::vector<T> download(const T* from, size_t count) const;

  RankTeam& ranks_;
  const RankStep* rank_;
  int num_spans_ = 0, num_rows_ = 0;
  int num_logits_ = 0, num_shared_ = 0;  // rows in the last block, and with padding
};

}  // namespace openspec
