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
        part_outputs(is_swiglu ? shape.num_outputs / 2 : shape.num_outputs) {}

  int panel(int part, int part_panel) const {
    return is_swiglu ? 2 * part_panel + part : part_panel;
  }

  bool is_swiglu;
  int part_outputs;  // outputs of one of the matrices
};

// kLines: where a column's number of a line lies. A line interleaves columns i and i + 16, so that
// shifts and masks of 32-bit lanes yield both halves in order.
int line_at(int column) { return column < kHalf ? 2 * column : 2 * (column - kHalf) + 1; }

// One row, or zeros, as a column of a panel.
template <typename T>
void pack_line(const T* row, int64_t num_inputs, int column, T* panel) {
  const int position = line_at(column);
  for (int64_t k = 0; k < num_inputs; ++k) {
    panel[k * kLinearPanel + position] = row != nullptr ? row[k] : T{0};
  }
}

// kLines: all 32 columns of a panel at once: reads of two source rows, or four of codes, give the
// 32-bit words of a line.
template <typename T>
void pack_whole_panel(const T* rows, int64_t num_inputs, T* panel) {
  constexpr int64_t kBlock = 128 / sizeof(T);  // 32 rows x 128 bytes stay in the first-level cache
  constexpr int kWords = static_cast<int>(kLinearPanel * sizeof(T) / 4);  // of a line
  uint32_t* lines = reinterpret_cast<uint32_t*>(panel);
  for (int64_t begin = 0; begin < num_inputs; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, num_inputs);
    for (int i = 0; i < kWords; ++i) {
      const auto row = [&](int column) { return rows + column * num_inputs; };
      for (int64_t k = begin; k < end; ++k) {
        if constexpr (sizeof(T) == 2) {
          lines[k * kWords + i] = row(i)[k] | static_cast<uint32_t>(row(i + kHalf)[k]) << 16;
        } else {
          const int c = 2 * i;
          lines[k * kWords + i] = row(c)[k] | static_cast<uint32_t>(row(c + kHalf)[k]) << 8 |
                                  static_cast<uint32_t>(row(c + 1)[k]) << 16 |
                                  static_cast<uint32_t>(row(c + 1 + kHalf)[k]) << 24;
        }
      }
    }
  }
}

// kPairs: where the first of a column's pair of k's lies; see LinearLayout. Runs of 8 codes of two
// tile rows of 32 alternate: so they are interleaved with zeros, 64 at once.
template <typename T>
int64_t pair_at(int64_t k, int column) {
  constexpr int64_t kBlockElements = kLinearPanel * kPairsBlock;
  const int64_t at = k / kPairsBlock * kBlockElements + column / kHalf * (kBlockElements / 2) +
                     2 * (k % kPairsBlock / 2 * kHalf + column % kHalf);
  if (sizeof(T) == 2) return at;
  const int64_t row = at / 32 % 2, run = at % 32 / 8;
  return at / 64 * 64 + 16 * run + 8 * row + at % 8;
}

// One row, or zeros, as a column of a panel.
template <typename T>
void pack_pairs(const T* row, int64_t num_inputs, int column, T* panel) {
  for (int64_t k = 0; k < num_inputs; k += 2) {
    T* to = panel + pair_at<T>(k, column);
    to[0] = row != nullptr ? row[k] : T{0};
    to[1] = row != nullptr ? row[k + 1] : T{0};
  }
}

template <typename T>
void pack(const PackedLinear& shape, const T* rows, int first_output, int num_rows, T* packed) {
  const PanelMap map(shape);
  const int64_t num_inputs = shape.num_inputs;
  const bool is_pairs = shape.layout == LinearLayout::kPairs;
  int row = 0;
  while (row < num_rows) {
    const int output = first_output + row;
    const int part = output / map.part_outputs;
    const int column = output % map.part_outputs;
    const int lane = column % kLinearPanel;
    T* panel = packed + map.panel(part, column / kLinearPanel) * num_inputs * kLinearPanel;
    const T* source = rows + row * num_inputs;
    if (!is_pairs && lane == 0 &&
        std::min(num_rows - row, map.part_outputs - column) >= kLinearPanel) {
      pack_whole_panel(source, num_inputs, panel);
      row += kLinearPanel;
      continue;
    }
    const auto pack_column = is_pairs ? pack_pairs<T> : pack_line<T>;
    pack_column(source, num_inputs, lane, panel);
    ++row;
    if (column + 1 < map.part_outputs) continue;
    // The last column of a matrix: the panel's remaining columns are zero.
    for (int pad = lane + 1; pad < kLinearPanel; ++pad) {
      pack_column(nullptr, num_inputs, pad, panel);
    }
  }
}

}  // namespace

