// Times the small row ops of a decode step on CUDA, Qwen3-4B shapes: microseconds of one launch
// among kLaunches in a replayed graph, each overlapping the one before it (launch.cuh).
//
//   bench_cuda_row_ops [--json FILE]
//
// It does not show what a launch costs between two linears, where it competes for room on the SMs
// and breaks their overlap, and up to some hundred rows everything but the table comes from L2.

#include <cstdio>
#include <string>
#include <vector>

#include "cuda_bench.h"
#include "kernels/drafts/block_conv.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/steps/embedding.h"

namespace {

using namespace openspec;
using namespace openspec::bench;

constexpr int kLaunches = 36;
constexpr int kRepeats = 20;
constexpr int kMaxRows = 2048;
constexpr int kRows[] = {1, 16, 64, 256, kMaxRows};
constexpr int kWidth = 2560;
constexpr int kPartials = 4;
constexpr int kQHeads = 32;
constexpr int kKvHeads = 8;
constexpr int kHeadDim = 128;
constexpr int kPageSize = 16;
constexpr int kVocab = 151936;

/// Time of one launch, in microseconds.
template <typename Launch>
double launch_us(cudaStream_t stream, const Launch& launch) {
  return graph_us(stream, kRepeats,
                  [&] {
                    for (int i = 0; i < kLaunches; ++i) CHECK_CUDA(launch(i));
                  }) /
         kLaunches;
}

struct Run {
  std::string op;
  int num_rows;
  double us;
  double gb_per_s;

  std::string json() const {
    char line[160];
    std::snprintf(line, sizeof line,
                  "{\"op\": \"%s\", \"num_rows\": %d, \"us\": %.2f, \"gb_per_s\": %.1f}",
                  op.c_str(), num_rows, us, gb_per_s);
    return line;
  }
};

Run measure_rms_norm(cudaStream_t stream, int num_rows) {
  static auto* residual = device_array<uint16_t>(kMaxRows * kWidth);
  static auto* out = device_array<uint16_t>(kMaxRows * kWidth);
  static auto* partials = device_array<float>(static_cast<size_t>(kPartials) * kMaxRows * kWidth);
  static auto* weights = device_array<float>(kLaunches * kWidth);
  RmsNormParams params;
  params.residual = residual;
  params.delta_partials = partials;
  params.num_partials = kPartials;
  params.out = out;
  params.num_rows = num_rows;
  params.width = kWidth;
  params.dtype = DType::kBF16;
  const double us = launch_us(stream, [&](int i) {
    params.weight = weights + i * kWidth;
    return rms_norm_cuda(params, stream);
  });
  const double bytes = 1.0 * num_rows * kWidth * (3 * sizeof(uint16_t) + kPartials * sizeof(float));
  return {"rms_norm", num_rows, us, bytes / us * 1e-3};
}

Run measure_rope_append(cudaStream_t stream, int num_rows) {
  constexpr int kHeads = kQHeads + 2 * kKvHeads;
  static auto* qkv = device_array<uint16_t>(kMaxRows * kHeads * kHeadDim);
  static auto* q = device_array<uint16_t>(kMaxRows * kQHeads * kHeadDim);
  static auto* kv = device_array<uint16_t>(2 * kMaxRows * kKvHeads * kHeadDim);
  static auto* cos_sin = device_array<float>(kMaxRows * kHeadDim);
  static auto* norms = device_array<float>(2 * kHeadDim);
  static auto* slots = [] {
    std::vector<int64_t> values(kMaxRows);
    for (int i = 0; i < kMaxRows; ++i) values[i] = i;
    return device_copy(values);
  }();
  RopeAppendParams params;
  params.rows.num_rows = num_rows;
  params.rows.row_kv_slot = slots;
  params.qkv = qkv;
  params.cos_sin = cos_sin;
  params.q_norm = norms;
  params.k_norm = norms + kHeadDim;
  params.q = q;
  params.kv = {kv, kKvHeads, kHeadDim, kPageSize};
  params.num_q_heads = kQHeads;
  params.dtype = DType::kBF16;
  const double us = launch_us(stream, [&](int) { return rope_append_cuda(params, stream); });
  const double bytes = 1.0 * num_rows * kHeadDim * (2 * kHeads * sizeof(uint16_t) + sizeof(float));
  return {"rope_append", num_rows, us, bytes / us * 1e-3};
}

/// Of sums that come apart, as behind a split linear; blocks of 16 rows.
Run measure_block_conv(cudaStream_t stream, int num_rows) {
  constexpr int kGroup = 16, kOwn = kConvTaps * kWidth / kGroup;
  static auto* partials = device_array<float>(static_cast<size_t>(kPartials) * kMaxRows * kWidth);
  static auto* own = device_array<uint16_t>(kMaxRows * kOwn);
  static auto* base = device_array<float>(kLaunches * kConvTaps * kWidth);
  static auto* out = device_array<uint16_t>(kMaxRows * kWidth);
  static auto* parents = [] {
    std::vector<int32_t> values(kMaxRows);
    for (int i = 0; i < kMaxRows; ++i) values[i] = i % 16 == 0 ? -1 : i - 1;
    return device_copy(values);
  }();
  BlockConvParams params;
  params.row_parent = parents;
  params.partials = partials;
  params.num_partials = kPartials;
  params.own = own;
  params.own_stride = kOwn;
  params.out = out;
  params.num_rows = num_rows;
  params.width = kWidth;
  params.group = kGroup;
  params.dtype = DType::kBF16;
  const double us = launch_us(stream, [&](int i) {
    params.base = base + i * kConvTaps * kWidth;
    return block_conv_cuda(params, stream);
  });
  const double bytes = 1.0 * num_rows * kWidth * (sizeof(uint16_t) + kPartials * sizeof(float));
  return {"block_conv", num_rows, us, bytes / us * 1e-3};
}

Run measure_embedding(cudaStream_t stream, int num_rows) {
  static auto* table = device_array<uint16_t>(static_cast<size_t>(kVocab) * kWidth);
  static auto* out = device_array<uint16_t>(kMaxRows * kWidth);
  static auto* tokens = [] {
    std::vector<int32_t> values(static_cast<size_t>(kLaunches) * kMaxRows);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int32_t>(i * 7919 % kVocab);
    return device_copy(values);
  }();
  EmbeddingParams params;
  params.table = table;
  params.out = out;
  params.num_rows = num_rows;
  params.width = kWidth;
  params.dtype = DType::kBF16;
  const double us = launch_us(stream, [&](int i) {
    params.token = tokens + static_cast<size_t>(i) * kMaxRows;
    return embedding_cuda(params, stream);
  });
  return {"embedding", num_rows, us, 2.0 * num_rows * kWidth * sizeof(uint16_t) / us * 1e-3};
}

}  // namespace

int main(int argc, char** argv) {
  const char* path = json_path(argc, argv);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::vector<std::string> runs;
  for (const auto measure :
       {measure_rms_norm, measure_rope_append, measure_block_conv, measure_embedding}) {
    for (const int num_rows : kRows) {
      const Run run = measure(stream, num_rows);
      runs.push_back(run.json());
      std::printf("%-12s %5d rows %8.2f us %8.1f GB/s\n", run.op.c_str(), num_rows, run.us,
                  run.gb_per_s);
    }
  }
  if (path != nullptr) write_json(path, "bench/kernels/cuda_row_ops.cu", runs);
  return 0;
}
