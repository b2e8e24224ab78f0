#include <algorithm>

#include "core/check.h"
#include "kernels/linear/linear.h"

namespace openspec {

namespace {

constexpr int kHalf = kLinearPanel / 2;
constexpr int kPairsBlock = 32;  // k's of a block

// Where the panels of a matrix lie: a SwiGLU matrix is two matrices whose panels alternate.
struct PanelMap {
  explicit PanelMap(const PackedLinear& shape)
      : is_swiglu(shape.epilogue == LinearEpilogue::kSwiGlu),
        part_outputs(is_swiglu ? shape.num_outputs / 2 : shape.num_outputs),
        part_panels((part_outputs + kLinearPanel - 1) / kLinearPanel) {}

  int num_panels() const { return is_swiglu ? 2 * part_panels : part_panels; }
  int panel(int part, int part_panel) const {
    return is_swiglu ? 2 * part_panel + part : part_panel;
  }

  bool is_swiglu;
  int part_outputs;  // outputs of one of the matrices
  int part_panels;
};

// kLines: one row, or zeros, as a column of a panel. A line interleaves columns i and i + 16, so
// that a shift and a mask of 32-bit lanes yield both halves in order.
void pack_line(const uint16_t* row, int64_t num_inputs, int column, uint16_t* panel) {
  const int position = column < kHalf ? 2 * column : 2 * (column - kHalf) + 1;
  for (int64_t k = 0; k < num_inputs; ++k) {
    panel[k * kLinearPanel + position] = row != nullptr ? row[k] : 0;
  }
}

// kLines: all 32 columns of a panel at once, two k at a time: 32-bit reads of two source rows give
// the 32-bit words of two lines.
void pack_whole_panel(const uint16_t* rows, int64_t num_inputs, uint16_t* panel) {
  constexpr int64_t kBlock = 64;  // 32 rows x 128 bytes stay in the first-level cache
  uint32_t* lines = reinterpret_cast<uint32_t*>(panel);
  for (int64_t begin = 0; begin < num_inputs; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, num_inputs);
    for (int i = 0; i < kHalf; ++i) {
      const uint16_t* low = rows + i * num_inputs;
      const uint16_t* high = rows + (i + kHalf) * num_inputs;
      for (int64_t k = begin; k < end; ++k) {
        lines[k * kHalf + i] = low[k] | (static_cast<uint32_t>(high[k]) << 16);
      }
    }
  }
}

// kPairs: the 32-bit word that holds columns' pair of k's; see LinearLayout.
int64_t pair_word(int64_t k, int column) {
  constexpr int64_t kBlockWords = kLinearPanel * kPairsBlock / 2;
  return k / kPairsBlock * kBlockWords + column / kHalf * (kBlockWords / 2) +
         k % kPairsBlock / 2 * kHalf + column % kHalf;
}

// One row, or zeros, as a column of a panel.
void pack_pairs(const uint16_t* row, int64_t num_inputs, int column, uint16_t* panel) {
  for (int64_t k = 0; k < num_inputs; k += 2) {
    uint16_t* to = panel + 2 * pair_word(k, column);
    to[0] = row != nullptr ? row[k] : 0;
    to[1] = row != nullptr ? row[k + 1] : 0;
  }
}

}  // namespace

size_t linear_packed_bytes_cpu(int num_outputs, int num_inputs, LinearEpilogue epilogue) {
  PackedLinear shape;
  shape.num_outputs = num_outputs;
  shape.epilogue = epilogue;
  return format_bytes(shape.format, PanelMap(shape).num_panels() * kLinearPanel, num_inputs);
}

void linear_pack_cpu(const PackedLinear& shape, const void* rows, int first_output, int num_rows,
                     void* packed) {
  const PanelMap map(shape);
  OPENSPEC_CHECK(!map.is_swiglu || shape.num_outputs % 2 == 0,
                 "a SwiGLU matrix has gate and up rows, got ", shape.num_outputs, " rows");
  OPENSPEC_CHECK(first_output >= 0 && num_rows >= 0 && first_output + num_rows <= shape.num_outputs,
                 "rows [", first_output, ", ", first_output + num_rows, ") of a matrix of ",
                 shape.num_outputs);
  const int64_t num_inputs = shape.num_inputs;
  const int64_t panel_elements = num_inputs * kLinearPanel;
  const bool is_pairs = shape.layout == LinearLayout::kPairs;
  OPENSPEC_CHECK(!is_pairs || num_inputs % kPairsBlock == 0, "pairs hold a multiple of ",
                 kPairsBlock, " inputs, not ", num_inputs);
  int row = 0;
  while (row < num_rows) {
    const int output = first_output + row;
    const int part = output / map.part_outputs;
    const int column = output % map.part_outputs;
    const int lane = column % kLinearPanel;
    uint16_t* panel =
        static_cast<uint16_t*>(packed) + map.panel(part, column / kLinearPanel) * panel_elements;
    const uint16_t* source = static_cast<const uint16_t*>(rows) + row * num_inputs;
    if (!is_pairs && lane == 0 &&
        std::min(num_rows - row, map.part_outputs - column) >= kLinearPanel) {
      pack_whole_panel(source, num_inputs, panel);
      row += kLinearPanel;
      continue;
    }
    const auto pack_column = is_pairs ? pack_pairs : pack_line;
    pack_column(source, num_inputs, lane, panel);
    ++row;
    if (column + 1 < map.part_outputs) continue;
    // The last column of a matrix: the panel's remaining columns are zero.
    for (int pad = lane + 1; pad < kLinearPanel; ++pad) {
      pack_column(nullptr, num_inputs, pad, panel);
    }
  }
}

size_t linear_workspace_bytes_cpu(int max_num_rows, int num_inputs, DType dtype,
                                  LinearLayout layout) {
  const auto rows = static_cast<size_t>(max_num_rows), inputs = static_cast<size_t>(num_inputs);
  if (layout == LinearLayout::kPairs) {
    // Three bf16 parts of every row, in tiles of 16.
    return (3 * rows + 15) / 16 * 16 * inputs * sizeof(uint16_t);
  }
  // Few fp32 rows are read where they are; else a copy is made in fp32, tile by tile.
  if (dtype == DType::kF32 && max_num_rows <= kLinearInPlaceRows) return 0;
  return rows * inputs * sizeof(float);
}

}  // namespace openspec
