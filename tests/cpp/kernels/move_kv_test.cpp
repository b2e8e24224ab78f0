#include "kernels/steps/move_kv.h"

#include "kernels/kernel_testing.h"

using namespace openspec;
using namespace openspec::testing;

using Ids = std::vector<int32_t>;

// Rows of three spans: a tree of six behind two known tokens, of which the path 1, 3, 4 counts; one
// that counts as it lies; and one whose path lies one row on.
TEST(committed_tokens_lie_contiguously) {
  constexpr int kHeads = 3, kHeadDim = 4, kPageSize = 4, kNumPages = 9, kPagesPerSeq = 3;
  constexpr size_t kSize = size_t{kNumPages} * 2 * kHeads * kPageSize * kHeadDim;
  const Ids pages = {0, 1, 2, 5, 3, 4, 8, 7, 6};
  const Ids span_begin = {0, 8, 10, 14}, span_kv_len = {3, 5, 6}, span_seq = {1, 0, 2};
  const Ids num_computed = {5, 2, 3};
  const Ids committed_row = {0, 1, 3, 5, 6, 99, 99, 99, 8, 9, 10, 12, 13, 99};
  // By sequence; the last move goes to where the one before it comes from.
  const Ids seq = {1, 1, 1, 2, 2}, from = {6, 8, 9, 8, 9}, to = {5, 6, 7, 7, 8};
  const auto at = [&](int slot, int token, int part, int head, int i) {
    const int page = pages[static_cast<size_t>(slot * kPagesPerSeq + token / kPageSize)];
    return static_cast<size_t>(
        (((page * 2 + part) * kHeads + head) * kPageSize + token % kPageSize) * kHeadDim + i);
  };
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    std::vector<Buffer> layers, expected;
    for (int layer = 0; layer < 3; ++layer) {
      Buffer buffer(kSize, dtype);
      for (size_t i = 0; i < kSize; ++i) buffer.set(i, static_cast<float>(i % 251) - layer);
      layers.push_back(buffer);
      expected.push_back(buffer);
      for (size_t move = 0; move < seq.size(); ++move) {
        for (int part : {0, 1}) {
          for (int head = 0; head < kHeads; ++head) {
            for (int i = 0; i < kHeadDim; ++i) {
              expected.back().set(at(seq[move], to[move], part, head, i),
                                  buffer[at(seq[move], from[move], part, head, i)]);
            }
          }
        }
      }
    }
    std::vector<KvLayerView> views;
    for (Buffer& layer : layers) views.push_back({layer.data(), kHeads, kHeadDim, kPageSize});
    ThreadPool pool(2);
    move_kv_cpu({.pool = &pool}, {.layers = views.data(),
                                  .num_layers = 2,  // the third stays
                                  .page_table = {pages.data(), kPagesPerSeq},
                                  .rows = {.num_rows = 14,
                                           .num_spans = 3,
                                           .span_begin = span_begin.data(),
                                           .span_kv_len = span_kv_len.data(),
                                           .span_seq = span_seq.data()},
                                  .num_computed = num_computed.data(),
                                  .committed_row = committed_row.data(),
                                  .dtype = dtype});
    for (size_t layer = 0; layer < 2; ++layer) {
      CHECK(layers[layer].same(0, expected[layer], 0, kSize));
    }
    for (size_t i = 0; i < kSize; ++i) CHECK_EQ(layers[2][i], static_cast<float>(i % 251) - 2);
  }
}

// A tree of four behind one known token, whose path is its second and fourth draft; its rows go
// over the ring's end.
TEST(committed_records_lie_contiguously) {
  constexpr int kRingSize = 7;
  constexpr size_t kRecordBytes = 16;
  const Ids span_begin = {0, 1, 6}, span_kv_len = {2, 12}, span_seq = {0, 1};
  const Ids num_computed = {1, 3}, committed_row = {0, 1, 3, 5, 99, 99};
  std::vector<uint8_t> data(2 * kRingSize * kRecordBytes);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i);
  std::vector<uint8_t> expected = data;
  // Positions 14 and 16 of slot 1 go to 13 and 14.
  const auto copy = [&](int from, int to) {
    for (size_t i = 0; i < kRecordBytes; ++i) {
      expected[static_cast<size_t>(kRingSize + to % kRingSize) * kRecordBytes + i] =
          data[static_cast<size_t>(kRingSize + from % kRingSize) * kRecordBytes + i];
    }
  };
  copy(14, 13);
  copy(16, 14);
  move_records_cpu({},
                   {.records = {reinterpret_cast<std::byte*>(data.data()), kRingSize, kRecordBytes},
                    .rows = {.num_rows = 6,
                             .num_spans = 2,
                             .span_begin = span_begin.data(),
                             .span_kv_len = span_kv_len.data(),
                             .span_seq = span_seq.data()},
                    .num_computed = num_computed.data(),
                    .committed_row = committed_row.data()});
  CHECK(data == expected);
}
