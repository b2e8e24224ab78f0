#include "kernels/drafts/draft_rows.h"

#include "kernels/draft_rows_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

constexpr int kPageSize = 4;

using Ids = std::vector<int32_t>;

}  // namespace

// Two sequences: slot 3 has committed three rows at 5 and chosen token 108, slot 0 one of two rows
// of its prompt.
TEST(extended_rows_are_one_position_on) {
  DraftTable table(4, 16, kPageSize);
  table.set(3, {100, 101, 102, 103, 104, 105, 106, 107, 108});
  table.set(0, {50, 51, 52, 53, 54});
  const Ids span_begin = {0, 4, 6}, span_kv_len = {5, 1}, span_seq = {3, 0};
  const Ids num_computed = {3, 2};
  DraftBatch batch(5, 2);
  Ids last_row(4, 77);
  extend_rows_cpu({}, {.step = {.num_rows = 6,
                                .num_spans = 2,
                                .span_begin = span_begin.data(),
                                .span_kv_len = span_kv_len.data(),
                                .span_seq = span_seq.data()},
                       .num_computed = num_computed.data(),
                       .table = table.view(),
                       .page_size = kPageSize,
                       .out = batch.rows(),
                       .last_row = last_row.data()});
  CHECK_EQ(batch.row_token, (Ids{106, 107, 108, 52, 53}));
  CHECK_EQ(batch.row_position, (Ids{6, 7, 8, 2, 3}));
  CHECK_EQ(batch.row_span, (Ids{0, 0, 0, 1, 1}));
  CHECK_EQ(batch.row_parent, (Ids{-1, 0, 1, -1, 3}));
  CHECK_EQ(batch.source, (Ids{0, 1, 2, 4, 5}));
  CHECK_EQ(batch.span_begin, (Ids{0, 3, 5}));
  CHECK_EQ(batch.span_kv_len, (Ids{6, 2}));
  CHECK_EQ(batch.span_seq, span_seq);
  for (size_t row = 0; row < 5; ++row) {
    const int slot = span_seq[static_cast<size_t>(batch.row_span[row])];
    CHECK_EQ(batch.row_kv_slot[row], table.kv_slot(slot, batch.row_position[row]));
  }
  CHECK_EQ(last_row, (Ids{-1, -1, -1, 2}));
}

TEST(rows_of_an_accepted_path_may_stand_apart) {
  DraftTable table(1, 16, kPageSize);
  table.set(0, {100, 101, 102, 103, 104});
  const Ids span_begin = {0, 6}, span_kv_len = {1}, span_seq = {0};
  const Ids num_computed = {3}, committed_row = {0, 2, 5, -9, -9, -9};
  DraftBatch batch(3, 1);
  Ids last_row(1, 77);
  extend_rows_cpu({}, {.step = {.num_rows = 6,
                                .num_spans = 1,
                                .span_begin = span_begin.data(),
                                .span_kv_len = span_kv_len.data(),
                                .span_seq = span_seq.data()},
                       .num_computed = num_computed.data(),
                       .committed_row = committed_row.data(),
                       .table = table.view(),
                       .page_size = kPageSize,
                       .out = batch.rows(),
                       .last_row = last_row.data()});
  CHECK_EQ(batch.row_token, (Ids{102, 103, 104}));
  CHECK_EQ(batch.row_position, (Ids{2, 3, 4}));
  CHECK_EQ(batch.row_parent, (Ids{-1, 0, 1}));
  CHECK_EQ(batch.source, (Ids{0, 2, 5}));
  CHECK_EQ(last_row, (Ids{2}));
}

// Slot 1 begins: its first token has a row too. Slot 0 goes on.
TEST(extended_rows_may_have_the_first_token) {
  DraftTable table(2, 16, kPageSize);
  table.set(1, {100, 101, 102, 103});
  table.set(0, {50, 51, 52, 53, 54});
  const Ids span_begin = {0, 3, 5}, span_kv_len = {0, 1}, span_seq = {1, 0};
  const Ids num_computed = {3, 2};
  DraftBatch batch(7, 2);
  Ids last_row(2, 77);
  extend_rows_cpu({}, {.step = {.num_rows = 5,
                                .num_spans = 2,
                                .span_begin = span_begin.data(),
                                .span_kv_len = span_kv_len.data(),
                                .span_seq = span_seq.data()},
                       .num_computed = num_computed.data(),
                       .table = table.view(),
                       .page_size = kPageSize,
                       .from_start = true,
                       .out = batch.rows(),
                       .last_row = last_row.data()});
  CHECK_EQ(batch.row_token, (Ids{100, 101, 102, 103, 52, 53, 0}));
  CHECK_EQ(batch.row_position, (Ids{0, 1, 2, 3, 2, 3, 0}));
  CHECK_EQ(batch.row_parent, (Ids{-1, 0, 1, 2, -1, 4, -1}));
  CHECK_EQ(batch.source, (Ids{-1, 0, 1, 2, 3, 4, -1}));
  CHECK_EQ(batch.span_begin, (Ids{0, 4, 6}));
  CHECK_EQ(batch.span_kv_len, (Ids{0, 2}));
  CHECK_EQ(last_row, (Ids{-1, 3}));
}

