#include "kernels/common/row_ops_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/isa_cpu.h"
#include "kernels/linear/epilogue_cpu.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/tile_cpu.h"

// out = x W^T with W in panels of 32 columns (linear.h), by the tiles of tile_cpu.h. Long splits
// are cut for the cache; the accumulators then wait in memory, which changes no bit.

namespace openspec::OPENSPEC_ISA {

namespace {

static_assert(kMaxTileSplits >= kMaxSplits);

constexpr int kTilesPerBlock = 84 / kMaxTileRows;
constexpr int kBlockRows = kTilesPerBlock * kMaxTileRows;
// Panels whose results are held at once by a task: of a block of tiles, or of a single tile.
constexpr int kBlockPanels = 4;
constexpr int kSingleTilePanels = 12;
constexpr int kBlockInputs = 512;  // a split is cut so: a slice of a bf16 panel is 32 KB

template <Lines kLines>
TileFunction find_tile(bool is_in_place, int rows, int units) {
  return is_in_place ? kTiles<kLines, true>.at[rows][units] : kTiles<kLines, false>.at[rows][units];
}

// Rows of tiles and columns of panels that a task works on at once.
struct Area {
  int first_tile, last_tile;
  int first_panel, last_panel;

  int unit_step = 1;  // units that a tile takes

  bool has_one_tile() const { return last_tile - first_tile == 1; }
  int num_units() const { return (last_panel - first_panel) * kUnitsPerPanel; }
  int64_t stride() const { return int64_t{last_panel - first_panel} * kLinearPanel; }  // of sums
};

// The whole product: how it is cut, and where its operands are.
struct Product {
  const LinearParams& params;
  const float* x = nullptr;  // in place: rows; else tile after tile, each [num_inputs][rows]
  bool is_in_place = false;
  int num_tiles = 0;
  int num_panels = 0;
  Lines lines;
  SplitRange splits;                  // that are here
  int64_t ends[kMaxSplits + 1] = {};  // zero, then the first input after each of them

  explicit Product(const LinearParams& p)
      : params(p),
        is_in_place(p.num_rows <= kMaxInPlaceRows),
        num_tiles(static_cast<int>(ceil_div(p.num_rows, kMaxTileRows))),
        num_panels(is_swiglu() ? 2 * static_cast<int>(ceil_div(p.weight.num_outputs / 2, 32))
                               : static_cast<int>(ceil_div(p.weight.num_outputs, 32))),
        lines(p.weight.format == MatrixFormat::kE4M3 ? Lines::kE4M3Panel : Lines::kBF16Panel),
        splits(p.weight.own_splits()) {
    for (int i = 0; i < splits.size(); ++i) ends[i + 1] = p.weight.inputs_of(splits.begin + i).end;
  }

  bool is_swiglu() const { return params.weight.epilogue == LinearEpilogue::kSwiGlu; }
  int64_t num_inputs() const { return params.weight.num_inputs; }
  int64_t end_of(int split) const { return ends[split - splits.begin + 1]; }
  bool has_blocks() const { return params.weight.scale_kind == ScaleKind::kBlock; }
  int64_t panel_bytes() const { return line_bytes(lines) * num_inputs(); }
  int64_t unit_bytes() const { return line_bytes(lines) / kUnitsPerPanel; }
  // Inputs from `begin` to the first border of blocks of inputs.
  int64_t first_block(int64_t begin) const {
    return kScaleInputs - (params.weight.shard.first_input + begin) % kScaleInputs;
  }
  // Rows are spread evenly over the tiles.
  int tile_begin(int t) const {
    return static_cast<int>(static_cast<int64_t>(params.num_rows) * t / num_tiles);
  }

