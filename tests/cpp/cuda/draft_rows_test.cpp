#include "kernels/drafts/draft_rows.h"

#include "cuda/draft_rows_device.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

using Ids = std::vector<int32_t>;

}  // namespace

TEST(extend_rows_matches_the_cpu) {
  Rng rng(1);
  const DraftTable table = random_table(rng);
  const DeviceTableCopy device_table(table);
  for (const int num_spans : {1, 2, 31, 64, 257}) {
    const bool from_start = num_spans % 2 == 0;
    Ids span_begin = {0}, span_kv_len, span_seq, num_computed;
    for (int span = 0; span < num_spans; ++span) {
      const int slot = (span * 7 + num_spans) % kSlots;
      const int num_tokens = table.num_tokens[static_cast<size_t>(slot)];
      // Ends at the last known token, in a chunk before it, or computes nothing.
      const int kind = rng.integer(0, 3);
      const int count = kind == 0 ? 0 : rng.integer(1, std::min(num_tokens - 1, 9));
      const bool begins = span % 3 == 0;  // at the first token
      const int behind = kind == 1 ? std::min(2, num_tokens - 1 - count) : 0;
      const int kv_len = begins ? 0 : num_tokens - 1 - count - behind;
      span_begin.push_back(span_begin.back() + count + rng.integer(kind == 0 ? 1 : 0, 4));
      span_kv_len.push_back(kv_len);
      span_seq.push_back(slot);
      num_computed.push_back(count);
    }
    const int num_rows = span_begin.back() + rng.integer(0, 5);
    DraftBatch batch(num_rows + (from_start ? num_spans : 0), num_spans);
    const DeviceBatch device_batch(batch);
    Ids last_row(kSlots, 99);
    ExtendRowsParams params;
    params.step.num_rows = num_rows;
    params.step.num_spans = num_spans;
    params.step.span_begin = span_begin.data();
    params.step.span_kv_len = span_kv_len.data();
    params.step.span_seq = span_seq.data();
    params.num_computed = num_computed.data();
    params.table = table.view();
    params.page_size = kPageSize;
    params.from_start = from_start;
    params.out = batch.rows();
    params.last_row = last_row.data();
    extend_rows_cpu({}, params);

    const DeviceBuffer device_begin(span_begin), device_kv_len(span_kv_len), device_seq(span_seq),
        device_computed(num_computed), device_last(kSlots * sizeof(int32_t));
    params.step.span_begin = device_begin.as<int32_t>();
    params.step.span_kv_len = device_kv_len.as<int32_t>();
    params.step.span_seq = device_seq.as<int32_t>();
    params.num_computed = device_computed.as<int32_t>();
    params.table = device_table.view();
    params.out = device_batch.rows();
    params.last_row = device_last.as<int32_t>();
    CHECK_CUDA(extend_rows_cuda(params, nullptr));
    device_batch.check_equal(batch);
    CHECK(device_last.download<int32_t>() == last_row);
  }
}

