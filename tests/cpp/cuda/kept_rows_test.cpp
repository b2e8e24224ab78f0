#include "kernels/drafts/kept_rows.h"

#include <algorithm>
#include <numeric>

#include "cuda/cuda_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

using Ids = std::vector<int32_t>;
using Bytes = std::vector<unsigned char>;

constexpr int kSlots = 300;

/// Some slots in any order.
Ids some_slots(Rng& rng, int count) {
  Ids slots(kSlots);
  std::iota(slots.begin(), slots.end(), 0);
  for (int i = 0; i < count; ++i) {
    std::swap(slots[static_cast<size_t>(i)],
              slots[static_cast<size_t>(rng.integer(i, kSlots - 1))]);
  }
  slots.resize(static_cast<size_t>(count));
  return slots;
}

}  // namespace

TEST(keep_rows_matches_the_cpu) {
  Rng rng(1);
  for (const int64_t width : {16, 1920, 15360, 25600}) {
    for (const int num_spans : {1, 5, 64, 257}) {
      const Ids slots = some_slots(rng, num_spans);
      Ids span_begin = {0}, span_kv_len, num_computed;
      for (int span = 0; span < num_spans; ++span) {
        const int count = rng.integer(0, 1);
        span_begin.push_back(span_begin.back() + count);
        span_kv_len.push_back(rng.integer(0, 5000));
        num_computed.push_back(count);
      }
      const int num_rows = span_begin.back() + rng.integer(1, 4);
      Bytes features(static_cast<size_t>(num_rows * width));
      for (unsigned char& byte : features) byte = static_cast<unsigned char>(rng.integer(0, 255));
      Bytes expected(static_cast<size_t>(kSlots * kMaxKeptRows * width), 0xff);
      const DeviceBuffer out(expected.size());
      KeepRowsParams params;
      params.rows.num_rows = num_rows;
      params.rows.num_spans = num_spans;
      KeepRowsParams cpu = params;
      cpu.rows.span_begin = span_begin.data();
      cpu.rows.span_kv_len = span_kv_len.data();
      cpu.rows.span_seq = slots.data();
      cpu.num_computed = num_computed.data();
      cpu.features = features.data();
      cpu.kept = {expected.data(), nullptr, width};
      keep_rows_cpu({}, cpu);

      const DeviceBuffer device_begin(span_begin), device_kv_len(span_kv_len), device_seq(slots),
          device_computed(num_computed), device_features(features);
      params.rows.span_begin = device_begin.as<int32_t>();
      params.rows.span_kv_len = device_kv_len.as<int32_t>();
      params.rows.span_seq = device_seq.as<int32_t>();
      params.num_computed = device_computed.as<int32_t>();
      params.features = device_features.data();
      params.kept = {out.data(), nullptr, width};
      CHECK_CUDA(keep_rows_cuda(params, nullptr));
      CHECK(out.guard_is_whole());
      CHECK(out.download<unsigned char>() == expected);
    }
  }
}

TEST(take_kept_rows_matches_the_cpu) {
  Rng rng(2);
  for (const int num_slots : {1, 3, 33, 257}) {
    for (const int room : {1, 7, kMaxKeptRows, kMaxKeptRows + 2}) {
      const Ids slots = some_slots(rng, num_slots);
      Ids begin(kSlots), kv_len(kSlots);
      for (size_t slot = 0; slot < kSlots; ++slot) {
        begin[slot] = rng.integer(0, 3000);
        kv_len[slot] = begin[slot] + rng.integer(0, room);
      }
      const auto count = static_cast<size_t>(num_slots);
      const int num_rows = num_slots * room;
      const DeviceBuffer device_slots(slots), device_begin(begin), device_kv_len(kv_len);
      Ids span_begin(count + 1), span_kv_len(count), num_computed(count),
          source(static_cast<size_t>(num_rows));
      TakeKeptRowsParams params;
      params.num_slots = num_slots;
      params.num_rows = num_rows;
      TakeKeptRowsParams cpu = params;
      cpu.kept.begin = begin.data();
      cpu.slot = slots.data();
      cpu.kv_len = kv_len.data();
      cpu.span_begin = span_begin.data();
      cpu.span_kv_len = span_kv_len.data();
      cpu.num_computed = num_computed.data();
      cpu.source = source.data();
      take_kept_rows_cpu({}, cpu);

      const DeviceBuffer out_begin(span_begin.size() * sizeof(int32_t)),
          out_kv_len(count * sizeof(int32_t)), out_computed(count * sizeof(int32_t)),
          out_source(source.size() * sizeof(int32_t));
      params.kept.begin = device_begin.as<int32_t>();
      params.slot = device_slots.as<int32_t>();
      params.kv_len = device_kv_len.as<int32_t>();
      params.span_begin = out_begin.as<int32_t>();
      params.span_kv_len = out_kv_len.as<int32_t>();
      params.num_computed = out_computed.as<int32_t>();
      params.source = out_source.as<int32_t>();
      CHECK_CUDA(take_kept_rows_cuda(params, nullptr));
      CHECK_EQ(out_begin.download<int32_t>(), span_begin);
      CHECK_EQ(out_kv_len.download<int32_t>(), span_kv_len);
      CHECK_EQ(out_computed.download<int32_t>(), num_computed);
      CHECK_EQ(out_source.download<int32_t>(), source);
      CHECK_EQ(device_begin.download<int32_t>(), begin);
    }
  }
}
