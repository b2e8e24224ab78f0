// Times the small row ops of a decode step on CUDA, Qwen3-4B shapes: microseconds of one launch
// among kLaunches in a replayed graph, each overlapping the one before it (launch.cuh).
//
//   FLAGS="-std=c++17 -O3 -DOPENSPEC_CUDA=1 -Icsrc --expt-relaxed-constexpr -arch=sm_90a"
//   nvcc $FLAGS bench/kernels/cuda_row_ops.cu
//     csrc/kernels/{rms_norm,rope,embedding,gather_rows}.cu -o row_ops       (one line)
//   ./row_ops [--json FILE]
//
// It does not show what a launch costs between two linears, where it competes for room on the SMs
// and breaks their overlap, and up to some hundred rows everything but the table comes from L2.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/embedding.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"

namespace {

using namespace openspec;

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

void check(int error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}
#define CHECK_CUDA(call) check((call), #call)

template <typename T>
T* device_array(size_t count) {
  void* data = nullptr;
  CHECK_CUDA(cudaMalloc(&data, count * sizeof(T)));
  CHECK_CUDA(cudaMemset(data, 0x3c, count * sizeof(T)));  // 0.0115 as bf16 and as fp32
  return static_cast<T*>(data);
}

template <typename T>
T* device_copy(const std::vector<T>& values) {
  T* data = device_array<T>(values.size());
  CHECK_CUDA(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

/// Median time of one launch, in microseconds.
template <typename Launch>
double launch_us(cudaStream_t stream, const Launch& launch) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK_CUDA(launch(0));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kLaunches; ++i) CHECK_CUDA(launch(i));
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  CHECK_CUDA(cudaGraphLaunch(executable, stream));
  for (int i = 0; i < kRepeats; ++i) {
    CHECK_CUDA(cudaEventRecord(begin, stream));
    CHECK_CUDA(cudaGraphLaunch(executable, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms);
  }
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
  CHECK_CUDA(cudaGraphExecDestroy(executable));
  CHECK_CUDA(cudaGraphDestroy(graph));
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return static_cast<double>(times[kRepeats / 2]) * 1e3 / kLaunches;
}

struct Run {
  std::string op;
  int num_rows;
  double us;
  double gb_per_s;
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
  params.table_dtype = DType::kBF16;
  params.dtype = DType::kBF16;
  const double us = launch_us(stream, [&](int i) {
    params.token = tokens + static_cast<size_t>(i) * kMaxRows;
    return embedding_cuda(params, stream);
  });
  return {"embedding", num_rows, us, 2.0 * num_rows * kWidth * sizeof(uint16_t) / us * 1e-3};
}

std::string git_commit() {
  char line[64] = "";
  if (FILE* pipe = popen("git rev-parse --short HEAD 2>/dev/null", "r")) {
    if (std::fgets(line, sizeof line, pipe) == nullptr) line[0] = '\0';
    pclose(pipe);
  }
  line[std::strcspn(line, "\n")] = '\0';
  return line;
}

void write_json(const char* path, const std::vector<Run>& runs) {
  cudaDeviceProp device;
  int runtime = 0, driver = 0;
  CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  CHECK_CUDA(cudaRuntimeGetVersion(&runtime));
  CHECK_CUDA(cudaDriverGetVersion(&driver));
  FILE* file = std::fopen(path, "w");
  if (file == nullptr) {
    std::perror(path);
    std::exit(1);
  }
  std::fprintf(file,
               "{\n \"environment\": {\n  \"gpu\": \"%s\",\n  \"cuda\": \"%d.%d\",\n"
               "  \"driver_cuda\": \"%d.%d\",\n  \"commit\": \"%s\",\n"
               "  \"command\": \"bench/kernels/cuda_row_ops.cu\"\n },\n \"runs\": [\n",
               device.name, runtime / 1000, runtime % 1000 / 10, driver / 1000, driver % 1000 / 10,
               git_commit().c_str());
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    std::fprintf(file, "  {\"op\": \"%s\", \"num_rows\": %d, \"us\": %.2f, \"gb_per_s\": %.1f}%s\n",
                 run.op.c_str(), run.num_rows, run.us, run.gb_per_s,
                 i + 1 < runs.size() ? "," : "");
  }
  std::fprintf(file, " ]\n}\n");
  std::fclose(file);
}

}  // namespace

int main(int argc, char** argv) {
  const char* path = nullptr;
  if (argc == 3 && std::strcmp(argv[1], "--json") == 0) {
    path = argv[2];
  } else if (argc != 1) {
    std::fprintf(stderr, "usage: %s [--json FILE]\n", argv[0]);
    return 2;
  }
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::vector<Run> runs;
  for (const auto measure : {measure_rms_norm, measure_rope_append, measure_embedding}) {
    for (const int num_rows : kRows) {
      runs.push_back(measure(stream, num_rows));
      std::printf("%-12s %5d rows %8.2f us %8.1f GB/s\n", runs.back().op.c_str(), num_rows,
                  runs.back().us, runs.back().gb_per_s);
    }
  }
  if (path != nullptr) write_json(path, runs);
  return 0;
}
