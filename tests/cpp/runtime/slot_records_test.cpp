#include "runtime/state/slot_records.h"

#include <cstring>

#include "check_test.h"

using namespace openspec;

namespace {

constexpr int kPage = 4;

/// The records of two slots on the host; a record holds its position and what was written last.
struct Records {
  explicit Records(int num_steps = 1, int snapshot_interval = 8192)
      : plan({.kv_layers = {}, .record_bytes = 16, .num_read = 2},
             {.max_num_seqs = 2,
              .page_size = kPage,
              .draft_room = 3,
              .num_steps = num_steps,
              .snapshot_interval = snapshot_interval}),
        slots(plan, Device::kCpu,
              [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }) {
    for (int slot : {0, 1}) slots.add(slot);
  }
  void write(int slot, int begin, int end, int value = 0) {
    for (int i = begin; i < end; ++i) {
      const int32_t record[4] = {i, value, 0, 0};
      std::memcpy(slots.view().at(slot, i), record, sizeof record);
    }
  }
  bool holds(int slot, int position, int value = 0) {
    int32_t record[4];
    std::memcpy(record, slots.view().at(slot, position), sizeof record);
    return record[0] == position && record[1] == value;
  }
  bool publishes(int slot, uint64_t name, int length, int end, bool is_answer = false) {
    slots.publish(slot, {name, 0}, length, end,
                  is_answer ? SnapshotOf::kAnswer : SnapshotOf::kPrompt);
    return slots.has_snapshot({name, 0});
  }

  RecordPlan plan;
  SlotRecords slots;
};

}  // namespace

TEST(rings_hold_a_page_and_the_steps_under_way) {
  CHECK_EQ(Records(1).plan.ring_size, 2 + kPage + 4);
  CHECK_EQ(Records(2).plan.ring_size, 2 + kPage + 3 * 4);
  const RecordPlan nothing({}, {.max_num_seqs = 2});
  CHECK_EQ(nothing.bytes(), 0);
}

TEST(what_was_saved_is_there_again) {
  Records records(2);
  const int ring = records.plan.ring_size;
  records.write(1, 0, 9);
  records.slots.save(1, /*step=*/0, 9);
  records.write(1, 9, 9 + ring);
  records.slots.save(1, /*step=*/1, 9 + ring);
  records.write(1, 9 + ring, 9 + 3 * ring, /*value=*/1);
  records.slots.restore(1, 1, 9 + ring);
  CHECK(records.holds(1, 8 + ring) && records.holds(1, 7 + ring));
  records.slots.restore(1, 0, 9);
  CHECK(records.holds(1, 8) && records.holds(1, 7));
}

TEST(a_snapshot_is_what_the_ring_still_has) {
  Records records;
  const int ring = records.plan.ring_size;
  records.write(0, 0, 30);
  CHECK(!records.publishes(0, 1, 12, 12 - 2 + ring + 1));
  CHECK(records.publishes(0, 1, 28, 28 - 2 + ring));
  records.slots.attach(1, {1, 0}, 28);
  CHECK(records.holds(1, 27) && records.holds(1, 26));
  // Of what came before the prefix, or was lost, the slot has no record.
  CHECK(!records.publishes(1, 2, 27, 28));
  CHECK(records.publishes(1, 2, 28, 28));
  records.slots.lose(0, 30);
  CHECK(!records.publishes(0, 3, 31, 32));
  CHECK(records.publishes(0, 3, 32, 32));
}

TEST(a_snapshot_is_what_a_step_under_way_saved) {
  Records records(2);
  const int ring = records.plan.ring_size;
  records.write(0, 0, 20);
  records.slots.save(0, /*step=*/1, 20);
  records.write(0, 20, 20 + 2 * ring);
  CHECK(!records.publishes(0, 1, 16, 20 + 2 * ring));
  CHECK(records.publishes(0, 1, 20, 20 + 2 * ring));
  records.slots.attach(1, {1, 0}, 20);
  CHECK(records.holds(1, 19) && records.holds(1, 18));
  // What was not whole then is not now, nor what another sequence saved.
  records.slots.lose(0, 40);
  records.slots.save(0, 1, 40);
  CHECK(!records.publishes(0, 2, 40, 40 + 2 * ring));
  records.slots.add(0);
  CHECK(!records.publishes(0, 3, 20, 20 + 2 * ring));
}

