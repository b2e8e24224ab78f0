#include "kernels/drafts/kept_rows.h"

#include <numeric>
#include <vector>

#include "check_test.h"

using namespace openspec;

namespace {

using Ids = std::vector<int32_t>;

constexpr int kSlots = 4;

/// Features of one number each: a row's is 1000 * slot + position.
struct Ring {
  std::vector<int32_t> features = Ids(kSlots * kMaxKeptRows, -7);
  Ids begin = Ids(kSlots, 0), kv_len = Ids(kSlots, 0);

  KeptRows view() { return {features.data(), begin.data(), sizeof(int32_t)}; }

  /// A step of one row for each of the slots, of which those that do not count have none.
  void step(const Ids& slots, const Ids& num_computed) {
    Ids span_begin(slots.size() + 1), span_kv_len, rows;
    std::iota(span_begin.begin(), span_begin.end(), 0);
    for (int32_t slot : slots) {
      span_kv_len.push_back(kv_len[static_cast<size_t>(slot)]);
      rows.push_back(1000 * slot + span_kv_len.back());
    }
    KeepRowsParams params;
    params.rows.num_rows = params.rows.num_spans = static_cast<int>(slots.size());
    params.rows.span_begin = span_begin.data();
    params.rows.span_kv_len = span_kv_len.data();
    params.rows.span_seq = slots.data();
    params.num_computed = num_computed.data();
    params.features = rows.data();
    params.kept = view();
    keep_rows_cpu({}, params);
    for (size_t i = 0; i < slots.size(); ++i) {
      kv_len[static_cast<size_t>(slots[i])] += num_computed[i];
    }
  }

  struct Taken {
    Ids span_begin, span_kv_len, num_computed, rows;  // -1: padding
  };
  Taken take(const Ids& slots, int num_rows) {
    Taken taken{Ids(slots.size() + 1), Ids(slots.size()), Ids(slots.size()),
                Ids(static_cast<size_t>(num_rows), 99)};
    take_kept_rows_cpu({}, {.kept = view(),
                            .slot = slots.data(),
                            .kv_len = kv_len.data(),
                            .num_slots = static_cast<int>(slots.size()),
                            .num_rows = num_rows,
                            .span_begin = taken.span_begin.data(),
                            .span_kv_len = taken.span_kv_len.data(),
                            .num_computed = taken.num_computed.data(),
                            .source = taken.rows.data()});
    for (int32_t& row : taken.rows) {
      if (row >= 0) row = features[static_cast<size_t>(row)];
    }
    return taken;
  }
};

}  // namespace

TEST(what_waits_is_listed_once_by_slot_and_position) {
  Ring ring;
  ring.begin = ring.kv_len = {5, 100, 0, 31};
  ring.step({3, 0}, {1, 1});
  ring.step({0, 1, 3}, {1, 0, 1});
  const Ring::Taken taken = ring.take({0, 1, 3}, 6);
  CHECK_EQ(taken.span_begin, (Ids{0, 2, 2, 4}));
  CHECK_EQ(taken.span_kv_len, (Ids{5, 100, 31}));
  CHECK_EQ(taken.num_computed, (Ids{2, 0, 2}));
  CHECK_EQ(taken.rows, (Ids{5, 6, 3031, 3032, -1, -1}));
  CHECK_EQ(ring.take({0, 1, 3}, 3).rows, (Ids{-1, -1, -1}));
}

TEST(the_newest_rows_are_listed_where_room_is_short) {
  Ring ring;
  for (int i = 0; i < kMaxKeptRows + 3; ++i) ring.step({2}, {1});
  const Ring::Taken taken = ring.take({2}, kMaxKeptRows + 3);
  CHECK_EQ(taken.span_kv_len, (Ids{3}));
  CHECK_EQ(taken.num_computed, (Ids{kMaxKeptRows}));
  CHECK_EQ(taken.rows[0], 2003);
  CHECK_EQ(taken.rows[kMaxKeptRows - 1], 2000 + kMaxKeptRows + 2);
  CHECK_EQ(taken.rows[kMaxKeptRows], -1);
  for (int i = 0; i < 4; ++i) ring.step({2}, {1});
  CHECK_EQ(ring.take({2}, 2).rows, (Ids{2000 + kMaxKeptRows + 5, 2000 + kMaxKeptRows + 6}));
}
