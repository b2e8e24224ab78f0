#pragma once

#include <cstdint>

namespace openspec {

/// What mixtures of experts have done, each layer of them in each pass.
struct ExpertCounts {
  uint64_t num_layers = 0;
  uint64_t num_experts = 0;  // that had rows, so that their weights were read
  uint64_t num_rows = 0;     // of all experts together

  ExpertCounts& operator+=(const ExpertCounts& other) {
    num_layers += other.num_layers;
    num_experts += other.num_experts;
    num_rows += other.num_rows;
    return *this;
  }
  friend ExpertCounts operator-(const ExpertCounts& now, const ExpertCounts& before) {
    return {now.num_layers - before.num_layers, now.num_experts - before.num_experts,
            now.num_rows - before.num_rows};
  }
  /// Of a layer, on average; 0: there is none.
  double experts_per_layer() const {
    return num_layers == 0 ? 0.0
                           : static_cast<double>(num_experts) / static_cast<double>(num_layers);
  }
};

}  // namespace openspec
