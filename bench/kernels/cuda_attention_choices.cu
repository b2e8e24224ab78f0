// Every kernel and cut that may compute a step of verified drafts: microseconds per layer, and
// whether all give the same bits. What kernel a step gets (span_attention.cu) is set by this.
//
//   bench_cuda_attention_choices [--json FILE] [--head-dim 64|128] [--seconds N]
//
// Cells are sequences x rows of each x context x q heads to each of 8 KV heads. "suited" is what
// the step gets by itself. After N seconds (none: all cells) it stops with the cells it has.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "attention_step.h"
#include "cuda_bench.h"
#include "kernels/attention/span_attention.h"

namespace {

using namespace openspec;
using namespace openspec::bench;
using Kernel = AttentionChoice::Kernel;

constexpr int kReplays = 5;
constexpr int kRanges[] = {0, 2, 4, 8, 16, 32, 1 << 28};  // blocks; 0: as suits

struct Candidate {
  const char* name;
  Kernel kernel;
  int tile_pairs, ctas_per_sm;
};
constexpr Candidate kCandidates[] = {
    {"suited", Kernel::kSuited, 0, 0}, {"cluster", Kernel::kCluster, 16, 0},
    {"warp8", Kernel::kWarp, 8, 0},    {"warp16", Kernel::kWarp, 16, 0},
    {"warp24", Kernel::kWarp, 24, 0},  {"cta16x1", Kernel::kCta, 16, 1},
    {"cta16x2", Kernel::kCta, 16, 2},  {"cta32x1", Kernel::kCta, 32, 1},
    {"cta32x2", Kernel::kCta, 32, 2},  {"cta64x1", Kernel::kCta, 64, 1},
    {"cta64x2", Kernel::kCta, 64, 2},  {"prefill", Kernel::kPrefill, 128, 0},
};

__global__ void count_differences(const uint16_t* a, const uint16_t* b, size_t count, int* sum) {
  int mine = 0;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    mine += a[i] != b[i];
  }
  if (mine > 0) atomicAdd(sum, mine);
}

