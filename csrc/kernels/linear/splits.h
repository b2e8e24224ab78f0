#pragma once

/// How the inputs of a matrix are split: parts whose sums are taken apart, then added in order. The
/// splits decide bits, so they follow from the whole matrix's shape alone, on every device.

#include "core/host_device.h"

namespace openspec {

inline constexpr int kSplitUnit = 32;  // inputs: splits begin at multiples of it
inline constexpr int kMaxSplits = 8;

struct InputRange {
  int begin = 0, end = 0;

  OPENSPEC_HD constexpr int size() const { return end - begin; }
};

/// Splits [begin, end).
struct SplitRange {
  int begin = 0, end = 0;

  OPENSPEC_HD constexpr int size() const { return end - begin; }
};

/// Inputs of split `split` of `num_splits`: whole units, of which two splits differ by one at most;
/// of the last one as many as there are.
OPENSPEC_HD constexpr InputRange split_inputs(int whole_inputs, int num_splits, int split) {
  const int num_units = (whole_inputs + kSplitUnit - 1) / kSplitUnit;
  const int begin = num_units * split / num_splits * kSplitUnit;
  const int end = num_units * (split + 1) / num_splits * kSplitUnit;
  return {begin, end < whole_inputs ? end : whole_inputs};
}

/// Splits of a matrix whose sums may stay apart (o, down, fc): a power of two, at most kMaxSplits
/// and at most one for each unit of inputs. So many devices can share it at most.
OPENSPEC_HD constexpr int linear_num_splits(int whole_outputs, int whole_inputs) {
  constexpr int kFillsDevice = 9600;  // outputs times splits that occupy a GPU evenly
  constexpr int kMinInputs = 512;     // of a split: a chain on the GPU should outlast its latencies
  constexpr int kMaxInputs = 5120;    // activations of longer chains need more registers there
  // Not for speed: layers that eight devices share, the smallest tests' among them, have eight.
  const bool has_most = whole_outputs >= 5120 || whole_outputs <= 256;
  const int fewest = has_most ? kMaxSplits : whole_inputs < 2048 ? 4 : 1;
  int num_splits = 1;
  while (num_splits < kMaxSplits && 2 * num_splits * kSplitUnit <= whole_inputs) {
    const bool is_faster =
        whole_inputs >= 2 * num_splits * kMinInputs &&
        (whole_outputs * num_splits < kFillsDevice || whole_inputs > num_splits * kMaxInputs);
    if (num_splits >= fewest && !is_faster) break;
    num_splits *= 2;
  }
  return num_splits;
}

}  // namespace openspec