size_t linear_packed_bytes_cpu(const PackedLinear& shape) {
  return format_bytes(shape.format, shape.num_packed(), shape.num_inputs);
}

void linear_pack_cpu(const PackedLinear& shape, const void* rows, int first_output, int num_rows,
                     void* packed) {
  OPENSPEC_CHECK(shape.epilogue != LinearEpilogue::kSwiGlu || shape.num_outputs % 2 == 0,
                 "a SwiGLU matrix has gate and up rows, got ", shape.num_outputs, " rows");
  OPENSPEC_CHECK(first_output >= 0 && num_rows >= 0 && first_output + num_rows <= shape.num_outputs,
                 "rows [", first_output, ", ", first_output + num_rows, ") of a matrix of ",
                 shape.num_outputs);
  OPENSPEC_CHECK(shape.layout != LinearLayout::kPairs || shape.num_inputs % kPairsBlock == 0,
                 "pairs hold a multiple of ", kPairsBlock, " inputs, not ", shape.num_inputs);
  if (shape.format == MatrixFormat::kE4M3) {
    pack(shape, static_cast<const uint8_t*>(rows), first_output, num_rows,
         static_cast<uint8_t*>(packed));
  } else {
    pack(shape, static_cast<const uint16_t*>(rows), first_output, num_rows,
         static_cast<uint16_t*>(packed));
  }
}

void linear_select_cpu(const ExecContext& exec, const LinearSelectParams& params) {
  const PackedLinear &from = params.from, &to = params.to;
  OPENSPEC_CHECK(are_legal_to_select(params) && from.layout != LinearLayout::kTiles,
                 "outputs are taken from a bf16 matrix of the same inputs and layout");
  const int64_t num_inputs = to.num_inputs, panel_size = num_inputs * kLinearPanel;
  const auto* source = static_cast<const uint16_t*>(from.data);
  auto* packed = static_cast<uint16_t*>(params.packed);
  exec.pool->parallel_for(to.num_packed() / kLinearPanel, [&](int64_t panel) {
    uint16_t* out = packed + panel * panel_size;
    std::fill_n(out, panel_size, uint16_t{0});
    const auto first = static_cast<int>(panel) * kLinearPanel;
    for (int lane = 0; lane < std::min(kLinearPanel, to.num_outputs - first); ++lane) {
      const int output = params.output[first + lane], column = output % kLinearPanel;
      const uint16_t* in = source + output / kLinearPanel * panel_size;
      if (to.layout == LinearLayout::kLines) {
        for (int64_t k = 0; k < num_inputs; ++k) {
          out[k * kLinearPanel + line_at(lane)] = in[k * kLinearPanel + line_at(column)];
        }
        continue;
      }
      for (int64_t k = 0; k < num_inputs; k += 2) {
        std::copy_n(in + pair_at<uint16_t>(k, column), 2, out + pair_at<uint16_t>(k, lane));
      }
    }
  });
}

size_t linear_workspace_bytes_cpu(int max_num_rows, int num_inputs, LinearLayout layout) {
  const auto rows = static_cast<size_t>(max_num_rows), inputs = static_cast<size_t>(num_inputs);
  if (layout == LinearLayout::kPairs) {
    // Three bf16 parts of every row, in tiles of 16.
    return (3 * rows + 15) / 16 * 16 * inputs * sizeof(uint16_t);
  }
  return rows * inputs * sizeof(float);  // a copy, tile by tile
}

}  // namespace openspec