TEST(chain_rows_matches_the_cpu) {
  Rng rng(2);
  const DraftTable table = random_table(rng);
  const DeviceTableCopy device_table(table);
  constexpr int kMaxDrafts = 5;
  for (const int num_seqs : {1, 3, 64, 300}) {
    Ids seq, num_wanted;
    for (int i = 0; i < num_seqs; ++i) {
      seq.push_back((i * 11) % kSlots);
      num_wanted.push_back(rng.integer(0, 2) == 0 ? 0 : rng.integer(1, kMaxDrafts));
    }
    DraftBatch batch(num_seqs, num_seqs);
    const DeviceBatch device_batch(batch);
    Ids drafts(static_cast<size_t>(num_seqs * kMaxDrafts), -9), num_drafts(seq.size(), -9);
    Ids row_of_seq(seq.size(), -9);
    const DeviceBuffer device_seq(seq), device_wanted(num_wanted), device_drafts(drafts),
        device_num_drafts(num_drafts), device_row_of_seq(row_of_seq);
    for (int depth = 0; depth <= kMaxDrafts; ++depth) {
      Ids chosen;
      for (int i = 0; i < num_seqs; ++i) chosen.push_back(rng.integer(0, 1 << 17));
      const DeviceBuffer device_chosen(chosen);
      ChainRowsParams params = {.table = table.view(),
                                .seq = seq.data(),
                                .num_wanted = num_wanted.data(),
                                .num_seqs = num_seqs,
                                .max_drafts = kMaxDrafts,
                                .depth = depth,
                                .page_size = kPageSize,
                                .chosen = chosen.data(),
                                .out = batch.rows(),
                                .drafts = drafts.data(),
                                .num_drafts = num_drafts.data(),
                                .row_of_seq = row_of_seq.data()};
      chain_rows_cpu({}, params);
      params.table = device_table.view();
      params.seq = device_seq.as<int32_t>();
      params.num_wanted = device_wanted.as<int32_t>();
      params.chosen = device_chosen.as<int32_t>();
      params.out = device_batch.rows();
      params.drafts = device_drafts.as<int32_t>();
      params.num_drafts = device_num_drafts.as<int32_t>();
      params.row_of_seq = device_row_of_seq.as<int32_t>();
      CHECK_CUDA(chain_rows_cuda(params, nullptr));
      device_batch.check_equal(batch);
      CHECK(device_drafts.download<int32_t>() == drafts);
      CHECK(device_num_drafts.download<int32_t>() == num_drafts);
      CHECK(device_row_of_seq.download<int32_t>() == row_of_seq);
    }
  }
}

TEST(window_spans_matches_the_cpu) {
  Rng rng(3);
  const DraftTable table = random_table(rng);
  const DeviceTableCopy device_table(table);
  for (const int num_spans : {1, 2, 31, 257}) {
    for (const int window : {1, 16, 100, 4096}) {
      const int max_pages = window_pages(window, 5, kPageSize);
      Ids span_begin = {0}, span_kv_len, span_seq;
      for (int span = 0; span < num_spans; ++span) {
        const int num_rows = rng.integer(0, 5);
        span_begin.push_back(span_begin.back() + num_rows);
        span_kv_len.push_back(num_rows == 0 ? 0 : rng.integer(0, 600));
        span_seq.push_back(num_rows == 0 ? 0 : rng.integer(0, kSlots - 1));
      }
      Ids kv_len(span_seq.size(), -9), seq(span_seq.size(), -9),
          pages(static_cast<size_t>(num_spans * max_pages), -9);
      const DeviceBuffer device_begin(span_begin), device_len(span_kv_len), device_seq(span_seq),
          device_out_len(kv_len), device_out_seq(seq), device_out_pages(pages);
      WindowSpansParams params = {.span_begin = span_begin.data(),
                                  .span_kv_len = span_kv_len.data(),
                                  .span_seq = span_seq.data(),
                                  .from = table.view().pages,
                                  .num_spans = num_spans,
                                  .window = window,
                                  .page_size = kPageSize,
                                  .max_pages = max_pages,
                                  .out_kv_len = kv_len.data(),
                                  .out_seq = seq.data(),
                                  .out_pages = pages.data()};
      window_spans_cpu({}, params);
      params.span_begin = device_begin.as<int32_t>();
      params.span_kv_len = device_len.as<int32_t>();
      params.span_seq = device_seq.as<int32_t>();
      params.from = device_table.view().pages;
      params.out_kv_len = device_out_len.as<int32_t>();
      params.out_seq = device_out_seq.as<int32_t>();
      params.out_pages = device_out_pages.as<int32_t>();
      CHECK_CUDA(window_spans_cuda(params, nullptr));
      CHECK(device_out_len.download<int32_t>() == kv_len);
      CHECK(device_out_seq.download<int32_t>() == seq);
      CHECK(device_out_pages.download<int32_t>() == pages);
      for (const DeviceBuffer* buffer : {&device_out_len, &device_out_seq, &device_out_pages}) {
        CHECK(buffer->guard_is_whole());
      }
    }
  }
}
