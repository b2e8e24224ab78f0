#pragma once

namespace openspec {

/// A rank's way to the sums of all ranks. In a pass rounds follow each other, the same on every
/// rank: each lays its splits' sums of a matrix among those of the others, then all add all.
class SumExchange {
 public:
  virtual ~SumExchange() = default;
  /// Begins a round: where the linear leaves its sums, [num_splits of the whole matrix, num_rows,
  /// hidden_size] fp32. They stay until the round after the next begins.
  virtual float* begin() = 0;
  /// The sums of all ranks are there for what the rank runs from here on. Throws if another rank
  /// has failed.
  virtual void await() = 0;
};

}  // namespace openspec
