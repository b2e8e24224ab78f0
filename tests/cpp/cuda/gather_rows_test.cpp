#include "kernels/steps/gather_rows.h"

#include <algorithm>

#include "cuda/cuda_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

using Bytes = std::vector<unsigned char>;

Bytes random_bytes(Rng& rng, size_t size) {
  Bytes bytes(size);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(rng.integer(0, 255));
  return bytes;
}

}  // namespace

TEST(gather_rows_matches_the_cpu) {
  Rng rng(1);
  constexpr int kInRows = 23;
  for (const int64_t width : {16, 48, 640, 5120, 15360, 16400}) {
    for (const int64_t gap : {0, 16, 4096}) {
      for (const int num_rows : {1, 6, kInRows}) {
        const Bytes in = random_bytes(rng, static_cast<size_t>(kInRows * width));
        std::vector<int32_t> row;
        for (int i = 0; i < num_rows; ++i) row.push_back(rng.integer(-1, kInRows - 1));
        const Bytes other_in = random_bytes(rng, in.size());
        std::vector<int32_t> other_row;
        for (int i = 0; i < num_rows; ++i) other_row.push_back(rng.integer(-1, kInRows - 1));
        const DeviceBuffer device_in(in), device_row(row), device_other_in(other_in),
            device_other_row(other_row);
        for (const int num_sources : {0, 1, 2}) {
          const bool has_row = num_sources > 0, has_other = num_sources > 1;
          Bytes expected(static_cast<size_t>(num_rows * (width + gap)), 0xff);
          const DeviceBuffer out(expected.size());
          GatherRowsParams params;
          params.num_rows = num_rows;
          params.width_bytes = width;
          params.out_stride = width + gap;
          GatherRowsParams cpu = params;
          cpu.row = has_row ? row.data() : nullptr;
          cpu.other_row = has_other ? other_row.data() : nullptr;
          cpu.other_in = has_other ? other_in.data() : nullptr;
          cpu.in = in.data();
          cpu.out = expected.data();
          ThreadPool pool(2);
          gather_rows_cpu({.pool = &pool}, cpu);
          params.row = has_row ? device_row.as<int32_t>() : nullptr;
          params.other_row = has_other ? device_other_row.as<int32_t>() : nullptr;
          params.other_in = has_other ? device_other_in.data() : nullptr;
          params.in = device_in.data();
          params.out = out.data();
          CHECK_CUDA(gather_rows_cuda(params, nullptr));
          CHECK(out.guard_is_whole());
          CHECK(out.download<unsigned char>() == expected);
        }
      }
    }
  }
}

TEST(gather_rows_reaches_beyond_two_gigabytes) {
  Rng rng(2);
  constexpr size_t kWidth = 1 << 20, kRows = 2100;
  const Bytes last = random_bytes(rng, kWidth);
  const DeviceBuffer in(kWidth * kRows), row(std::vector<int32_t>{-1, kRows - 1}), out(2 * kWidth);
  CHECK_CUDA(cudaMemcpy(in.as<char>() + (kRows - 1) * kWidth, last.data(), kWidth,
                        cudaMemcpyHostToDevice));
  GatherRowsParams params = {row.as<int32_t>(), in.data(), out.data(), 2, kWidth, kWidth};
  CHECK_CUDA(gather_rows_cuda(params, nullptr));
  CHECK(out.guard_is_whole());
  Bytes expected(2 * kWidth, 0xff);
  std::copy(last.begin(), last.end(), expected.begin() + kWidth);
  CHECK(out.download<unsigned char>() == expected);
}

TEST(gather_rows_refuses_what_it_cannot_do) {
  const DeviceBuffer in(4096), out(4096);
  const auto result_of = [&](int64_t width, int64_t stride, int offset, int num_rows) {
    return gather_rows_cuda({nullptr, in.as<char>() + offset, out.data(), num_rows, width, stride},
                            nullptr);
  };
  constexpr int kInvalid = cudaErrorInvalidValue;
  CHECK_EQ(result_of(20, 32, 0, 1), kInvalid);
  CHECK_EQ(result_of(16, 20, 0, 1), kInvalid);
  CHECK_EQ(result_of(32, 16, 0, 1), kInvalid);
  CHECK_EQ(result_of(0, 16, 0, 1), kInvalid);
  CHECK_EQ(result_of(16, 16, 4, 1), kInvalid);
  CHECK_EQ(result_of(16, 16, 0, 0), static_cast<int>(cudaSuccess));
  CHECK_EQ(out.download<unsigned char>()[0], 0xff);
}
