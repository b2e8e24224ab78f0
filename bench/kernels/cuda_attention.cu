// Micro-benchmark of span_attention on CUDA: microseconds per layer by case, beside the rate at
// which K and V are read (few rows) or the arithmetic done (prefill).
//
//   bench_cuda_attention [--json FILE] [--filter TEXT] [--trees 0|1] [--ratios 64|128]
//
// A step of 36 layers is one CUDA graph, as in the engine; every layer has its own K and V, so that
// they come from memory rather than from L2. The plan is timed apart. "in step" is what a layer
// adds between kernels that read 50 MB each, as linears do: these wash K, V and the instructions
// out of the caches. --trees 1 has the steps planned as if they might hold trees. Shapes are those
// of Qwen3-4B: 32 q heads, 8 KV heads of 128. --ratios times steps of decoding and of verifying
// drafts instead, for 1 to 8 q heads to each of 8 KV heads of 64 or 128: the bytes are the same.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "attention_step.h"
#include "cuda_bench.h"
#include "kernels/attention/span_attention.h"
#include "kernels/common/launch.cuh"

namespace {

using namespace openspec;
using namespace openspec::bench;

constexpr int kNumLayers = 36;
constexpr int kReplays = 9;
constexpr size_t kBetweenBytes = 50 << 20;
// A CTA to an SM, less than half of its shared memory and more: as the linears around attention.
constexpr int kBeforeShared = 100 << 10, kBehindShared = 117 << 10;

// Row counts 1, 5 and 16: plain decode, a short and a long draft. Trees: two children to a row.
constexpr Case kCases[] = {
    {"c1", 1, 1, 600},
    {"c1", 1, 5, 600},
    {"c1", 1, 16, 600},
    {"c1", 1, 16, 1350},
    {"c1", 1, 24, 600},
    {"c1", 1, 24, 1350},
    {"c1", 1, 32, 600},
    {"c1", 1, 64, 600},
    {"c1", 1, 128, 600},
    {"c1", 1, 256, 600},
    {"c4", 4, 1, 600},
    {"c4", 4, 5, 600},
    {"c4", 4, 16, 600},
    {"c8", 8, 1, 600},
    {"c8", 8, 5, 600},
    {"c8", 8, 16, 600},
    {"c16", 16, 1, 600},
    {"c16", 16, 5, 600},
    {"c16", 16, 16, 600},
    {"c64", 64, 1, 600},
    {"c64", 64, 5, 600},
    {"c64", 64, 16, 600},
    {"c1 long", 1, 1, 8192},
    {"c1 long", 1, 5, 8192},
    {"c1 long", 1, 16, 8192},
    {"c1 tree", 1, 4, 600, true},
    {"c1 tree", 1, 8, 600, true},
    {"c1 tree", 1, 16, 600, true},
    {"c1 tree", 1, 32, 600, true},
    {"c1 tree", 1, 64, 600, true},
    {"c4 tree", 4, 4, 600, true},
    {"c4 tree", 4, 16, 600, true},
    {"c16 tree", 16, 16, 600, true},
    {"c16 short", 16, 8, 300},
    {"c16 short", 16, 16, 300},
    {"c16 short tree", 16, 4, 300, true},
    {"c16 short tree", 16, 6, 300, true},
    {"c16 short tree", 16, 8, 300, true},
    {"c16 short tree", 16, 12, 300, true},
    {"c16 short tree", 16, 16, 300, true},
    {"c32 short tree", 32, 6, 300, true},
    {"c16 prompt", 16, 8, 300, false, 128},
    {"c16 prompt tree", 16, 8, 300, true, 128},
    {"c16 prompt tree", 16, 16, 300, true, 128},
    {"prefill", 1, 550, 0},
    {"prefill", 1, 2048, 0},
    {"prefill", 1, 2048, 6144},
    {"prefill", 1, 8192, 0},
    {"prefill", 4, 512, 0},
    {"prefill rest", 1, 100, 8192},
};

__global__ void __launch_bounds__(512)
    read_kernel(const uint4* __restrict__ from, size_t count, uint32_t* sink) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  uint32_t sum = 0;
  const size_t stride = size_t{gridDim.x} * blockDim.x;
#pragma unroll 8
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    const uint4 x = __ldcs(from + i);
    sum += x.x ^ x.y ^ x.z ^ x.w;
  }
  if (sum == 0x9e3779b9u) *sink = sum;
}

