#pragma once

/// The inner loop of linear and of attention: sum_k x[r][k] * w[k][c] for a tile of R rows times U
/// *units* held in registers. A unit is two vectors: columns [c, c + kLanes) and the same 16
/// further, which is how a line of a bf16 panel unpacks.
///
/// Tiles differ in shape only: each sum is always the chain fma(x[k], w[k], sum) over rising k, so
/// results do not depend on how rows and columns are cut into tiles.

#include "kernels/common/simd_cpu.h"
#include "kernels/linear/formats.h"
#include "kernels/linear/panels_cpu.h"

namespace openspec::OPENSPEC_ISA {

inline constexpr int kUnitColumns = 2 * kLanes;
inline constexpr int kUnitsPerPanel = kLinearPanel / kUnitColumns;
inline constexpr int kMaxTileRows = (kNumRegisters - 3) / 2;
inline constexpr int kMaxUnits = 6;
/// Up to so many rows are read where they are, each by its own pointer; for more, x is a copy that
/// holds the tile's rows of one k contiguously.
inline constexpr int kMaxInPlaceRows = kLinearInPlaceRows;

/// Rows of a copied tile where more than kMaxInPlaceRows are spread evenly over tiles.
inline constexpr int kMinCopiedRows = (kMaxTileRows + 1) / 2;

/// Units that a tile of so many rows holds at most.
constexpr int max_units(int rows) {
  const int by_registers = (kNumRegisters == 32 ? 12 : 6) / rows;
  return by_registers < 1 ? 1 : by_registers > kMaxUnits ? kMaxUnits : by_registers;
}

/// First column of unit u, counted in panels of 32 columns.
constexpr int unit_column(int u) {
  return u / kUnitsPerPanel * kLinearPanel + u % kUnitsPerPanel * kLanes;
}

// Sanitizers turn every load into a check: unrolled, tiles would take minutes to compile.
#if defined(__SANITIZE_ADDRESS__)
#define OPENSPEC_UNROLL
#else
#define OPENSPEC_UNROLL _Pragma("GCC unroll 4")
#endif

/// How line k of the weights is found.
enum class Lines {
  kBF16Panel,  // weight[u] + k lines of 32 bf16, columns i and i + 16 interleaved
  kE4M3Panel,  // weight[u] + k lines of 32 codes, in the same order; x is times kCodeFactor
  kF32Panel,   // weight[u] + k lines of 32 floats
  kPointers,   // line[k] + first_column[u] floats
};

/// Bytes of a panel's line.
constexpr int64_t line_bytes(Lines lines) {
  return kLinearPanel * (lines == Lines::kE4M3Panel ? 1 : lines == Lines::kBF16Panel ? 2 : 4);
}

/// Weights are fetched so many lines ahead of their use.
constexpr int64_t prefetch_lines(Lines lines) { return lines == Lines::kE4M3Panel ? 96 : 48; }

/// Splits of one tile.
inline constexpr int kMaxTileSplits = 8;

struct TileArgs {
  const char* weight[kMaxUnits];
  int64_t next_weight;  // bytes from weight[u] to what unit u reads after this tile's lines
  const float* const* line;
  int column[kMaxUnits];  // of each unit's first vector, in sums and in lines given by pointers
  const float* x;         // (r, k) at [r * x_stride + k] in place, else at [k * R + r]
  int64_t x_stride;
  int num_splits;
  int64_t ends[kMaxTileSplits];  // the first k after each split
  const float*
      from;   // the first split's chains so far, (r, c) at [r * sums_stride + c]; null: zero
  float* to;  // where its chains go, or with is_added are added, then the other splits' too
  bool is_added;
  int64_t sums_stride;
  // kE4M3Panel: the scales of each unit's columns, of the first vector and 16 further; a block's
  // lie behind those of the block before. Null: sums stay as they are, of outputs' scales until a
  // split is whole.
  const float* scale[kMaxUnits] = {};
  int64_t first_block = 0;  // inputs of the first block of inputs; 0: a scale is an output's
};

using TileFunction = void (*)(const TileArgs&);

template <int R, int U, Lines kLines, bool kInPlace>
void tile(const TileArgs& args) {
  constexpr int64_t kLineBytes = line_bytes(kLines), kPrefetchLines = prefetch_lines(kLines);
  constexpr int kHalf = kLinearPanel / 2;
  constexpr bool kScaled = kLines == Lines::kE4M3Panel;
  Vf sums[R][U][2] = {};
  Vf chains[kScaled ? R : 1][kScaled ? U : 1][2] = {};  // of blocks; sums are a segment's then
  const bool has_blocks = kScaled && args.first_block > 0;
  if (args.from != nullptr) {
    for (int r = 0; r < R; ++r) {
      for (int u = 0; u < U; ++u) {
        const float* from = args.from + r * args.sums_stride + args.column[u];
        Vf(&to)[2] = has_blocks ? chains[kScaled ? r : 0][kScaled ? u : 0] : sums[r][u];
        to[0] = load(from);
        to[1] = load(from + kHalf);
      }
    }
  }
  const char* weight[U];
  int64_t column[U];
  for (int u = 0; u < U; ++u) {
    weight[u] = args.weight[u];
    column[u] = args.column[u];
  }
  const float* x[kInPlace ? R : 1];
  for (int r = 0; r < (kInPlace ? R : 1); ++r) x[r] = args.x + r * args.x_stride;

  const auto add_line = [&](int64_t k, int64_t prefetch) OPENSPEC_INLINE_LAMBDA {
    for (int u = 0; u < U; ++u) {
      Vf low, high;
      if constexpr (kLines == Lines::kBF16Panel) {
        __builtin_prefetch(weight[u] + k * kLineBytes + prefetch);
        const Vu pairs = load_bits(weight[u] + k * kLineBytes);
        low = as_float(pairs << 16);
        high = as_float(pairs & 0xffff0000u);
      } else if constexpr (kLines == Lines::kE4M3Panel) {
        __builtin_prefetch(weight[u] + k * kLineBytes + prefetch);
        load_e4m3(weight[u] + k * kLineBytes, low, high);
      } else {
        const float* line = kLines == Lines::kPointers
                                ? args.line[k] + column[u]
                                : reinterpret_cast<const float*>(weight[u] + k * kLineBytes);
        low = load(line);
        high = load(line + kHalf);
      }
      for (int r = 0; r < R; ++r) {
        const Vf value = splat(kInPlace ? x[kInPlace ? r : 0][k] : x[0][k * R + r]);
        sums[r][u][0] = fma(value, low, sums[r][u][0]);
        sums[r][u][1] = fma(value, high, sums[r][u][1]);
      }
    }
  };
  const int64_t num_inputs = args.ends[args.num_splits - 1];
  const int64_t turn = num_inputs > kPrefetchLines ? num_inputs - kPrefetchLines : 0;
  // A whole block's sums, or what a split has of it, onto their chains.
  const auto add_segment = [&](int64_t block) OPENSPEC_INLINE_LAMBDA {
    for (int u = 0; u < U; ++u) {
      const float* scale = args.scale[u] + block * kLinearPanel;
      for (int i = 0; i < 2; ++i) {
        const Vf factor = load(scale + i * kHalf) * kCodeUnit;
        for (int r = 0; r < R; ++r) {
          Vf& chain = chains[kScaled ? r : 0][kScaled ? u : 0][i];
          chain = fma(sums[r][u][i], factor, chain);
          sums[r][u][i] = Vf{};
        }
      }
    }
  };
  // Of a split that ends, or waits in memory.
  const auto take_sum = [&](int r, int u, int i) OPENSPEC_INLINE_LAMBDA {
    Vf& sum = has_blocks ? chains[kScaled ? r : 0][kScaled ? u : 0][i] : sums[r][u][i];
    const bool is_due = kScaled && !has_blocks && args.scale[u] != nullptr;
    const Vf taken = is_due ? sum * (load(args.scale[u] + i * kHalf) * kCodeUnit) : sum;
    sum = Vf{};
    return taken;
  };
  int64_t k = 0;
  int64_t block = 0, block_end = has_blocks ? args.first_block : num_inputs;
  bool is_added = args.is_added;
  for (int split = 0; split < args.num_splits; ++split) {
    const int64_t split_end = args.ends[split];
    while (k < split_end) {
      const int64_t segment_end = kScaled && block_end < split_end ? block_end : split_end;
      // In two parts: up to where the lines fetched ahead are the next tile's.
      for (int part = 0; part < 2; ++part) {
        const int64_t end = part == 0 && turn < segment_end ? turn : segment_end;
        const int64_t prefetch = part == 0 && k < turn ? kPrefetchLines * kLineBytes
                                                       : args.next_weight - turn * kLineBytes;
        OPENSPEC_UNROLL
        for (; k < end; ++k) add_line(k, prefetch);
      }
      if (has_blocks) add_segment(block);
      if (kScaled && k == block_end) {
        ++block;
        block_end += kScaleInputs;
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int u = 0; u < U; ++u) {
        float* to = args.to + r * args.sums_stride + args.column[u];
        const Vf low = take_sum(r, u, 0), high = take_sum(r, u, 1);
        store(to, is_added ? load(to) + low : low);
        store(to + kHalf, is_added ? load(to + kHalf) + high : high);
      }
    }
    is_added = true;
  }
}

/// Tile functions by rows and units.
template <Lines kLines, bool kInPlace, int kUnitsAtMost = kMaxUnits>
struct TileTable {
  TileFunction at[kMaxTileRows + 1][kMaxUnits + 1] = {};

  constexpr TileTable() { fill_rows<kInPlace ? 1 : kMinCopiedRows>(); }

  template <int R>
  constexpr void fill_rows() {
    fill_units<R, 1>();
    if constexpr (R < (kInPlace ? kMaxInPlaceRows : kMaxTileRows)) fill_rows<R + 1>();
  }
  template <int R, int U>
  constexpr void fill_units() {
    at[R][U] = tile<R, U, kLines, kInPlace>;
    if constexpr (kInPlace && U < max_units(R) && U < kUnitsAtMost) fill_units<R, U + 1>();
  }
};

template <Lines kLines, bool kInPlace, int kUnitsAtMost = kMaxUnits>
inline constexpr TileTable<kLines, kInPlace, kUnitsAtMost> kTiles;

}  // namespace openspec::OPENSPEC_ISA
