#include <immintrin.h>

#include "kernels/common/row_ops_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/isa_cpu.h"
#include "kernels/linear/epilogue_cpu.h"
#include "kernels/linear/linear.h"

// out = x W^T on the matrix unit, to fp32's accuracy: x = x1 + x2 + x3 with bf16 parts, exactly (8
// bits of the significand each, cut off, not rounded), and the weights are bf16 already. The parts
// are rows of their own, so five rows still fill one tile of 16: up to there a step costs what
// reading the weights costs.

namespace openspec::OPENSPEC_ISA {

namespace {

constexpr int kParts = 3;
constexpr int kTileRows = 16;
constexpr int kBlockInputs = 32;
constexpr int kTileElements = kTileRows * kBlockInputs;
constexpr int kGroupTiles = 3;  // held in registers at once: 48 part rows, that is 16 rows
constexpr int kGroupRows = kGroupTiles * kTileRows / kParts;
constexpr int kMaxPanels = 2;  // gate and up

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr int kBlockElements = 2 * kTileElements;  // of a panel: two tiles of weights
constexpr int kWidened = 4;  // blocks of widened weights that are kept: the next ones overlap

// The bytes of a code's bf16, without its sign.
struct CodeBytes {
  alignas(64) uint8_t low[128] = {}, high[128] = {};

