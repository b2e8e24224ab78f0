#include "runtime/state/slot_bases.h"

#include <algorithm>

#include "core/check.h"

namespace openspec {

BasePlan::BasePlan(const StateNeeds& needs, size_t slice_bytes, int num_slots) {
  if (!needs.has_base()) return;
  this->num_slots = num_slots;
  num_slices = static_cast<int>(needs.kv_layers.size());
  tiles_per_slice = static_cast<int>(slice_bytes / DeltaStates::kTileBytes);
  OPENSPEC_CHECK_ARG(num_slices > 0 && tiles_per_slice > 0, "a page has ", slice_bytes,
                     " bytes in a layer, a running state needs ", DeltaStates::kTileBytes,
                     "; raise page_size");
  const int tiles_per_page = num_slices * tiles_per_slice;
  num_pages = (needs.num_base_tiles + tiles_per_page - 1) / tiles_per_page;
}

SlotBases::SlotBases(const BasePlan& plan) : plan_(plan) {
  const size_t num_entries = size_t(plan.num_slots) * size_t(plan.num_pages);
  read_.resize(num_entries);
  write_.resize(num_entries);
  num_folded_.resize(size_t(plan.num_slots));
  keys_.resize(size_t(plan.num_slots));
}

std::span<const PageId> SlotBases::pages(int slot) const {
  if (!exist() || num_folded(slot) == 0) return {};
  return std::span(read_).subspan(size_t(slot) * size_t(num_pages()), size_t(num_pages()));
}

void SlotBases::set_target(int slot, std::span<const PageId> pages) {
  std::copy(pages.begin(), pages.end(), write_.begin() + ptrdiff_t{slot} * num_pages());
}

void SlotBases::set(int slot, std::span<const PageId> pages, int num_folded) {
  std::copy(pages.begin(), pages.end(), read_.begin() + ptrdiff_t{slot} * num_pages());
  num_folded_[size_t(slot)] = num_folded;
  key(slot).reset();
}

DeltaStates SlotBases::view() const {
  DeltaStates view;
  view.num_slices = std::max(1, plan_.num_slices);
  view.tiles_per_slice = plan_.tiles_per_slice;
  view.pages_per_state = plan_.num_pages;
  view.read_pages = read_.data();
  view.write_pages = write_.data();
  return view;
}

}  // namespace openspec