TEST(the_last_of_a_prompt_and_of_an_answer_stay) {
  Records records;
  for (const int slot : {0, 1}) records.write(slot, 0, 8);
  CHECK(records.publishes(0, 1, 4, 8) && records.publishes(0, 2, 8, 8));
  CHECK(!records.slots.has_snapshot({1, 0}));
  CHECK(records.publishes(0, 3, 8, 8, /*is_answer=*/true));
  CHECK(records.slots.has_snapshot({2, 0}));
  records.slots.attach(1, {2, 0}, 8);
  CHECK(records.publishes(0, 4, 8, 8));  // somebody went on from its last
  CHECK(records.slots.has_snapshot({2, 0}));
  // Four in all: what was used longest ago goes.
  records.slots.add(0);
  CHECK(records.publishes(0, 5, 8, 8) && records.publishes(0, 6, 8, 8, true));
  CHECK(!records.slots.has_snapshot({3, 0}) && records.slots.has_snapshot({4, 0}));
  records.slots.reset_snapshots();
  CHECK(!records.slots.has_snapshot({5, 0}));
}

TEST(a_snapshot_where_prompts_part_takes_no_other_ones_place) {
  Records records;
  records.write(0, 0, 20);
  CHECK(records.publishes(0, 1, 16, 20));
  CHECK(records.slots.publish(0, {2, 0}, 16, 20, SnapshotOf::kShared));
  CHECK(records.publishes(0, 3, 16, 20));
  CHECK(records.slots.has_snapshot({2, 0}));
  records.slots.base_of({2, 0}) = {.num_folded = 1, .key = {7, 7}};
  records.slots.forget_base({8, 8});
  CHECK(records.slots.needs_base({7, 7}) && !records.slots.needs_base({8, 8}));
  CHECK(records.slots.has_snapshot({2, 0}));
  records.slots.forget_base({7, 7});
  CHECK(!records.slots.has_snapshot({2, 0}) && records.slots.has_snapshot({3, 0}));
  const std::vector<LostSnapshot> lost = records.slots.take_lost();
  CHECK_EQ(lost.size(), 2u);
  CHECK(lost[0].prefix == PageHash(1, 0) && lost[0].base.num_folded == 0);
  CHECK(lost[1].prefix == PageHash(2, 0) && lost[1].base.key == PageHash(7, 7));
  CHECK(records.slots.take_lost().empty());
  CHECK_EQ(records.slots.wanted(0), 0);
}

TEST(of_every_interval_of_a_prompt_the_first_snapshot_stays_and_is_the_first_to_go) {
  Records records(1, /*snapshot_interval=*/16);
  records.write(0, 0, 60);
  const auto has = [&](uint64_t length) { return records.slots.has_snapshot({length, 0}); };
  for (const int length : {8, 12, 20, 24, 28}) {
    CHECK(records.publishes(0, static_cast<uint64_t>(length), length, length));
  }
  CHECK(!has(12) && has(20) && !has(24) && has(28));
  CHECK(records.publishes(0, 40, 40, 40) && records.publishes(0, 44, 44, 44));
  CHECK(has(20) && !has(28) && has(40) && has(44));
  // Four places are taken with this one, and it is the last that was made of an answer.
  CHECK(records.publishes(0, 48, 48, 48, /*is_answer=*/true));
  records.write(1, 0, 8);
  CHECK(records.publishes(1, 1, 8, 8));
  CHECK(!has(20) && has(40));
  // Whoever goes on from one has it stay as long as any other.
  records.slots.attach(1, {40, 0}, 40);
  records.slots.add(1);
  CHECK(records.publishes(1, 2, 8, 8));
  CHECK(has(40) && !has(44) && has(48));
  // A slot that went on from 40 tokens has the next one stay at 48.
  records.slots.reset_snapshots();
  CHECK(records.publishes(0, 40, 40, 40));
  records.slots.add(1);
  records.slots.attach(1, {40, 0}, 40);
  records.write(1, 40, 60);
  CHECK(records.publishes(1, 5, 44, 44) && records.publishes(1, 6, 52, 52));
  CHECK(records.publishes(1, 7, 56, 56));
  CHECK(!records.slots.has_snapshot({5, 0}) && records.slots.has_snapshot({6, 0}));
}