/// Times all candidates of a step; a JSON object. Counts those with other bits.
std::string time_cell(const Case& c, uint16_t* kv, size_t elements, cudaStream_t stream,
                      int& num_wrong) {
  AttentionStep step(c, kv, /*may_have_trees=*/false, stream);
  SpanAttentionParams params = step.params;
  // More than the second-level cache holds.
  const size_t wanted = (size_t{300} << 20) / (layer_elements(c) * 2) + 1;
  const int num_layers = static_cast<int>(
      std::min(std::max<size_t>(wanted, 4), std::min<size_t>(36, elements / layer_elements(c))));
  const int ratio = c.num_q_heads / kNumKvHeads, num_pairs = c.num_rows * ratio;
  const int num_blocks = (c.kv_len + c.num_rows + 63) / 64;
  uint16_t* expected = device_array<uint16_t>(step.q_elements);
  int* num_different = device_array<int>(1);
  std::string record = "{\"head_dim\": " + std::to_string(c.head_dim) +
                       ", \"num_seqs\": " + std::to_string(c.num_seqs) +
                       ", \"num_rows\": " + std::to_string(c.num_rows) +
                       ", \"kv_len\": " + std::to_string(c.kv_len) +
                       ", \"ratio\": " + std::to_string(ratio) + ", \"us_per_layer\": {";
  std::vector<std::pair<double, std::string>> times;
  double suited_us = 0;
  for (const Candidate& candidate : kCandidates) {
    const int num_tiles =
        candidate.tile_pairs == 0
            ? 1
            : (c.num_rows + candidate.tile_pairs / ratio - 1) / (candidate.tile_pairs / ratio);
    if (candidate.kernel != Kernel::kCluster && num_tiles > 2 && num_pairs > 8) continue;
    for (const int range : kRanges) {
      if (range >= num_blocks && range < kRanges[6]) continue;
      if (range > 0 &&
          (candidate.kernel == Kernel::kSuited || candidate.kernel == Kernel::kCluster))
        continue;
      const bool is_cut = range == 0 || range == 8 || range == kRanges[6];
      if (candidate.kernel == Kernel::kPrefill && !is_cut) continue;
      params.choice = {candidate.kernel, candidate.tile_pairs, candidate.ctas_per_sm, range};
      params.kv.data = kv;
      if (span_attention_plan_cuda(params, stream) != cudaSuccess) continue;
      CHECK_CUDA(cudaMemsetAsync(params.out, 0xff, step.q_elements * 2, stream));
      const double us = graph_us(stream, kReplays,
                                 [&] {
                                   for (int layer = 0; layer < num_layers; ++layer) {
                                     params.kv.data = kv + layer * layer_elements(c);
                                     CHECK_CUDA(span_attention_cuda(params, stream));
                                   }
                                 }) /
                        num_layers;
      std::string name = candidate.name;
      if (range > 0) name += range == kRanges[6] ? " whole" : " " + std::to_string(range);
      if (candidate.kernel == Kernel::kSuited) {
        suited_us = us;
        CHECK_CUDA(cudaMemcpyAsync(expected, params.out, step.q_elements * 2,
                                   cudaMemcpyDeviceToDevice, stream));
      }
      int count = 0;
      CHECK_CUDA(cudaMemsetAsync(num_different, 0, sizeof(int), stream));
      count_differences<<<264, 256, 0, stream>>>(static_cast<const uint16_t*>(params.out), expected,
                                                 step.q_elements, num_different);
      CHECK_CUDA(
          cudaMemcpyAsync(&count, num_different, sizeof(int), cudaMemcpyDeviceToHost, stream));
      CHECK_CUDA(cudaStreamSynchronize(stream));
      if (count > 0) {
        ++num_wrong;
        std::printf("%s: %d elements differ\n", name.c_str(), count);
      }
      record += (times.empty() ? "\"" : ", \"") + name + "\": " + std::to_string(us);
      times.emplace_back(us, name);
    }
  }
  CHECK_CUDA(cudaFree(expected));
  CHECK_CUDA(cudaFree(num_different));
  std::sort(times.begin(), times.end());
  std::printf("%3d c%-2d rows %2d context %4d ratio %d: suited %7.2f", c.head_dim, c.num_seqs,
              c.num_rows, c.kv_len, ratio, suited_us);
  for (size_t i = 0; i < std::min<size_t>(times.size(), 5); ++i) {
    std::printf("  %s %.2f", times[i].second.c_str(), times[i].first);
  }
  std::printf("\n");
  return record + "}}";
}

}  // namespace

int main(int argc, char** argv) {
  std::string json;
  int head_dim = 128;
  double most_seconds = 1e9;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--json") == 0) json = argv[i + 1];
    if (std::strcmp(argv[i], "--head-dim") == 0) head_dim = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--seconds") == 0) most_seconds = std::atof(argv[i + 1]);
  }
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  const size_t elements = size_t{12} << 30;  // of 2 bytes
  uint16_t* kv = nullptr;
  CHECK_CUDA(cudaMalloc(&kv, elements * sizeof(uint16_t)));
  fill_kernel<<<4096, 256, 0, stream>>>(kv, elements);

  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::string> records;
  int num_wrong = 0;
  for (const int kv_len : {1024, 4096, 2048, 8192}) {
    for (const int num_rows : {4, 8, 16}) {
      for (const int num_seqs : {1, 4, 16, 64}) {
        for (const int ratio : {4, 5, 6, 7}) {
          const std::chrono::duration<double> gone = std::chrono::steady_clock::now() - begin;
          if (gone.count() > most_seconds) continue;
          const Case c = {"", num_seqs, num_rows, kv_len, false, 0, ratio * kNumKvHeads, head_dim};
          records.push_back(time_cell(c, kv, elements, stream, num_wrong));
        }
      }
    }
  }
  if (!json.empty()) write_json(json.c_str(), "cuda_attention_choices", records);
  std::printf("%zu cells, %d candidates with other bits\n", records.size(), num_wrong);
  CHECK_CUDA(cudaFree(kv));
  CHECK_CUDA(cudaStreamDestroy(stream));
  return num_wrong == 0 ? 0 : 1;
}
