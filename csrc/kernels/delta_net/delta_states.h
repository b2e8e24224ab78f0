#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace openspec {

inline constexpr int kDeltaHeadDim = 128;  // of keys and of values
inline constexpr int kDeltaBlock = 16;     // positions, counted from the sequence's first token
inline constexpr int kDeltaTaps = 4;       // of the convolution
/// Of a span that runs as a step of decoding or verification.
inline constexpr int kMaxDeltaStepRows = 16;

/// Blocks that a row at `position` reads out of the state: all but its own and the one before it.
OPENSPEC_HD int folded_blocks(int position) {
  const int block = position / kDeltaBlock;
  return block > 0 ? block - 1 : 0;
}

/// Blocks that a state may hold after a span of `num_rows` rows from `position` on, of which all
/// but the first and its last kMaxDeltaStepRows - 1 are known tokens: wherever the next span
/// begins, its rows read that state, or that and one block more.
OPENSPEC_HD int folded_after(int position, int num_rows) {
  const int num_settled = num_rows - kMaxDeltaStepRows;
  return folded_blocks(position + (num_settled > 0 ? num_settled : 0));
}

/// The states of sequences, fp32, in tiles of 8 KB in pages. A page has `num_slices` parts, as a
/// page of the KV pool has one in each layer, and each part `tiles_per_slice` tiles. How numbers
/// lie in a tile is the device's own matter.
///
/// A step reads the pages of one table and writes those of the other one, which may be the same
/// pages: so a state that others may read is never written, and a step that is given up has changed
/// nothing where both differ. Where nothing is folded into it, the state stays in the pages read.
struct DeltaStates {
  static constexpr size_t kTileBytes = 8192;

  std::byte* data = nullptr;  // first part of page 0; a multiple of 16 bytes, as the strides are
  size_t page_stride = 0;     // bytes from page to page of a part
  size_t slice_stride = 0;    // bytes from part to part of a page
  int num_slices = 1;
  int tiles_per_slice = 0;
  int pages_per_state = 0;
  const int32_t* read_pages = nullptr;   // [max_num_seqs, pages_per_state]
  const int32_t* write_pages = nullptr;  // [max_num_seqs, pages_per_state]

  /// Tile `index` of a sequence, counted over all layers.
  OPENSPEC_HD float* tile(const int32_t* pages, int slot, int index) const {
    const int slice = index / tiles_per_slice, page = slice / num_slices;
    const int id = pages[static_cast<int64_t>(slot) * pages_per_state + page];
    return reinterpret_cast<float*>(data + static_cast<size_t>(id) * page_stride +
                                    static_cast<size_t>(slice - page * num_slices) * slice_stride +
                                    static_cast<size_t>(index - slice * tiles_per_slice) *
                                        kTileBytes);
  }
};

}  // namespace openspec