TEST(a_snapshot_at_the_end_of_a_block_is_two_blocks) {
  const StateNeeds needs = {.kv_layers = {},
                            .record_bytes = 16,
                            .num_read = 47,
                            .tail_bytes = 16,
                            .num_tail_read = 3,
                            .num_base_tiles = 1};
  const RecordPlan plan(needs, {.max_num_seqs = 2, .page_size = 16, .draft_room = 3});
  CHECK_EQ(plan.num_in_snapshot, 32);
  CHECK_EQ(RecordPlan(needs, {.max_num_seqs = 2, .page_size = 8}).num_in_snapshot, 47);
  SlotRecords slots(plan, Device::kCpu,
                    [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); });
  const auto write = [&](int slot, int begin, int end, int value) {
    for (int32_t i = begin; i < end; ++i) {
      const int32_t record[4] = {i, value, 0, 0};
      std::memcpy(slots.view().at(slot, i), record, sizeof record);
      std::memcpy(slots.tails().at(slot, i), record, sizeof record);
    }
  };
  const auto check = [&](const RecordView& ring, int slot, int begin, int end, int value) {
    for (int i = begin; i < end; ++i) {
      int32_t record[4];
      std::memcpy(record, ring.at(slot, i), sizeof record);
      CHECK(record[0] == i && record[1] == value);
    }
  };
  // Of the ring, and of what a step saved: of a short prefix and of a long one.
  for (const int length : {32, 96}) {
    for (const bool is_saved : {false, true}) {
      slots.reset_snapshots();
      for (const int slot : {0, 1}) slots.add(slot);
      write(0, 0, length, 5);
      if (is_saved) {
        slots.save(0, 0, length);
        write(0, length, length + 3 * plan.ring_size, 6);
      }
      const int end = is_saved ? length + 3 * plan.ring_size : length;
      CHECK(slots.publish(0, {1, 0}, length, end, SnapshotOf::kPrompt));
      slots.attach(1, {1, 0}, length);
      check(slots.view(), 1, length - 32, length, 5);
      check(slots.tails(), 1, length - 3, length, 5);
    }
  }
}

TEST(what_lies_beside_records_goes_where_they_go) {
  const RecordPlan plan(
      {.kv_layers = {}, .record_bytes = 16, .num_read = 4, .tail_bytes = 32, .num_tail_read = 1},
      {.max_num_seqs = 2, .page_size = kPage, .draft_room = 3});
  CHECK_EQ(plan.tail_ring_size, 1 + kPage + 4);
  CHECK_EQ(plan.copy_bytes(plan.num_kept), 4 * 16 + 32);
  SlotRecords slots(plan, Device::kCpu,
                    [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); });
  const auto write = [&](int slot, int begin, int end, int value) {
    for (int32_t i = begin; i < end; ++i) {
      const int32_t tail[8] = {i, 0, 0, 0, 0, 0, 0, value};
      std::memcpy(slots.view().at(slot, i), tail, 16);
      std::memcpy(slots.tails().at(slot, i), tail, sizeof tail);
    }
  };
  const auto holds = [&](int slot, int position, int value) {
    int32_t tail[8];
    std::memcpy(tail, slots.tails().at(slot, position), sizeof tail);
    return tail[0] == position && tail[7] == value;
  };
  for (const int slot : {0, 1}) slots.add(slot);
  write(1, 0, 9, 5);
  slots.save(1, 0, 9);
  write(1, 9, 9 + 3 * plan.ring_size, 6);
  CHECK(!holds(1, 8, 5));
  slots.restore(1, 0, 9);
  CHECK(holds(1, 8, 5));
  CHECK(slots.publish(1, {1, 0}, 9, 9, SnapshotOf::kPrompt));
  slots.attach(0, {1, 0}, 9);
  CHECK(holds(0, 8, 5));
}
