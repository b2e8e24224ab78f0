// Against the CPU's form, exactly.

#include "kernels/steps/move_kv.h"

#include <memory>
#include <numeric>

#include "cuda/cuda_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

using Ids = std::vector<int32_t>;

constexpr int kPageSize = 16;

struct Geometry {
  int num_layers, num_kv_heads, head_dim, num_spans;
};

void check_moves(Rng& rng, const Geometry& geometry) {
  constexpr int kPagesPerSeq = 12;
  const auto [num_layers, num_kv_heads, head_dim, num_spans] = geometry;
  const int num_pages = num_spans * kPagesPerSeq;
  Ids pages(static_cast<size_t>(num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  for (size_t i = pages.size(); i > 1; --i) {
    std::swap(pages[i - 1], pages[static_cast<size_t>(rng.integer(0, static_cast<int>(i) - 1))]);
  }
  Ids span_begin = {0}, span_kv_len, span_seq, num_computed, committed_row;
  for (int span = 0; span < num_spans; ++span) {
    const int begin = span_begin.back(), kv_len = rng.integer(0, 60);
    // Known tokens, then a path among drafts; at times nothing, or a path of the first drafts.
    const int num_known = rng.integer(0, 5) == 0 ? 0 : rng.integer(1, 4);
    const int num_drafts = num_known == 0 ? 0 : rng.integer(0, 100);
    Ids rows(static_cast<size_t>(num_known));
    std::iota(rows.begin(), rows.end(), begin);
    const int most = rng.integer(0, 1) == 0 ? 40 : 6, step = rng.integer(1, 4);
    for (int i = 0; i < num_drafts && static_cast<int>(rows.size()) < most; i += step) {
      if (i > 0 || rng.integer(0, 1) == 0) rows.push_back(begin + num_known + i);
      if (step == 1) continue;
      i += rng.integer(0, 2);
    }
    num_computed.push_back(static_cast<int32_t>(rows.size()));
    rows.resize(static_cast<size_t>(num_known + num_drafts), -7);
    committed_row.insert(committed_row.end(), rows.begin(), rows.end());
    span_begin.push_back(begin + num_known + num_drafts);
    span_kv_len.push_back(kv_len);
    span_seq.push_back((span * 3 + 1) % num_spans);  // each slot once
  }

  const size_t size = size_t{2} * static_cast<size_t>(num_pages) * kPageSize *
                      static_cast<size_t>(num_kv_heads * head_dim);
  std::vector<Buffer> layers;
  std::vector<std::unique_ptr<DeviceBuffer>> device_layers;
  std::vector<KvLayerView> views, device_views;
  for (int layer = 0; layer < num_layers; ++layer) {
    layers.emplace_back(size, DType::kBF16);
    for (size_t i = 0; i < size; ++i) {
      layers.back().set(i, static_cast<float>((i * 7 + static_cast<size_t>(layer)) % 253));
    }
  }
  for (Buffer& layer : layers) {
    const auto* bits = static_cast<const uint16_t*>(layer.data());
    device_layers.push_back(std::make_unique<DeviceBuffer>(std::vector(bits, bits + size)));
    views.push_back({layer.data(), num_kv_heads, head_dim, kPageSize});
    device_views.push_back({device_layers.back()->data(), num_kv_heads, head_dim, kPageSize});
  }
  MoveKvParams params = {.layers = views.data(),
                         .num_layers = num_layers,
                         .page_table = {pages.data(), kPagesPerSeq},
                         .rows = {.num_rows = span_begin.back(),
                                  .num_spans = num_spans,
                                  .span_begin = span_begin.data(),
                                  .span_kv_len = span_kv_len.data(),
                                  .span_seq = span_seq.data()},
                         .num_computed = num_computed.data(),
                         .committed_row = committed_row.data(),
                         .dtype = DType::kBF16};
  ThreadPool pool(1);
  move_kv_cpu({.pool = &pool}, params);

  const DeviceBuffer device_pages(pages), device_begin(span_begin), device_kv_len(span_kv_len),
      device_seq(span_seq), device_computed(num_computed), device_committed(committed_row),
      device_view_array(device_views);

  // Records of the same rows.
  constexpr int kRingSize = 110;
  constexpr size_t kRecordBytes = 48;
  std::vector<uint8_t> records(static_cast<size_t>(num_spans) * kRingSize * kRecordBytes);
  for (uint8_t& byte : records) byte = static_cast<uint8_t>(rng.integer(0, 255));
  const DeviceBuffer device_records(records);
  const RecordView view{reinterpret_cast<std::byte*>(records.data()), kRingSize, kRecordBytes};
  move_records_cpu({.pool = &pool}, {view, params.rows, params.num_computed, params.committed_row});

  params.layers = device_view_array.as<KvLayerView>();
  params.page_table.pages = device_pages.as<int32_t>();
  params.rows.span_begin = device_begin.as<int32_t>();
  params.rows.span_kv_len = device_kv_len.as<int32_t>();
  params.rows.span_seq = device_seq.as<int32_t>();
  params.num_computed = device_computed.as<int32_t>();
  params.committed_row = device_committed.as<int32_t>();
  CHECK_CUDA(move_kv_cuda(params, nullptr));
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const auto* bits = static_cast<const uint16_t*>(layers[layer].data());
    CHECK(device_layers[layer]->download<uint16_t>() == std::vector(bits, bits + size));
    CHECK(device_layers[layer]->guard_is_whole());
  }
  const RecordView device_view{device_records.as<std::byte>(), kRingSize, kRecordBytes};
  CHECK_CUDA(move_records_cuda(
      {device_view, params.rows, params.num_computed, params.committed_row}, nullptr));
  CHECK(device_records.download<uint8_t>() == records);
  CHECK(device_records.guard_is_whole());
}

}  // namespace

TEST(moved_tokens_equal_the_cpus) {
  Rng rng(1);
  for (const Geometry& geometry : {Geometry{1, 1, 128, 1}, Geometry{3, 8, 128, 5},
                                   Geometry{2, 2, 64, 70}, Geometry{1, 5, 128, 20}}) {
    for (int repeat = 0; repeat < 6; ++repeat) check_moves(rng, geometry);
  }
}