struct Result {
  double layer_us, in_step_us, plan_us, terabytes_per_s, teraflops;
};

/// Without `between` the layers alone.
Result run(const Case& c, uint16_t* kv, const uint4* between, bool may_have_trees,
           cudaStream_t stream, int num_layers = kNumLayers) {
  AttentionStep step(c, kv, may_have_trees, stream);
  SpanAttentionParams& params = step.params;
  const double plan_us = between == nullptr ? 0.0 : graph_us(stream, kReplays, [&] {
    for (int i = 0; i < num_layers; ++i) CHECK_CUDA(span_attention_plan_cuda(params, stream));
  });
  CHECK_CUDA(span_attention_plan_cuda(params, stream));
  uint32_t* sink = device_copy(std::vector<uint32_t>(4));
  const auto time_step = [&](bool has_attention) {
    return graph_us(stream, kReplays, [&] {
      for (int layer = 0; layer < num_layers; ++layer) {
        params.kv.data = kv + layer * layer_elements(c);
        const size_t count = kBetweenBytes / sizeof(uint4);
        const uint4* from = between + layer % 4 * (2 * count);
        CHECK_CUDA(cuda::launch(read_kernel, cuda::num_sms(), 512, kBeforeShared, stream, from,
                                count, sink));
        if (has_attention) CHECK_CUDA(span_attention_cuda(params, stream));
        CHECK_CUDA(cuda::launch(read_kernel, cuda::num_sms(), 512, kBehindShared, stream,
                                from + count, count, sink));
      }
    });
  };
  const double in_step_us = between == nullptr ? 0.0 : time_step(true) - time_step(false);
  const double layers_us = graph_us(stream, kReplays, [&] {
    for (int layer = 0; layer < num_layers; ++layer) {
      params.kv.data = kv + layer * layer_elements(c);
      CHECK_CUDA(span_attention_cuda(params, stream));
    }
  });
  CHECK_CUDA(cudaFree(sink));

  Result result;
  result.layer_us = layers_us / num_layers;
  result.in_step_us = in_step_us / num_layers;
  result.plan_us = plan_us / num_layers;
  const double tokens = c.kv_len + c.num_rows;
  const double seen = c.num_rows * (c.kv_len + 0.5 * (c.num_rows + 1));
  result.terabytes_per_s =
      c.num_seqs * tokens * 2 * kNumKvHeads * c.head_dim * 2 / result.layer_us * 1e-6;
  result.teraflops = c.num_seqs * seen * 4 * c.num_q_heads * c.head_dim / result.layer_us * 1e-6;
  return result;
}

/// Ratios beside that of 4, by number of sequences, rows and context.
void time_ratios(int head_dim, uint16_t* kv, size_t elements, const char* json,
                 cudaStream_t stream) {
  std::vector<std::string> records;
  std::printf("heads of %d: us of a layer by q heads to a KV head, and over that of 4\n", head_dim);
  for (const int num_seqs : {1, 4, 16, 64}) {
    for (const int num_rows : {1, 4, 8, 16}) {
      for (const int kv_len : {1024, 2048, 4096, 8192}) {
        double us[9];
        std::string record = "{\"head_dim\": " + std::to_string(head_dim) +
                             ", \"num_seqs\": " + std::to_string(num_seqs) +
                             ", \"num_rows\": " + std::to_string(num_rows) +
                             ", \"kv_len\": " + std::to_string(kv_len) + ", \"us_per_layer\": {";
        for (int ratio = 1; ratio <= 8; ++ratio) {
          const Case c = {"ratio", num_seqs, num_rows, kv_len, false, 0, ratio * kNumKvHeads,
                          head_dim};
          const auto num_layers =
              static_cast<int>(std::min<size_t>(kNumLayers, elements / layer_elements(c)));
          us[ratio] = run(c, kv, nullptr, false, stream, num_layers).layer_us;
          record += (ratio == 1 ? "\"" : ", \"") + std::to_string(ratio) +
                    "\": " + std::to_string(us[ratio]);
        }
        std::printf("c%-2d rows %2d context %4d:", num_seqs, num_rows, kv_len);
        for (int ratio = 1; ratio <= 8; ++ratio) {
          std::printf("  %d: %.2f (%.2f)", ratio, us[ratio], us[ratio] / us[4]);
        }
        std::printf("\n");
        records.push_back(record + "}}");
      }
    }
  }
  if (json != nullptr) write_json(json, "cuda_attention --ratios", records);
}

}  // namespace

