#include "runtime/state/slot_records.h"

#include <utility>

#include "core/check.h"
#include "kernels/delta_net/delta_net.h"

namespace openspec {

namespace {
// One for the prompt and one for the answer of each running sequence.
constexpr int kSnapshotsPerSlot = 2;
}  // namespace

RecordPlan::RecordPlan(const StateNeeds& needs, const SequenceLimits& limits) {
  if (!needs.has_records()) return;
  OPENSPEC_CHECK_ARG(needs.record_bytes % 16 == 0 && needs.num_read >= 1,
                     "a record has a multiple of 16 bytes and follows at least one, got ",
                     needs.record_bytes, " and ", needs.num_read);
  record_bytes = needs.record_bytes;
  num_slots = limits.max_num_seqs;
  // A row that runs again (PrefixCache::attach) reads those before it.
  num_kept = needs.num_read + limits.num_rows_behind;
  // A base that serves the end of a block holds all but the two blocks before it.
  const bool has_blocks = needs.has_base() && limits.page_size % kDeltaBlock == 0;
  num_in_snapshot = has_blocks ? 2 * kDeltaBlock : num_kept;
  num_steps = limits.num_steps;
  // When a step is committed, the last full page's end is among the records still, whatever the
  // steps after it lay.
  const int num_later = limits.page_size + (2 * num_steps - 1) * (1 + limits.draft_room);
  ring_size = num_kept + num_later;
  if (needs.tail_bytes > 0) {
    tail_bytes = needs.tail_bytes;
    num_tail_kept = needs.num_tail_read + limits.num_rows_behind;
    tail_ring_size = num_tail_kept + num_later;
  }
  if (needs.has_base()) {  // blocks lie in one piece, see DeltaNetParams
    ring_size =
        (std::max(ring_size, 4 * kDeltaBlock) + kDeltaBlock - 1) / kDeltaBlock * kDeltaBlock;
  }
  num_snapshots = limits.enable_prefix_caching ? kSnapshotsPerSlot * num_slots : 0;
  snapshot_interval = limits.snapshot_interval;
}

SlotRecords::SlotRecords(const RecordPlan& plan, Device device, Copy copy)
    : plan_(plan),
      copy_(std::move(copy)),
      memory_(plan.bytes(), memory_of(device)),
      slots_(size_t(plan.num_slots), Slot(plan)) {
  if (device == Device::kCpu || memory_.bytes() == 0) return;
  // What made-up steps (time_step) make of records that were never written must be finite.
  device::fill_zero(memory_.data(), memory_.bytes(), nullptr);
  device::synchronize(nullptr);
}

void SlotRecords::copy_kept(int slot, int length, int num_records, std::byte* kept, bool is_out) {
  const auto copy = [&](const RecordView& ring, int num_kept) {
    std::byte* outside = kept;
    for (int position = std::max(0, length - num_kept); position < length;) {
      const int count = std::min(length - position, ring.ring_size - position % ring.ring_size);
      const size_t bytes = size_t(count) * ring.record_bytes;
      std::byte* in_ring = ring.at(slot, position);
      copy_(is_out ? outside : in_ring, is_out ? in_ring : outside, bytes);
      outside += bytes;
      position += count;
    }
    kept += size_t(num_kept) * ring.record_bytes;
  };
  copy(view(), num_records);
  if (plan_.tail_bytes > 0) copy(tails(), plan_.num_tail_kept);
}

void SlotRecords::attach(int slot, const PageHash& prefix, int length) {
  const int place = snapshots_.at(prefix);
  last_use_[size_t(place)] = ++latest_use_;
  copy_kept(slot, length, plan_.num_in_snapshot, snapshot(place), /*is_out=*/false);
  slots_[size_t(slot)].first_valid = length - plan_.num_in_snapshot;
  slots_[size_t(slot)].stays_from = next_stay(length);
}

void SlotRecords::lose_place(size_t place) {
  if (snapshots_.erase(prefix_of_[place]) > 0) {
    lost_.push_back({prefix_of_[place], base_of_[place]});
  }
  prefix_of_[place] = {};
  base_of_[place] = {};
  last_use_[place] = 0;
}

void SlotRecords::forget_base(const PageHash& key) {
  for (size_t place = 0; place < base_of_.size(); ++place) {
    if (base_of_[place].num_folded > 0 && base_of_[place].key == key) lose_place(place);
  }
}

void SlotRecords::keep_last(Slot& own) {
  uint64_t& made = own.made[size_t(SnapshotOf::kPrompt)];
  const auto place = std::find(last_use_.begin(), last_use_.end(), made);
  if (place != last_use_.end()) *place -= kFirstUse;
  made = 0;
  own.last_stays = false;
}

int SlotRecords::take_place(uint64_t replaced) {
  auto place = std::find(last_use_.begin(), last_use_.end(), replaced);
  if (place == last_use_.end() && last_use_.size() < size_t(plan_.num_snapshots)) {
    prefix_of_.emplace_back();
    base_of_.emplace_back();
    last_use_.emplace_back();
    return static_cast<int>(last_use_.size()) - 1;
  }
  if (place == last_use_.end()) place = std::min_element(last_use_.begin(), last_use_.end());
  const auto index = place - last_use_.begin();
  lose_place(size_t(index));
  return static_cast<int>(index);
}

bool SlotRecords::publish(int slot, const PageHash& prefix, int length, int end, SnapshotOf of) {
  Slot& own = slots_[size_t(slot)];
  const int first = std::max(0, length - plan_.num_in_snapshot);
  const bool is_there = first >= own.first_valid && first >= end - plan_.ring_size;
  const auto saving = std::find(own.saved_length.begin(), own.saved_length.end(), length);
  const bool is_saved = !is_there && saving != own.saved_length.end();
  if (!(is_there || is_saved) || plan_.num_snapshots == 0 || has_snapshot(prefix)) return false;
  if (of == SnapshotOf::kPrompt && own.last_stays) keep_last(own);
  const int place = take_place(own.made[size_t(of)]);
  if (is_saved) {
    const auto step = static_cast<int>(saving - own.saved_length.begin());
    const std::byte* from = saved(slot, step);
    const int num_records = length - first,
              num_more = std::min(length, plan_.num_kept) - num_records;
    copy_(snapshot(place), from + size_t(num_more) * plan_.record_bytes,
          size_t(num_records) * plan_.record_bytes);
    if (plan_.tail_bytes > 0) {
      copy_(snapshot(place) + size_t(plan_.num_in_snapshot) * plan_.record_bytes,
            from + size_t(plan_.num_kept) * plan_.record_bytes, plan_.tails_bytes());
    }
  } else {
    copy_kept(slot, length, plan_.num_in_snapshot, snapshot(place), /*is_out=*/true);
  }
  prefix_of_[size_t(place)] = prefix;
  last_use_[size_t(place)] = own.made[size_t(of)] = ++latest_use_;
  snapshots_.emplace(prefix, place);
  if (of == SnapshotOf::kPrompt && length >= own.stays_from) {
    own.last_stays = true;
    own.stays_from = next_stay(length);
  }
  return true;
}

void SlotRecords::reset_snapshots() {
  snapshots_.clear();
  prefix_of_.clear();
  base_of_.clear();
  last_use_.clear();
  lost_.clear();
}

}  // namespace openspec