TEST(a_chain_walks_on_from_the_last_known_token) {
  DraftTable table(3, 16, kPageSize);
  table.set(2, {10, 11, 12});
  table.set(1, {20, 21, 22, 23, 24, 25});
  const Ids seq = {2, 0, 1}, num_wanted = {3, 0, 1};
  constexpr int kMaxDrafts = 3;
  DraftBatch batch(3, 3);
  Ids drafts(3 * kMaxDrafts, -9), num_drafts(3, -9), row_of_seq(3, -9), chosen(3);
  const auto step = [&](int depth) {
    chain_rows_cpu({}, {.table = table.view(),
                        .seq = seq.data(),
                        .num_wanted = num_wanted.data(),
                        .num_seqs = 3,
                        .max_drafts = kMaxDrafts,
                        .depth = depth,
                        .page_size = kPageSize,
                        .chosen = chosen.data(),
                        .out = batch.rows(),
                        .drafts = drafts.data(),
                        .num_drafts = num_drafts.data(),
                        .row_of_seq = row_of_seq.data()});
  };
  step(0);
  CHECK_EQ(row_of_seq, (Ids{0, -1, 1}));
  CHECK_EQ(batch.row_token, (Ids{12, 25, 0}));
  CHECK_EQ(batch.row_position, (Ids{2, 5, 0}));
  CHECK_EQ(batch.row_span, (Ids{0, 1, -1}));
  CHECK_EQ(batch.source, (Ids{2, 1, -1}));
  CHECK_EQ(batch.span_begin, (Ids{0, 1, 2, 2}));
  chosen = {70, 80, -5};
  step(1);
  CHECK_EQ(batch.row_token, (Ids{70, 80, 0}));
  CHECK_EQ(batch.row_position, (Ids{3, 5, 0}));
  CHECK_EQ(batch.span_kv_len, (Ids{3, 5, 0}));
  CHECK_EQ(batch.row_kv_slot[0], table.kv_slot(2, 3));
  CHECK_EQ(batch.row_kv_slot[1], int64_t{-1});  // one draft is all that it wants
  chosen = {71, 81, -5};
  step(2);
  chosen = {72, 82, -5};
  step(3);
  CHECK_EQ(num_drafts, num_wanted);
  CHECK_EQ((Ids(drafts.begin(), drafts.begin() + 3)), (Ids{70, 71, 72}));
  CHECK_EQ((Ids(drafts.begin() + 3, drafts.begin() + 6)), (Ids{-9, -9, -9}));
  CHECK_EQ(drafts[6], 80);
}

// Slot 2 has 14 committed tokens and two rows, slot 1 three tokens, all within the window; a span
// is empty.
TEST(window_begins_with_a_page) {
  DraftTable table(3, 16, kPageSize);
  const Ids span_begin = {0, 2, 3, 3}, span_kv_len = {14, 3, 0}, span_seq = {2, 1, 0};
  constexpr int kWindow = 5, kPages = window_pages(kWindow, 2, kPageSize);
  CHECK_EQ(kPages, 3);
  Ids kv_len(3, 77), seq(3, 77), pages(3 * kPages, -5);
  window_spans_cpu({}, {.span_begin = span_begin.data(),
                        .span_kv_len = span_kv_len.data(),
                        .span_seq = span_seq.data(),
                        .from = table.view().pages,
                        .num_spans = 3,
                        .window = kWindow,
                        .page_size = kPageSize,
                        .max_pages = kPages,
                        .out_kv_len = kv_len.data(),
                        .out_seq = seq.data(),
                        .out_pages = pages.data()});
  CHECK_EQ(kv_len, (Ids{6, 3, 0}));  // from token 8 on
  CHECK_EQ(seq, (Ids{0, 1, 2}));
  const auto page_of = [&](int slot, int token) {
    return table.pages[static_cast<size_t>(slot * table.pages_per_seq + token / kPageSize)];
  };
  CHECK_EQ(pages, (Ids{page_of(2, 8), page_of(2, 12), -5, page_of(1, 0), -5, -5, -5, -5, -5}));
}

TEST(window_has_room_for_its_pages) {
  for (int page_size : {1, 4, 16}) {
    for (int window = 1; window < 40; ++window) {
      for (int kv_len = 0; kv_len < 90; ++kv_len) {
        for (int rows : {1, 3, 17}) {
          const int begin = window_begin(kv_len, window, page_size);
          CHECK_EQ(begin % page_size, 0);
          CHECK(begin >= 0 && kv_len - begin >= std::min(kv_len, window));
          const int pages = (kv_len + rows + page_size - 1) / page_size - begin / page_size;
          CHECK(pages <= window_pages(window, rows, page_size));
        }
      }
    }
  }
}
