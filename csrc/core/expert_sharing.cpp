#include "core/expert_sharing.h"

#include <algorithm>
#include <cmath>

namespace openspec {

void ExpertSharing::Share::observe(double new_counted, double new_rows) {
  constexpr double kKept = 0.98;  // of what was seen before: about the last 50 steps count
  counted = kKept * counted + std::clamp(new_counted, 0.0, 2.0 * new_rows);
  rows = kKept * rows + new_rows;
}

double ExpertSharing::expected(int num_seqs, double num_rows) const {
  const double further = std::max(0.0, num_rows - num_seqs);
  const double unrelated = 1.0 + of_sequences() * (num_seqs - 1) + of_drafts() * further;
  const double missed = 1.0 - static_cast<double>(top_k_) / num_experts_;
  return num_experts_ * (1.0 - std::pow(missed, unrelated));
}

void ExpertSharing::observe(int num_seqs, int num_rows, double num_experts) {
  // Where nearly all experts are expected to have rows, their number says little of the rows'. Were
  // it left out by what came, steps of few experts would be all that counts.
  constexpr double kMostShare = 0.9, kLeastMissed = 0.01;
  if (num_rows < 2 || num_seqs < 1) return;
  if (expected(num_seqs, num_rows) > kMostShare * num_experts_) return;
  const double missed = 1.0 - static_cast<double>(top_k_) / num_experts_;
  const double left = std::max(1.0 - num_experts / num_experts_, kLeastMissed);
  const double further = std::log(left) / std::log(missed) - 1.0;
  if (num_rows > num_seqs) {
    drafts_.observe(further - of_sequences() * (num_seqs - 1), num_rows - num_seqs);
  } else {
    sequences_.observe(further, num_seqs - 1);
  }
}

}  // namespace openspec