  void copy_tile(int t, float* to) const;
  void run(Area area) const;
  void sum_splits(const Area& area, const SplitRange& of, float* sums) const;
  void multiply(const Area& area, int unit, int64_t begin, bool is_scaled, TileArgs& args) const;
};

OPENSPEC_INLINE float load_activation(const LinearParams& params, int64_t at) {
  if (params.dtype == DType::kF32) return static_cast<const float*>(params.x)[at];
  return bf16_to_float(static_cast<const uint16_t*>(params.x)[at]);
}

// The rows of a tile as fp32, times `factor`; many of them transposed: [num_inputs][rows].
void Product::copy_tile(int t, float* to) const {
  const float factor = lines == Lines::kE4M3Panel ? kCodeFactor : 1.0f;
  const int begin = tile_begin(t);
  const int rows = tile_begin(t + 1) - begin;
  const int64_t width = num_inputs();
  const int64_t from = begin * width;
  to += from;
  if (is_in_place) {
    for (int64_t i = 0; i < rows * width; ++i) to[i] = factor * load_activation(params, from + i);
    return;
  }
  // By squares. A vector stored for one k runs over into the next k's place, which is written
  // after it; so the last ones are left to the loop below.
  constexpr int kSquares = (kMaxTileRows + kLanes - 1) / kLanes;
  const int num_squares = static_cast<int>(ceil_div(rows, kLanes));
  int64_t k = 0;
  for (; (k + kLanes) * rows + num_squares * kLanes <= rows * width; k += kLanes) {
    Vf squares[kSquares][kLanes] = {};
    for (int s = 0; s < num_squares; ++s) {
      for (int r = 0; r < min_of(kLanes, rows - s * kLanes); ++r) {
        squares[s][r] =
            factor * load_floats(params.dtype, params.x, from + (s * kLanes + r) * width + k);
      }
      transpose(squares[s]);
    }
    for (int i = 0; i < kLanes; ++i) {
      for (int s = 0; s < num_squares; ++s) store(to + (k + i) * rows + s * kLanes, squares[s][i]);
    }
  }
  for (; k < width; ++k) {
    for (int r = 0; r < rows; ++r)
      to[k * rows + r] = factor * load_activation(params, from + r * width + k);
  }
}

// Of a step of units and all tiles, from input `begin` on: as `args` says, whose from and to are
// the first tile's and move on.
void Product::multiply(const Area& area, int unit, int64_t begin, bool is_scaled,
                       TileArgs& args) const {
  const int units = min_of(area.unit_step, area.num_units() - unit);
  for (int u = 0; u < units; ++u) {
    const int panel = (unit + u) / kUnitsPerPanel;
    const int part = (unit + u) % kUnitsPerPanel;
    args.weight[u] = static_cast<const char*>(params.weight.data) +
                     (area.first_panel + panel) * panel_bytes() + part * unit_bytes() +
                     begin * line_bytes(lines);
    args.column[u] = panel * kLinearPanel + part * kLanes;
    if (is_scaled) {
      const int64_t blocks = has_blocks() ? params.weight.num_scale_blocks() : 1;
      const int64_t block = has_blocks() ? params.weight.scale_block(static_cast<int>(begin)) -
                                               params.weight.scale_block(0)
                                         : 0;
      args.scale[u] = params.weight.scales +
                      ((area.first_panel + panel) * blocks + block) * kLinearPanel + part * kLanes;
    } else {
      args.scale[u] = nullptr;
    }
  }
  if (has_blocks()) args.first_block = first_block(begin);
  for (int t = area.first_tile; t < area.last_tile; ++t) {
    const int rows = tile_begin(t + 1) - tile_begin(t);
    args.x = x + tile_begin(t) * num_inputs() + begin * (is_in_place ? 1 : rows);
    const auto run_tile = lines == Lines::kE4M3Panel
                              ? find_tile<Lines::kE4M3Panel>(is_in_place, rows, units)
                              : find_tile<Lines::kBF16Panel>(is_in_place, rows, units);
    run_tile(args);
    args.to += rows * args.sums_stride;
    if (args.from != nullptr) args.from += rows * args.sums_stride;
  }
}

// sums = those of the splits `of`, added in order.
void Product::sum_splits(const Area& area, const SplitRange& of, float* sums) const {
  alignas(64) float chains[kBlockRows * kBlockPanels * kLinearPanel];  // of a split that is cut
  // A single tile reads every weight once: no reason to cut.
  const int64_t most_inputs = area.has_one_tile() ? num_inputs() : kBlockInputs;
  TileArgs args;
  args.x_stride = num_inputs();
  args.sums_stride = area.stride();
  // After a step of units the next ones, which lie as far behind as these are wide.
  args.next_weight = area.unit_step == 1 && kUnitsPerPanel > 1
                         ? unit_bytes()
                         : ceil_div(area.unit_step, kUnitsPerPanel) * panel_bytes();
  bool continues = false;  // with chains that wait
  int64_t begin = end_of(of.begin - 1);
  for (int split = of.begin; split < of.end;) {
    // Whole splits as far as they fit, else a part of one.
    args.is_added = split > of.begin;
    args.num_splits = 0;
    while (split < of.end && end_of(split) <= begin + most_inputs) {
      args.ends[args.num_splits++] = end_of(split++) - begin;
    }
    const bool is_cut = args.num_splits == 0;
    if (is_cut) {
      args.is_added = false;
      const int64_t partial = has_blocks() ? kScaleInputs - first_block(begin + most_inputs) : 0;
      args.ends[args.num_splits++] = most_inputs - partial;  // a block's inputs stay together
    }
    // An output's scale multiplies a whole split's sum.
    const bool is_scaled = lines == Lines::kE4M3Panel && (has_blocks() || !is_cut);
    const int64_t count = args.ends[args.num_splits - 1];
    for (int unit = 0; unit < area.num_units(); unit += area.unit_step) {
      args.from = continues ? chains : nullptr;
      args.to = is_cut ? chains : sums;
      multiply(area, unit, begin, is_scaled, args);
    }
    continues = is_cut;
    begin += count;
  }
}

void Product::run(Area area) const {
  alignas(64) float sums[kBlockRows * kBlockPanels * kLinearPanel];
  static_assert(kSingleTilePanels * kMaxTileRows <= kBlockPanels * kBlockRows);
  const int group = area.has_one_tile() ? kSingleTilePanels : kBlockPanels;
  const int tile_rows = tile_begin(area.first_tile + 1) - tile_begin(area.first_tile);
  area.unit_step = is_in_place ? max_units(tile_rows) : 1;
  const int last_panel = area.last_panel;
  // Together, or where they stay apart one by one.
  const int at_once = params.partials == nullptr ? splits.size() : 1;
  for (; area.first_panel < last_panel; area.first_panel += group) {
    area.last_panel = min_of(area.first_panel + group, last_panel);
    for (int split = splits.begin; split < splits.end; split += at_once) {
      sum_splits(area, {split, split + at_once}, sums);
      write_outputs(params, split, sums, area.stride(), tile_begin(area.first_tile),
                    tile_begin(area.last_tile), area.first_panel, area.last_panel);
    }
  }
}

// Into how many column ranges to cut: enough to balance the threads, each worth handing over.
int64_t num_column_tasks(const Product& product, int num_threads, int64_t num_row_blocks,
                         int64_t num_groups) {
  if (num_threads == 1) return 1;
  // Of less, too many panels end up in tiles narrower than the registers allow.
  constexpr int64_t kMinTaskCycles = 24000;
  const int64_t line_cycles = 6 + 2 * product.params.num_rows;  // memory, or multiply-adds
  const int64_t cycles = product.num_panels * product.num_inputs() * line_cycles;
  int64_t tasks = min_of<int64_t>(cycles / kMinTaskCycles, 32 * num_threads);
  tasks = ceil_div(tasks, num_row_blocks);
  tasks = ceil_div(tasks, num_threads) * num_threads;
  return max_of<int64_t>(1, min_of(tasks, num_groups));
}

}  // namespace

void linear(const ExecContext& exec, const LinearParams& params) {
  if (params.num_rows == 0 || params.weight.num_outputs == 0) return;
  Product product(params);
  if (product.is_in_place && params.dtype == DType::kF32 && product.lines == Lines::kBF16Panel) {
    product.x = static_cast<const float*>(params.x);
  } else {
    constexpr int64_t kMinParallelCopy = 32768;  // elements; smaller copies are made here
    const auto copy = [&](int64_t t) { product.copy_tile(static_cast<int>(t), params.workspace); };
    if (params.num_rows * product.num_inputs() >= kMinParallelCopy) {
      exec.pool->parallel_for(product.num_tiles, copy);
    } else {
      for (int t = 0; t < product.num_tiles; ++t) copy(t);
    }
    product.x = params.workspace;
  }

  const int64_t num_row_blocks = ceil_div(product.num_tiles, kTilesPerBlock);
  const int panel_step = product.is_swiglu() ? 2 : 1;
  const int64_t num_steps = product.num_panels / panel_step;
  const int64_t num_columns =
      num_column_tasks(product, exec.pool->num_threads(), num_row_blocks, num_steps);
  // Row blocks vary fastest: threads that work at the same time share the weights in the cache.
  exec.pool->parallel_for(num_columns * num_row_blocks, [&](int64_t task) {
    const int64_t column = task / num_row_blocks;
    const int64_t block = task % num_row_blocks;
    product.run({static_cast<int>(product.num_tiles * block / num_row_blocks),
                 static_cast<int>(product.num_tiles * (block + 1) / num_row_blocks),
                 static_cast<int>(num_steps * column / num_columns) * panel_step,
                 static_cast<int>(num_steps * (column + 1) / num_columns) * panel_step});
  });
}

}  // namespace openspec::OPENSPEC_ISA
