#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/prefix_hash.h"
#include "kernels/common/records.h"
#include "model/targets/state_needs.h"
#include "model/weights/buffer.h"
#include "runtime/state/sequence_limits.h"

namespace openspec {

/// How the records of running sequences lie; nothing of it exists where a target has no state.
struct RecordPlan {
  size_t record_bytes = 0;
  int num_slots = 0;
  int ring_size = 0;        // records of a slot
  int num_kept = 0;         // records before a length that make it possible to go on from there
  int num_in_snapshot = 0;  // the same where a page ends
  // The same of what lies beside the records (StateNeeds::tail_bytes), in rings of its own.
  size_t tail_bytes = 0;
  int tail_ring_size = 0, num_tail_kept = 0;
  int num_steps = 0;      // under way at a time
  int num_snapshots = 0;  // of prefixes
  int snapshot_interval = 0;

  RecordPlan(const StateNeeds& needs, const SequenceLimits& limits);
  size_t records_bytes() const { return size_t(num_slots) * size_t(ring_size) * record_bytes; }
  size_t ring_bytes() const {
    return records_bytes() + size_t(num_slots) * size_t(tail_ring_size) * tail_bytes;
  }
  /// Of so many records and what lies beside the last of them.
  size_t copy_bytes(int num_records) const {
    return size_t(num_records) * record_bytes + tails_bytes();
  }
  size_t tails_bytes() const { return size_t(num_tail_kept) * tail_bytes; }
  size_t saved_bytes() const {
    return size_t(num_slots) * size_t(num_steps) * copy_bytes(num_kept);
  }
  size_t bytes() const {
    return ring_bytes() + saved_bytes() + size_t(num_snapshots) * copy_bytes(num_in_snapshot);
  }
};

/// What a snapshot was made of: the last of a prompt, with the first of every `snapshot_interval`
/// tokens, the last of an answer, or where prompts part.
enum class SnapshotOf : uint8_t { kPrompt, kAnswer, kShared };

/// A base of records (StateNeeds) that is kept in pages of the pool.
struct BaseName {
  int num_folded = 0;  // blocks; 0: there is none
  PageHash key{};      // of its first page; the names of the others come from it
};

/// A snapshot that is there no more.
struct LostSnapshot {
  PageHash prefix;
  BaseName base;
};

/// The running states of sequences: a ring of records for each slot, and snapshots of prefixes.
///
/// To go back is a length as long as the ring still has the records before it. A step of a prompt's
/// chunk may overwrite these, so what it goes on from is *saved* before, and *restored* if the step
/// is given up. A snapshot stands under the hash of the page that its prefix ends with. It is a
/// function of the tokens, so it may stay when the page goes. Where one has to go, those within
/// prompts from which nobody went on go first, then the one used longest ago.
class SlotRecords {
 public:
  /// Copies on the device that runs the steps, after what was launched there.
  using Copy = std::function<void(void* to, const void* from, size_t bytes)>;

  SlotRecords(const RecordPlan& plan, Device device, Copy copy);

  bool exist() const { return plan_.record_bytes > 0; }
  RecordView view() { return {memory_.as<std::byte>(), plan_.ring_size, plan_.record_bytes}; }
  RecordView tails() {
    return {memory_.at(plan_.records_bytes()), plan_.tail_ring_size, plan_.tail_bytes};
  }

  /// The slot has a new sequence, without state.
  void add(int slot) { slots_[size_t(slot)] = Slot(plan_); }
  /// Of the step in place `step` of those under way; `length`: where the slot's state stands then.
  void save(int slot, int step, int length) {
    copy_kept(slot, length, plan_.num_kept, saved(slot, step), true);
    Slot& own = slots_[size_t(slot)];
    const bool is_whole = std::max(0, length - plan_.num_in_snapshot) >= own.first_valid;
    own.saved_length[size_t(step)] = is_whole ? length : -1;
  }
  void restore(int slot, int step, int length) {
    copy_kept(slot, length, plan_.num_kept, saved(slot, step), false);
  }
  /// Records before `length` may have been overwritten: they do for the slot, but for no snapshot.
  void lose(int slot, int length) {
    int& first_valid = slots_[size_t(slot)].first_valid;
    first_valid = std::max(first_valid, length);
  }