int main(int argc, char** argv) {
  std::string json, filter;
  bool may_have_trees = false;
  int ratios_of = 0;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--json") == 0) json = argv[i + 1];
    if (std::strcmp(argv[i], "--filter") == 0) filter = argv[i + 1];
    if (std::strcmp(argv[i], "--ratios") == 0) ratios_of = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--trees") == 0) may_have_trees = std::atoi(argv[i + 1]) != 0;
  }
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  size_t elements = 0;
  for (const Case& c : kCases) elements = std::max(elements, kNumLayers * layer_elements(c));
  if (ratios_of > 0) elements = size_t{12} << 30;  // of 2 bytes
  uint16_t* kv = nullptr;
  CHECK_CUDA(cudaMalloc(&kv, elements * sizeof(uint16_t)));
  fill_kernel<<<4096, 256, 0, stream>>>(kv, elements);
  if (ratios_of > 0) {
    time_ratios(ratios_of, kv, elements, json.empty() ? nullptr : json.c_str(), stream);
    return 0;
  }
  uint16_t* between = nullptr;
  CHECK_CUDA(cudaMalloc(&between, 8 * kBetweenBytes));
  fill_kernel<<<4096, 256, 0, stream>>>(between, 8 * kBetweenBytes / sizeof(uint16_t));
  CHECK_CUDA(cuda::allow_shared_bytes(read_kernel, kBehindShared));
  CHECK_CUDA(cudaGetLastError());

  std::string records;
  std::printf("%s\n%-16s %5s %6s %7s %10s %8s %8s %8s %9s\n", properties.name, "case", "seqs",
              "rows", "kv_len", "us/layer", "in step", "TB/s", "TFLOP/s", "plan us");
  for (const Case& c : kCases) {
    if (std::string(c.name).find(filter) == std::string::npos) continue;
    const Result r = run(c, kv, reinterpret_cast<const uint4*>(between), may_have_trees, stream);
    std::printf("%-16s %5d %6d %7d %10.2f %8.2f %8.2f %8.1f %9.2f\n", c.name, c.num_seqs,
                c.num_rows, c.kv_len, r.layer_us, r.in_step_us, r.terabytes_per_s, r.teraflops,
                r.plan_us);
    char record[320];
    std::snprintf(
        record, sizeof record,
        "%s\n    {\"case\": \"%s\", \"is_chain\": %s, \"num_seqs\": %d, \"num_rows\": %d, "
        "\"kv_len\": %d, \"us_per_layer\": %.3f, \"us_in_step\": %.3f, \"tb_per_s\": %.3f, "
        "\"tflop_per_s\": %.2f, \"plan_us\": %.3f}",
        records.empty() ? "" : ",", c.name, !c.is_tree && c.prompt_rows == 0 ? "true" : "false",
        c.num_seqs, c.num_rows, c.kv_len, r.layer_us, r.in_step_us, r.terabytes_per_s, r.teraflops,
        r.plan_us);
    records += record;
  }
  if (!json.empty()) {
    std::FILE* file = std::fopen(json.c_str(), "w");
    if (file == nullptr) {
      std::fprintf(stderr, "cannot write %s\n", json.c_str());
      return 1;
    }
    std::fprintf(file,
                 "{\n  \"device\": \"%s\",\n  \"num_layers\": %d,\n  \"num_q_heads\": %d,\n"
                 "  \"num_kv_heads\": %d,\n  \"head_dim\": %d,\n  \"page_size\": %d,\n"
                 "  \"cases\": [%s\n  ]\n}\n",
                 properties.name, kNumLayers, kCases[0].num_q_heads, kNumKvHeads,
                 kCases[0].head_dim, kPageSize, records.c_str());
    std::fclose(file);
  }
  CHECK_CUDA(cudaFree(kv));
  CHECK_CUDA(cudaFree(between));
  CHECK_CUDA(cudaStreamDestroy(stream));
  return 0;
}