  constexpr CodeBytes() {
    for (int code = 1; code < 128; ++code) {
      int bits = (code << 4) + (120 << 7);
      if (code < 8) {  // subnormal: code * 2^-9
        const int top = code < 2 ? 0 : code < 4 ? 1 : 2;
        bits = ((top - 9 + 127) << 7) + (code << (7 - top) & 0x7f);
      }
      low[code] = static_cast<uint8_t>(bits);
      high[code] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
constexpr CodeBytes kCodeBytes;

// A block of codes as bf16. Of 64 codes the even runs of 8 are the first tile row's (pack_cpu.cpp).
OPENSPEC_INLINE void widen(const char* codes, uint16_t* to) {
  const __m512i low_0 = _mm512_load_si512(kCodeBytes.low);
  const __m512i low_1 = _mm512_load_si512(kCodeBytes.low + 64);
  const __m512i high_0 = _mm512_load_si512(kCodeBytes.high);
  const __m512i high_1 = _mm512_load_si512(kCodeBytes.high + 64);
  for (int i = 0; i < kBlockElements; i += 64) {
    const __m512i code = _mm512_loadu_si512(codes + i);
    const __m512i sign = _mm512_and_si512(code, _mm512_set1_epi8(static_cast<char>(0x80)));
    const __m512i low = _mm512_permutex2var_epi8(low_0, code, low_1);
    const __m512i high = _mm512_or_si512(_mm512_permutex2var_epi8(high_0, code, high_1), sign);
    _mm512_store_si512(to + i, _mm512_unpacklo_epi8(low, high));
    _mm512_store_si512(to + i + 32, _mm512_unpackhi_epi8(low, high));
  }
}

class Product {
 public:
  explicit Product(const LinearParams& params)
      : params_(params),
        parts_(reinterpret_cast<uint16_t*>(params.workspace)),
        num_tiles_(static_cast<int>(ceil_div(kParts * params.num_rows, kTileRows))),
        num_blocks_(params.weight.num_inputs / kBlockInputs) {}

  int panels_per_output() const {
    return params_.weight.epilogue == LinearEpilogue::kSwiGlu ? 2 : 1;
  }
  int num_outputs() const {  // in panels or pairs of panels
    return static_cast<int>(
        ceil_div(params_.weight.num_outputs / panels_per_output(), kLinearPanel));
  }
  int64_t num_inputs() const { return params_.weight.num_inputs; }
  int64_t sums_stride() const { return panels_per_output() * kLinearPanel; }

  void cut_row(int row) const;
  void clear_padding() const;
  void run(int first_output, int last_output) const;

 private:
  // Part rows lie as tiles: [num_blocks][num_tiles][16][32].
  uint16_t* tile(int64_t block, int t) const {
    return parts_ + (block * num_tiles_ + t) * kTileElements;
  }
  void multiply(int first_tile, int count, const char* panel, const InputRange& inputs,
                bool is_first_read, float* sums) const;
  void sum_split(int first_tile, int count, int panel, int split, int num_rows,
                 float* chains) const;
  void write(int split, const float* sums, int first_row, int last_row, int output) const {
    const int panel = output * panels_per_output();
    write_outputs(params_, split, sums, sums_stride(), first_row, last_row, panel,
                  panel + panels_per_output());
  }
  bool has_codes() const { return params_.weight.format == MatrixFormat::kE4M3; }

  const LinearParams& params_;
  uint16_t* parts_;
  int num_tiles_;
  int num_blocks_;
};

// The upper halves of 16 floats, as 16-bit integers.
OPENSPEC_INLINE void store_upper(uint16_t* to, Vu bits) {
  const __m512i words = reinterpret_cast<__m512i>(bits >> 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(0xffff, words));
}

void Product::cut_row(int row) const {
  const int64_t from = row * num_inputs();
  for (int block = 0; block < num_blocks_; ++block) {
    for (int i = 0; i < kBlockInputs; i += kLanes) {
      Vf rest = load_floats(params_.dtype, params_.x, from + block * kBlockInputs + i);
      for (int part = 0; part < kParts; ++part) {
        const int part_row = kParts * row + part;
        const Vu upper = as_bits(rest) & 0xffff0000u;
        store_upper(tile(block, part_row / kTileRows) + part_row % kTileRows * kBlockInputs + i,
                    upper);
        rest = rest - as_float(upper);
      }
    }
  }
}

void Product::clear_padding() const {
  if (num_tiles_ == 1) return;  // a single tile is as tall as its rows: see run
  const int first = kParts * params_.num_rows - (num_tiles_ - 1) * kTileRows;
  for (int block = 0; block < num_blocks_; ++block) {
    std::memset(tile(block, num_tiles_ - 1) + first * kBlockInputs, 0,
                static_cast<size_t>(kTileRows - first) * kBlockInputs * sizeof(uint16_t));
  }
}

// sums[16 * count][32] = part rows of tiles [first_tile, first_tile + count) times a panel, over
// the inputs of a split.
void Product::multiply(int first_tile, int count, const char* panel, const InputRange& inputs,
                       bool is_first_read, float* sums) const {
  // Registers have to be literals: 0..2 sum the left half of the panel, 3..5 the right.
  constexpr int64_t kAhead = 2048;  // bytes; panels follow each other
  alignas(64) uint16_t widened[kWidened][kBlockElements];
  const auto block_bytes =
      static_cast<int64_t>(format_bytes(params_.weight.format, 1, kBlockElements));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t block = inputs.begin / kBlockInputs; block < inputs.end / kBlockInputs; ++block) {
    const char* packed = panel + block * block_bytes;
    const uint16_t* rows = tile(block, first_tile);
    if (is_first_read) {
      for (int line = 0; line < block_bytes; line += 64) __builtin_prefetch(packed + kAhead + line);
    }
    const auto* weights = reinterpret_cast<const uint16_t*>(packed);
    if (has_codes()) {
      widen(packed, widened[block % kWidened]);
      weights = widened[block % kWidened];
    }
    _tile_loadd(6, weights, 64);
    if (count == 3) {
      _tile_loadd(7, rows, 64);
      _tile_dpbf16ps(0, 7, 6);
      _tile_loadd(7, rows + kTileElements, 64);
      _tile_dpbf16ps(1, 7, 6);
      _tile_loadd(7, rows + 2 * kTileElements, 64);
      _tile_dpbf16ps(2, 7, 6);
      _tile_loadd(6, weights + kTileElements, 64);
      _tile_dpbf16ps(5, 7, 6);
      _tile_loadd(7, rows, 64);
      _tile_dpbf16ps(3, 7, 6);
      _tile_loadd(7, rows + kTileElements, 64);
      _tile_dpbf16ps(4, 7, 6);
      continue;
    }
    // The registers of the third tile's sums are free: they hold the rows.
    _tile_loadd(7, weights + kTileElements, 64);
    _tile_loadd(2, rows, 64);
    _tile_dpbf16ps(0, 2, 6);
    _tile_dpbf16ps(3, 2, 7);
    if (count == 2) {
      _tile_loadd(5, rows + kTileElements, 64);
      _tile_dpbf16ps(1, 5, 6);
      _tile_dpbf16ps(4, 5, 7);
    }
  }
  constexpr int kStride = kLinearPanel * sizeof(float);
  constexpr int kTileSums = kTileRows * kLinearPanel;
  _tile_stored(0, sums, kStride);
  _tile_stored(3, sums + kLanes, kStride);
  if (count == 1) return;
  _tile_stored(1, sums + kTileSums, kStride);
  _tile_stored(4, sums + kTileSums + kLanes, kStride);
  if (count == 2) return;
  _tile_stored(2, sums + 2 * kTileSums, kStride);
  _tile_stored(5, sums + 2 * kTileSums + kLanes, kStride);
}

// chains[rows][32] = a split's sums of a panel. A segment, of a block of inputs or of all of the
// split's, is a row's part sums, added in order.
void Product::sum_split(int first_tile, int count, int panel, int split, int num_rows,
                        float* chains) const {
  const PackedLinear& weight = params_.weight;
  alignas(64) float part_sums[kGroupTiles * kTileRows * kLinearPanel];
  const bool has_blocks = weight.scale_kind == ScaleKind::kBlock;
  const InputRange inputs = weight.inputs_of(split);
  const auto panel_bytes =
      static_cast<int64_t>(format_bytes(weight.format, kLinearPanel, weight.num_inputs));
  const char* data = static_cast<const char*>(weight.data) + panel * panel_bytes;
  for (InputRange segment = inputs; segment.begin < inputs.end; segment.begin = segment.end) {
    const float* scale = weight.scales;
    if (has_blocks) {
      const int block = weight.scale_block(segment.begin);
      segment.end = min_of(inputs.end, (block + 1) * kScaleInputs - weight.shard.first_input);
      scale += (int64_t{panel} * weight.num_scale_blocks() + block - weight.scale_block(0)) *
               kLinearPanel;
    } else if (scale != nullptr) {
      scale += int64_t{panel} * kLinearPanel;
    }
    multiply(first_tile, count, data, segment, first_tile == 0, part_sums);
    for (int row = 0; row < num_rows; ++row) {
      const float* from = part_sums + row * kParts * kLinearPanel;
      float* chain = chains + row * kLinearPanel;
      for (int i = 0; i < kLinearPanel; i += kLanes) {
        const Vf two = load(from + i) + load(from + kLinearPanel + i);
        const Vf sum = two + load(from + 2 * kLinearPanel + i);
        const bool is_first = segment.begin == inputs.begin;
        store(chain + i, !has_codes() ? sum
                         : is_first   ? sum * load(scale + i)
                                      : fma(sum, load(scale + i), load(chain + i)));
      }
    }
  }
}

void Product::run(int first_output, int last_output) const {
  alignas(64) float chains[kGroupRows * kLinearPanel];
  alignas(64) float sums[kGroupRows * kMaxPanels * kLinearPanel];
  const int num_panels = panels_per_output();
  const SplitRange splits = params_.weight.own_splits();
  const bool is_apart = params_.partials != nullptr;
  TileConfig config;
  if (num_tiles_ == 1) {
    // Rows and sums as tall as they are; 6 and 7 hold weights then.
    for (int t = 0; t < 6; ++t) {
      config.num_rows[t] = static_cast<uint8_t>(kParts * params_.num_rows);
    }
  }
  _tile_loadconfig(&config);
  for (int output = first_output; output < last_output; ++output) {
    for (int first_tile = 0; first_tile < num_tiles_; first_tile += kGroupTiles) {
      const int count = min_of(kGroupTiles, num_tiles_ - first_tile);
      const int first_row = first_tile * kTileRows / kParts;
      const int last_row = min_of(first_row + kGroupRows, params_.num_rows);
      for (int p = 0; p < num_panels; ++p) {
        for (int split = splits.begin; split < splits.end; ++split) {
          sum_split(first_tile, count, output * num_panels + p, split, last_row - first_row,
                    chains);
          for (int row = 0; row < last_row - first_row; ++row) {
            const float* from = chains + row * kLinearPanel;
            float* to = sums + row * sums_stride() + p * kLinearPanel;
            const bool is_first = is_apart || split == splits.begin;
            for (int i = 0; i < kLinearPanel; i += kLanes) {
              store(to + i, is_first ? load(from + i) : load(to + i) + load(from + i));
            }
          }
          if (is_apart) write(split, sums, first_row, last_row, output);
        }
      }
      if (!is_apart) write(0, sums, first_row, last_row, output);
    }
  }
  _tile_release();
}

}  // namespace

void linear(const ExecContext& exec, const LinearParams& params) {
  if (params.num_rows == 0 || params.weight.num_outputs == 0) return;
  const Product product(params);
  constexpr int64_t kMinParallelCut = 32768;  // elements; fewer are cut here
  if (params.num_rows * product.num_inputs() >= kMinParallelCut) {
    exec.pool->parallel_for(params.num_rows,
                            [&](int64_t r) { product.cut_row(static_cast<int>(r)); });
  } else {
    for (int r = 0; r < params.num_rows; ++r) product.cut_row(r);
  }
  product.clear_padding();

  // Enough column ranges to balance the threads, each worth handing over.
  constexpr int64_t kMinTaskCycles = 12000;
  const int64_t num_outputs = product.num_outputs();
  const int num_threads = exec.pool->num_threads();
  const int64_t line_cycles = 6 + params.num_rows / 2;
  const int64_t cycles =
      num_outputs * product.panels_per_output() * product.num_inputs() * line_cycles;
  int64_t tasks = min_of<int64_t>(cycles / kMinTaskCycles, 16 * num_threads);
  tasks = ceil_div(tasks, num_threads) * num_threads;
  if (num_threads == 1) tasks = 1;
  tasks = max_of<int64_t>(1, min_of(tasks, num_outputs));
  exec.pool->parallel_for(tasks, [&](int64_t task) {
    product.run(static_cast<int>(num_outputs * task / tasks),
                static_cast<int>(num_outputs * (task + 1) / tasks));
  });
}

}  // namespace openspec::OPENSPEC_ISA
