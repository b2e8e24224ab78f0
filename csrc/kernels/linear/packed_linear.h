#pragma once

#include <cstdint>

#include "kernels/linear/formats.h"
#include "kernels/linear/panels_cpu.h"
#include "kernels/linear/splits.h"

namespace openspec {

/// What a linear does with its product before writing it.
enum class LinearEpilogue : uint8_t {
  kNone,    // out = x W^T
  kSwiGlu,  // W holds gate and up; out[:, j] = silu(gate_j) * up_j, out has num_outputs / 2 columns
};

/// The order of the weights within a panel of 32 output columns.
enum class LinearLayout : uint8_t {
  kLines,  // [num_inputs][32]; a line interleaves columns i and i + 16, so that shifts and masks
           // of 32-bit lanes unpack it
  kPairs,  // [num_inputs / 32][2 halves][16 pairs of k][16 columns][2]: what a matrix unit takes
  kTiles,  // CUDA: units of 16 outputs, of bf16 [num_outputs / 16][num_inputs / 8][16 outputs][8
           // k], of e4m3 [num_outputs / 16][num_inputs / 16][32 lanes][8 bytes], see
           // weight_form.cuh
};

/// Which part of a whole matrix a PackedLinear is: a range of its outputs, or one of its inputs
/// that begins and ends at borders of the whole's splits. Of a matrix of several tensors (q, k and
/// v; gate and up), a range of outputs is one of each, counted in all together.
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
  int num_splits = 1;  // of the whole matrix's inputs (splits.h), whichever are here
  MatrixFormat format = MatrixFormat::kBF16;
  ScaleKind scale_kind = ScaleKind::kNone;
  // Of outputs in the order in which they are packed (packed_output). kOutput: [num_outputs],
  // kLines and kPairs padded to whole panels. kBlock: kTiles [num_outputs / 8][num_scale_blocks()],
  // of 8 packed outputs at once, else [panels][num_scale_blocks()][32].
  const float* scales = nullptr;
  LinearShard shard = {};

  OPENSPEC_HD constexpr int whole_outputs() const {
    return shard.whole_outputs > 0 ? shard.whole_outputs : num_outputs;
  }
  OPENSPEC_HD constexpr int whole_inputs() const {
    return shard.whole_inputs > 0 ? shard.whole_inputs : num_inputs;
  }
  constexpr bool has_all_outputs() const { return num_outputs == whole_outputs(); }
  constexpr bool has_all_inputs() const { return num_inputs == whole_inputs(); }
  /// The block of the whole's inputs that `input` of what is here lies in.
  OPENSPEC_HD constexpr int scale_block(int input) const {
    return (shard.first_input + input) / kScaleInputs;
  }
  /// Blocks whose inputs are here, if only some: entry b of the table is block scale_block(0) + b.
  OPENSPEC_HD constexpr int num_scale_blocks() const {
    return scale_block(num_inputs - 1) - scale_block(0) + 1;
  }
  /// Where an output lies among the packed ones: SwiGLU alternates runs of gate and of up.
  OPENSPEC_HD constexpr int packed_output(int output) const {
    if (epilogue != LinearEpilogue::kSwiGlu) return output;
    const int run = layout == LinearLayout::kTiles ? 8 : kLinearPanel;
    const int part = output / (num_outputs / 2), column = output % (num_outputs / 2);
    return (column / run * 2 + part) * run + column % run;
  }
  /// Packed outputs, with those that fill up panels.
  constexpr int num_packed() const {
    const int parts = epilogue == LinearEpilogue::kSwiGlu ? 2 : 1;
    if (layout == LinearLayout::kTiles) return num_outputs;
    return parts * ((num_outputs / parts + kLinearPanel - 1) / kLinearPanel) * kLinearPanel;
  }
  constexpr int num_scales() const {
    if (scale_kind == ScaleKind::kNone) return 0;
    if (scale_kind == ScaleKind::kOutput) return num_packed();
    return num_packed() / (layout == LinearLayout::kTiles ? 8 : 1) * num_scale_blocks();
  }
  /// Where in `scales` that of an output is, of kBlock of the block `block` of the table.
  constexpr int scale_at(int output, int block) const {
    const int at = packed_output(output);
    if (scale_kind == ScaleKind::kOutput) return at;
    if (layout == LinearLayout::kTiles) return at / 8 * num_scale_blocks() + block;
    return (at / kLinearPanel * num_scale_blocks() + block) * kLinearPanel + at % kLinearPanel;
  }
  /// Inputs of a split that is here, counted from the first input that is.
  OPENSPEC_HD constexpr InputRange inputs_of(int split) const {
    const InputRange inputs = split_inputs(whole_inputs(), num_splits, split);
    return {inputs.begin - shard.first_input, inputs.end - shard.first_input};
  }
  /// The splits whose inputs are here; none where the inputs do not begin and end with splits.
  OPENSPEC_HD constexpr SplitRange own_splits() const {
    SplitRange own = {num_splits, 0};
    for (int split = num_splits - 1; split >= 0; --split) {
      const InputRange inputs = inputs_of(split);
      if (inputs.begin == 0) own.begin = split;
      if (inputs.end == num_inputs && own.end == 0) own.end = split + 1;
    }
    return own.begin < own.end ? own : SplitRange{};
  }
};

}  // namespace openspec
