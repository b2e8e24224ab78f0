#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "kernels/linear.h"

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

// In bf16 a line of a panel (one k) interleaves columns i and i + 16, so that a shift and a mask of
// 32-bit lanes yield both halves in order. In f32 it is in order.
int bf16_position(int column) { return column < kHalf ? 2 * column : 2 * (column - kHalf) + 1; }

// All 32 columns of a bf16 panel at once, two k at a time: 32-bit reads of two source rows give
// the 32-bit words of two lines.
void pack_whole_bf16_panel(const uint16_t* rows, int64_t num_inputs, uint16_t* panel) {
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

// One row, or zeros, as a column of a panel of pairs.
void pack_pairs(const uint16_t* row, int64_t num_inputs, int column, uint16_t* panel) {
  for (int64_t k = 0; k < num_inputs; k += 2) {
    uint16_t* to = panel + 2 * pair_word(k, column);
    to[0] = row != nullptr ? row[k] : 0;
    to[1] = row != nullptr ? row[k + 1] : 0;
  }
}

template <typename Source, typename Packed, typename Convert>
void pack_row(const Source* row, int64_t num_inputs, Packed* panel, int position,
              const Convert& convert) {
  for (int64_t k = 0; k < num_inputs; ++k) panel[k * kLinearPanel + position] = convert(row[k]);
}

float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

}  // namespace

size_t linear_packed_bytes_cpu(int num_outputs, int num_inputs, DType dtype,
                               LinearEpilogue epilogue) {
  PackedLinear shape;
  shape.num_outputs = num_outputs;
  shape.epilogue = epilogue;
  return static_cast<size_t>(PanelMap(shape).num_panels()) * kLinearPanel *
         static_cast<size_t>(num_inputs) * dtype_bytes(dtype);
}

void linear_pack_cpu(const PackedLinear& shape, const void* rows, DType source_dtype,
                     int first_output, int num_rows, void* packed) {
  const PanelMap map(shape);
  OPENSPEC_CHECK(!map.is_swiglu || shape.num_outputs % 2 == 0,
                 "a SwiGLU matrix has gate and up rows, got ", shape.num_outputs, " rows");
  OPENSPEC_CHECK(first_output >= 0 && num_rows >= 0 && first_output + num_rows <= shape.num_outputs,
                 "rows [", first_output, ", ", first_output + num_rows, ") of a matrix of ",
                 shape.num_outputs);
  OPENSPEC_CHECK(source_dtype == DType::kBF16 || shape.dtype == DType::kF32,
                 "fp32 weights are packed as fp32 only");
  const int64_t num_inputs = shape.num_inputs;
  const int64_t panel_elements = num_inputs * kLinearPanel;
  const bool is_bf16 = shape.dtype == DType::kBF16;
  uint16_t* const packed_bf16 = static_cast<uint16_t*>(packed);
  float* const packed_f32 = static_cast<float*>(packed);
  const uint16_t* const source_bf16 = static_cast<const uint16_t*>(rows);
  const float* const source_f32 = static_cast<const float*>(rows);

  const bool is_pairs = shape.layout == LinearLayout::kPairs;
  OPENSPEC_CHECK(!is_pairs || (is_bf16 && num_inputs % kPairsBlock == 0),
                 "pairs hold bf16 and a multiple of ", kPairsBlock, " inputs, not ", num_inputs);
  int row = 0;
  while (row < num_rows) {
    const int output = first_output + row;
    const int part = output / map.part_outputs;
    const int column = output % map.part_outputs;
    const int lane = column % kLinearPanel;
    const int64_t panel = map.panel(part, column / kLinearPanel) * panel_elements;
    const int left_in_part = std::min(num_rows - row, map.part_outputs - column);
    const int64_t source = row * num_inputs;
    if (is_bf16 && !is_pairs && lane == 0 && left_in_part >= kLinearPanel) {
      pack_whole_bf16_panel(source_bf16 + source, num_inputs, packed_bf16 + panel);
      row += kLinearPanel;
      continue;
    }
    if (is_pairs) {
      pack_pairs(source_bf16 + source, num_inputs, lane, packed_bf16 + panel);
    } else if (is_bf16) {
      pack_row(source_bf16 + source, num_inputs, packed_bf16 + panel, bf16_position(lane),
               [](uint16_t bits) { return bits; });
    } else if (source_dtype == DType::kBF16) {
      pack_row(source_bf16 + source, num_inputs, packed_f32 + panel, lane, widen);
    } else {
      pack_row(source_f32 + source, num_inputs, packed_f32 + panel, lane,
               [](float value) { return value; });
    }
    ++row;
    if (column + 1 < map.part_outputs) continue;
    // The last column of a matrix: the panel's remaining columns are zero.
    for (int pad = lane + 1; pad < kLinearPanel; ++pad) {
      if (is_pairs) {
        pack_pairs(nullptr, num_inputs, pad, packed_bf16 + panel);
        continue;
      }
      for (int64_t k = 0; k < num_inputs; ++k) {
        const int64_t line = panel + k * kLinearPanel;
        if (is_bf16) {
          packed_bf16[line + bf16_position(pad)] = 0;
        } else {
          packed_f32[line + pad] = 0.0f;
        }
      }
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
