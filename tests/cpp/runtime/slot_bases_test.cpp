#include "runtime/state/slot_bases.h"

#include "check_test.h"
#include "core/check.h"

using namespace openspec;

namespace {

StateNeeds needs_of(int num_layers, int num_tiles) {
  return {.kv_layers = std::vector<KvLayerSpec>(static_cast<size_t>(num_layers), {1, 256}),
          .record_bytes = 16,
          .num_base_tiles = num_tiles};
}

}  // namespace

TEST(tiles_fill_the_slices_of_pages) {
  constexpr size_t kTile = DeltaStates::kTileBytes;
  CHECK_EQ(BasePlan(needs_of(3, 0), kTile, 2).num_pages, 0);
  CHECK_EQ(BasePlan(needs_of(3, 6), 2 * kTile, 2).num_pages, 1);
  CHECK_EQ(BasePlan(needs_of(3, 7), 2 * kTile, 2).num_pages, 2);
  CHECK_EQ(BasePlan(needs_of(3, 7), 2 * kTile + 100, 2).tiles_per_slice, 2);
  CHECK_THROWS(BasePlan(needs_of(3, 7), kTile - 1, 2), ArgumentError, "raise page_size");
}

TEST(folds_only_what_cannot_be_rejected) {
  // Whatever of up to 15 drafts is accepted, the next step reads that base or one block more.
  for (int first = 0; first < 100; ++first) {
    for (int num_new = 1; num_new < 70; ++num_new) {
      for (int num_drafts = 0; num_drafts < kMaxDeltaStepRows; ++num_drafts) {
        const int target = folded_after(first, num_new + num_drafts);
        for (const int next : {first + num_new - 1, first + num_new + num_drafts}) {
          CHECK_LE(target, folded_blocks(next));
          if (num_new + num_drafts <= kMaxDeltaStepRows || num_new > 1) {
            CHECK_GE(target + 1, folded_blocks(next));
          }
        }
      }
    }
  }
}

TEST(a_base_is_where_the_last_commit_left_it) {
  SlotBases bases(BasePlan(needs_of(1, 2), DeltaStates::kTileBytes, 3));
  CHECK(bases.exist());
  CHECK(bases.pages(1).empty());
  CHECK(!bases.folds(1, 0, 16));
  CHECK(!bases.folds(1, 31, 16));
  CHECK(bases.folds(1, 32, 1));
  CHECK(bases.folds(1, 0, 64));
  const std::vector<PageId> pages = {4, 7};
  bases.set(1, pages, 1);
  CHECK_EQ(std::vector<PageId>(bases.pages(1).begin(), bases.pages(1).end()), pages);
  CHECK(!bases.folds(1, 47, 1));
  CHECK(bases.folds(1, 48, 1));
  CHECK(bases.serves(1, 32, 63));
  CHECK(!bases.serves(1, 31, 32));
  CHECK(!bases.serves(1, 48, 64));
  bases.add(1);
  CHECK(bases.pages(1).empty());
}