  bool has_snapshot(const PageHash& prefix) const { return snapshots_.contains(prefix); }
  /// The base that the records of a snapshot go on from, which must be there.
  BaseName& base_of(const PageHash& prefix) { return base_of_[size_t(snapshots_.at(prefix))]; }
  /// The base under that name is not there any more, nor are snapshots that go on from it.
  void forget_base(const PageHash& key);
  /// Whether a snapshot goes on from the base under that name.
  bool needs_base(const PageHash& key) const {
    return std::any_of(base_of_.begin(), base_of_.end(), [&](const BaseName& base) {
      return base.num_folded > 0 && base.key == key;
    });
  }
  /// The slot goes on from the snapshot of a prefix of `length` tokens, which must be there.
  void attach(int slot, const PageHash& prefix, int length);
  /// Makes a snapshot of the slot's first `length` tokens, unless there is one or the ring, written
  /// up to `end` at most, may have lost a record of it and no step has saved them. It takes the
  /// place of the slot's last one of that kind, unless this stays (SnapshotOf) or somebody went on
  /// from it. Whether one was made.
  bool publish(int slot, const PageHash& prefix, int length, int end, SnapshotOf of);
  /// Those that went since the last call, but for reset_snapshots().
  std::vector<LostSnapshot> take_lost() { return std::exchange(lost_, {}); }
  /// Of how many of its first tokens the slot should make a snapshot, since others' pages hold
  /// them; 0: none. Where a prompt's chunk ends there, it does.
  int& wanted(int slot) { return slots_[size_t(slot)].wanted; }
  void reset_snapshots();

 private:
  std::byte* saved(int slot, int step) {
    return memory_.at(plan_.ring_bytes() +
                      size_t(slot * plan_.num_steps + step) * plan_.copy_bytes(plan_.num_kept));
  }
  std::byte* snapshot(int place) {
    return memory_.at(plan_.ring_bytes() + plan_.saved_bytes() +
                      size_t(place) * plan_.copy_bytes(plan_.num_in_snapshot));
  }
  /// Copies `num_records` records before `length`, and what is beside them, out of the rings or
  /// into them.
  void copy_kept(int slot, int length, int num_records, std::byte* kept, bool is_out);

  struct Slot {
    explicit Slot(const RecordPlan& plan)
        : saved_length(size_t(plan.num_steps), -1), stays_from(plan.snapshot_interval) {}
    std::vector<int> saved_length;  // by place of a step: what it saved is whole; -1: it is not
    int first_valid = 0;            // the ring has no record of an earlier position
    int wanted = 0;
    int stays_from;           // the next snapshot of the prompt that stays is as long, at least
    bool last_stays = false;  // the prompt's last one does
    // When its last snapshots were made, by SnapshotOf.
    uint64_t made[3] = {};
  };
  /// Where the next snapshot goes.
  int take_place(uint64_t replaced);
  /// The snapshot there is lost.
  void lose_place(size_t place);
  /// The last snapshot of the slot's prompt stays, behind a longer one: the first to make room.
  void keep_last(Slot& own);
  int next_stay(int length) const {
    return (length / plan_.snapshot_interval + 1) * plan_.snapshot_interval;
  }

  RecordPlan plan_;
  Copy copy_;
  Buffer memory_;  // rings of records and of tails, what is saved, snapshots
  std::vector<Slot> slots_;
  std::unordered_map<PageHash, int, PageHashHasher> snapshots_;  // where they are
  std::vector<PageHash> prefix_of_;                              // by place taken
  std::vector<BaseName> base_of_;                                // by place taken
  // By place taken: no two are the same, and those without kFirstUse make room first. 0: nothing
  // is there.
  std::vector<uint64_t> last_use_;
  static constexpr uint64_t kFirstUse = uint64_t{1} << 63;
  uint64_t latest_use_ = kFirstUse;
  std::vector<LostSnapshot> lost_;
};

}  // namespace openspec
