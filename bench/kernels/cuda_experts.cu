// Times a mixture of experts on CUDA, of Qwen3-30B-A3B's shape with random weights: microseconds
// for the router and the experts of a layer, with the norm that adds up, in replayed graphs of
// several layers that together are far larger than the cache.
//
//   bench_cuda_experts [--format bf16|channel|block] [--json FILE]
//
// FP8 by the form of its scales: of an output, or of a block of 128 x 128. The router is bf16.
// `floor` is what reading the weights of the experts that have rows takes at the bandwidth of plain
// reading. Skewed: rows have a part in common, so that they meet at fewer experts.

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "cuda_bench.h"
#include "kernels/experts/experts.h"
#include "kernels/linear/linear.h"
#include "kernels/norm/rms_norm.h"
#include "read_bandwidth.h"

namespace {

using namespace openspec;
using namespace openspec::bench;

constexpr int kHidden = 2048, kInner = 768, kExperts = 128, kTopK = 8, kLayers = 8;
constexpr int kMaxRows = 4096, kRepeats = 15;

__device__ float uniform(uint64_t at) {  // in (-1, 1), of variance 1/3
  at = (at ^ at >> 31) * 0x7fb5d329728ea185u;
  at = (at ^ at >> 27) * 0x81dadef4bc2dd44du;
  return static_cast<float>(static_cast<int32_t>((at ^ at >> 33) >> 32)) * 0x1p-31f;
}

__global__ void fill(__nv_bfloat16* to, size_t count, float scale, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    to[i] = __float2bfloat16_rn(scale * uniform(seed << 40 | i));
  }
}

__global__ void fill_codes(uint8_t* to, size_t count, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    const auto code = static_cast<uint8_t>(128 + 128 * uniform(seed << 40 | i));
    to[i] = (code & 0x7f) == 0x7f ? 0 : code;  // those are no numbers
  }
}

__global__ void fill_rows(__nv_bfloat16* to, float shared, uint64_t seed) {
  const int64_t row = blockIdx.x;
  for (int64_t c = threadIdx.x; c < kHidden; c += blockDim.x) {
    const float own = uniform(seed << 40 | (row * kHidden + c));
    const float common = uniform((seed + 100) << 40 | c);
    to[row * kHidden + c] =
        __float2bfloat16_rn(1.7f * (shared * common + sqrtf(1 - shared * shared) * own));
  }
}

/// `kind`: of the scales of codes; kNone: bf16.
LinearStack random_stack(int count, int outputs, int inputs, LinearEpilogue epilogue,
                         ScaleKind kind, uint64_t seed) {
  constexpr float kDeviation = 100.0f;  // about, of codes by chance
  const size_t size = size_t(outputs) * inputs;
  const float scale = 1.0f / std::sqrt(float(inputs));
  LinearStack stack;
  stack.first.num_outputs = outputs;
  stack.first.num_inputs = inputs;
  stack.first.epilogue = epilogue;
  stack.first.layout = LinearLayout::kTiles;
  stack.count = count;
  if (kind == ScaleKind::kNone) {
    auto* const data = device_array<__nv_bfloat16>(size * count);
    fill<<<1024, 256>>>(data, size * count, 1.7f * scale, seed);
    stack.first.data = data;
    stack.bytes = size * 2;
    return stack;
  }
  auto* const data = device_array<uint8_t>(size * count);
  fill_codes<<<1024, 256>>>(data, size * count, seed);
  stack.first.data = data;
  stack.first.format = MatrixFormat::kE4M3;
  stack.first.scale_kind = kind;
  const auto num_scales = static_cast<size_t>(stack.first.num_scales()) * size_t(count);
  stack.first.scales = device_copy(std::vector<float>(num_scales, scale / kDeviation));
  stack.bytes = size;
  return stack;
}

struct Layer {
  RouteParams route;
  ExpertsParams experts;
};

/// `kind`: kNone is bf16.
Layer random_layer(ScaleKind kind, uint64_t seed) {
  constexpr LinearEpilogue kPlain = LinearEpilogue::kNone, kSwiGlu = LinearEpilogue::kSwiGlu;
  Layer layer;
  layer.route.router = random_stack(1, kExperts, kHidden, kPlain, ScaleKind::kNone, 3 * seed).first;
  layer.route.expert = device_array<int32_t>(kMaxRows * kTopK);
  layer.route.weight = device_array<float>(kMaxRows * kTopK);
  layer.route.top_k = kTopK;
  layer.route.norm_top_k = true;
  layer.route.dtype = DType::kBF16;
  layer.experts.gate_up = random_stack(kExperts, 2 * kInner, kHidden, kSwiGlu, kind, 3 * seed + 1);
  layer.experts.down = random_stack(kExperts, kHidden, kInner, kPlain, kind, 3 * seed + 2);
  layer.experts.expert = layer.route.expert;
  layer.experts.weight = layer.route.weight;
  layer.experts.top_k = kTopK;
  layer.experts.dtype = DType::kBF16;
  return layer;
}

