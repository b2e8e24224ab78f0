#pragma once

#include <cstdint>

#include "kernels/linear/formats.h"

namespace openspec {

/// What a linear does with its product before writing it.
enum class LinearEpilogue : uint8_t {
  kNone,    // out = x W^T
  kSwiGlu,  // W holds gate and up; out[:, j] = silu(gate_j) * up_j, out has num_outputs / 2 columns
};

/// The order of the weights within a panel of 32 output columns.
enum class LinearLayout : uint8_t {
  kLines,  // [num_inputs][32]; a line interleaves columns i and i + 16, so that a shift and a
           // mask of 32-bit lanes unpack it
  kPairs,  // [num_inputs / 32][2 halves][16 pairs of k][16 columns][2]: what a matrix unit takes
  kTiles,  // CUDA: units of 16 outputs, [num_outputs / 16][num_inputs / 8][16 outputs][8 k]; see
           // linear_cuda
};

/// Which part of a whole matrix a PackedLinear is: a range of its outputs, or one of its inputs
/// that begins and ends at borders of the whole's splits. Of a SwiGLU matrix, a range of outputs is
/// the same range of gate and up, counted in both together.
struct LinearShard {
  int first_output = 0, first_input = 0;
  int whole_outputs = 0, whole_inputs = 0;  // of the whole matrix; 0: as many as are here
};

/// A weight matrix repacked for streaming, or a shard of one. On the CPU: panels of `kLinearPanel`
/// output columns, zero-padded to whole panels; a SwiGLU matrix alternates gate and up panels. Made
/// once at load by linear_pack_cpu. `data` should be aligned to 64 bytes: a line is then one cache
/// line.
struct PackedLinear {
  const void* data = nullptr;
  int num_outputs = 0;  // N of what is here, gate and up together for SwiGLU
  int num_inputs = 0;   // K of what is here
  LinearLayout layout = LinearLayout::kLines;
  LinearEpilogue epilogue = LinearEpilogue::kNone;
  // [num_outputs] or null: added to the whole fp32 sum before it is rounded. Of a matrix without
  // epilogue whose sums are not split.
  const float* bias = nullptr;
  // kTiles: parts of the whole matrix's inputs whose sums are taken apart, then added in order
  int num_splits = 1;
  MatrixFormat format = MatrixFormat::kBF16;
  const void* scales = nullptr;  // of `format`, which may have none
  LinearShard shard = {};

  constexpr int whole_outputs() const {
    return shard.whole_outputs > 0 ? shard.whole_outputs : num_outputs;
  }
  constexpr int whole_inputs() const {
    return shard.whole_inputs > 0 ? shard.whole_inputs : num_inputs;
  }
  constexpr bool has_all_outputs() const { return num_outputs == whole_outputs(); }
  constexpr bool has_all_inputs() const { return num_inputs == whole_inputs(); }
};

}  // namespace openspec
