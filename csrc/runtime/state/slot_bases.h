#pragma once

#include <optional>
#include <span>
#include <vector>

#include "core/page_pool.h"
#include "kernels/delta_net/delta_states.h"
#include "model/targets/state_needs.h"

namespace openspec {

/// How the bases of running states lie in the pages of the KV pool; nothing of it exists where a
/// target has none.
struct BasePlan {
  int num_slots = 0;
  int num_slices = 0;       // parts of a page, one for each KV layer
  int tiles_per_slice = 0;  // of DeltaStates
  int num_pages = 0;        // of a sequence

  /// `slice_bytes`: of a page in one KV layer. Throws ArgumentError if that is less than a tile.
  BasePlan(const StateNeeds& needs, size_t slice_bytes, int num_slots);
};

/// The bases of the records of running sequences (StateNeeds), by slot: in which pages of the pool
/// they are, and how many blocks of records each holds.
///
/// A step that folds reads the pages that the slot has and writes others, which are the slot's from
/// the commit on: a step that is given up has changed nothing, and a base that others may read is
/// never written.
class SlotBases {
 public:
  explicit SlotBases(const BasePlan& plan);

  bool exist() const { return plan_.num_pages > 0; }
  /// Of a sequence.
  int num_pages() const { return plan_.num_pages; }
  /// Blocks in the slot's base.
  int num_folded(int slot) const { return num_folded_[size_t(slot)]; }
  /// The pages that the slot's base lies in; none where no block is folded.
  std::span<const PageId> pages(int slot) const;

  /// Whether a step of up to so many rows needs pages to fold into; `first`: where its first row
  /// stands, at most.
  bool folds(int slot, int first, int num_rows) const {
    return exist() && folded_after(first, num_rows) > num_folded(slot);
  }
  /// Whether a sequence whose records are there can go on from any position in [first, last].
  bool serves(int slot, int first, int last) const {
    return !exist() || (num_folded(slot) <= folded_blocks(first) &&
                        num_folded(slot) + 1 >= folded_blocks(last));
  }

  /// The slot has a new sequence, without a base.
  void add(int slot) { num_folded_[size_t(slot)] = 0; }
  /// Under which name the slot's base is published; none: it is not.
  std::optional<PageHash>& key(int slot) { return keys_[size_t(slot)]; }
  /// Where the slot's step may fold to.
  void set_target(int slot, std::span<const PageId> pages);
  /// The slot's base lies in `pages` and holds so many blocks.
  void set(int slot, std::span<const PageId> pages, int num_folded);

  /// The tables of pages and the shape of a base for ops; `data` and strides are the pool's.
  DeltaStates view() const;

 private:
  BasePlan plan_;
  std::vector<int32_t> read_, write_;          // [num_slots, num_pages]
  std::vector<int> num_folded_;                // [num_slots]
  std::vector<std::optional<PageHash>> keys_;  // [num_slots]
};

}  // namespace openspec