double distinct_experts(const std::vector<Layer>& layers, int num_rows) {
  double sum = 0;
  std::vector<int32_t> chosen(size_t(num_rows) * kTopK);
  for (const Layer& layer : layers) {
    CHECK_CUDA(
        cudaMemcpy(chosen.data(), layer.route.expert, chosen.size() * 4, cudaMemcpyDeviceToHost));
    sum += double(std::set<int32_t>(chosen.begin(), chosen.end()).size());
  }
  return sum / kLayers;
}

}  // namespace

int main(int argc, char** argv) {
  ScaleKind kind = ScaleKind::kNone;
  if (argc > 2 && std::strcmp(argv[1], "--format") == 0) {
    if (std::strcmp(argv[2], "channel") == 0) kind = ScaleKind::kOutput;
    if (std::strcmp(argv[2], "block") == 0) kind = ScaleKind::kBlock;
    argc -= 2;
    argv += 2;
  }
  const char* path = json_path(argc, argv);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const double bandwidth = read_bandwidth(size_t{4} << 30);
  std::printf("read bandwidth %.3f TB/s\n", bandwidth / 1e12);

  std::vector<Layer> layers;
  auto* const x = device_array<__nv_bfloat16>(size_t{kMaxRows} * kHidden);
  RmsNormParams norm = {.residual = device_array<__nv_bfloat16>(size_t{kMaxRows} * kHidden),
                        .weight = device_copy(std::vector<float>(kHidden, 1.0f)),
                        .out = device_array<__nv_bfloat16>(size_t{kMaxRows} * kHidden),
                        .width = kHidden,
                        .dtype = DType::kBF16};
  auto* const route_space =
      device_array<uint8_t>(route_experts_workspace_bytes_cuda(kMaxRows, kExperts));
  auto* const space = device_array<uint8_t>(
      experts_workspace_bytes_cuda(kMaxRows, kHidden, kInner, kExperts, kTopK));
  for (int i = 0; i < kLayers; ++i) {
    Layer& layer = layers.emplace_back(random_layer(kind, i + 1));
    layer.route.x = layer.experts.x = x;
    layer.route.workspace = route_space;
    layer.experts.terms = &norm.terms;
    layer.experts.workspace = space;
  }

  std::vector<std::string> runs;
  for (const float shared : {0.0f, 0.8f}) {
    fill_rows<<<kMaxRows, 256>>>(x, shared, 99);
    CHECK_CUDA(cudaDeviceSynchronize());
    for (const int num_rows : {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 4096}) {
      const auto time = [&](bool routes, bool multiplies) {
        return graph_us(stream, kRepeats,
                        [&] {
                          for (Layer& layer : layers) {
                            layer.route.num_rows = layer.experts.num_rows = norm.num_rows =
                                num_rows;
                            if (routes) CHECK_CUDA(route_experts_cuda(layer.route, stream));
                            if (!multiplies) continue;
                            CHECK_CUDA(experts_cuda(layer.experts, stream));
                            CHECK_CUDA(rms_norm_cuda(norm, stream));
                          }
                        }) /
               kLayers;
      };
      const double layer_us = time(true, true), route_us = time(true, false),
                   experts_us = time(false, true), distinct = distinct_experts(layers, num_rows);
      const double floor_us =
          1e6 * distinct * double(layers[0].experts.gate_up.bytes + layers[0].experts.down.bytes) /
          bandwidth;
      const double tflops = 6e-6 * num_rows * kTopK * kHidden * kInner / layer_us;
      std::printf(
          "%s, %4d rows: %5.1f experts, floor %6.1f us, layer %7.1f us (%.2f x floor, %5.1f us "
          "over, %5.1f TFLOP/s), router alone %5.1f us, experts and norm %7.1f us\n",
          shared > 0 ? "skewed " : "uniform", num_rows, distinct, floor_us, layer_us,
          layer_us / floor_us, layer_us - floor_us, tflops, route_us, experts_us);
      std::fflush(stdout);
      runs.push_back("{\"rows\": " + std::to_string(num_rows) +
                     ", \"shared\": " + std::to_string(shared) + ", \"distinct_experts\": " +
                     std::to_string(distinct) + ", \"floor_us\": " + std::to_string(floor_us) +
                     ", \"layer_us\": " + std::to_string(layer_us) +
                     ", \"route_us\": " + std::to_string(route_us) +
                     ", \"experts_us\": " + std::to_string(experts_us) + "}");
    }
  }
  if (path != nullptr) write_json(path, "bench/kernels/cuda_experts.cu", runs);
  return 0;
}
