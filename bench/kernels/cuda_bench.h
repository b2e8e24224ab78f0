#pragma once

/// What the benchmarks of CUDA kernels share.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace openspec::bench {

inline void check_cuda(int error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}
#define CHECK_CUDA(call) ::openspec::bench::check_cuda((call), #call)

/// Never freed; bytes of 0x3c: 0.0115 as bf16 and as fp32.
template <typename T>
T* device_array(size_t count) {
  void* data = nullptr;
  CHECK_CUDA(cudaMalloc(&data, count * sizeof(T)));
  CHECK_CUDA(cudaMemset(data, 0x3c, count * sizeof(T)));
  return static_cast<T*>(data);
}
template <typename T>
T* device_copy(const std::vector<T>& values) {
  T* data = device_array<T>(values.size());
  CHECK_CUDA(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

/// What `enqueue` puts on the stream, as a graph that has run twice.
template <typename Enqueue>
cudaGraphExec_t record(cudaStream_t stream, const Enqueue& enqueue) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  enqueue();  // what is loaded on first use is loaded outside of the capture
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue();
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  CHECK_CUDA(cudaGraphDestroy(graph));
  for (int i = 0; i < 2; ++i) CHECK_CUDA(cudaGraphLaunch(executable, stream));
  return executable;
}

/// Median time in microseconds of what `enqueue` puts on the stream, as a graph replayed
/// `num_repeats` times.
template <typename Enqueue>
double graph_us(cudaStream_t stream, int num_repeats, const Enqueue& enqueue) {
  cudaGraphExec_t executable = record(stream, enqueue);
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<double> times;
  for (int i = 0; i < num_repeats; ++i) {
    CHECK_CUDA(cudaEventRecord(begin, stream));
    CHECK_CUDA(cudaGraphLaunch(executable, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms * 1e3);
  }
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
  CHECK_CUDA(cudaGraphExecDestroy(executable));
  const auto median = times.begin() + num_repeats / 2;
  std::nth_element(times.begin(), median, times.end());
  return *median;
}

/// The path behind --json; null: none is wanted. Exits on other arguments.
inline const char* json_path(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--json") == 0) return argv[2];
  if (argc == 1) return nullptr;
  std::fprintf(stderr, "usage: %s [--json FILE]\n", argv[0]);
  std::exit(2);
}

/// `runs`: an object each; `source` is the benchmark's file; `more` goes into the environment.
inline void write_json(const char* path, const char* source, const std::vector<std::string>& runs,
                       const std::string& more = "") {
  cudaDeviceProp device;
  int runtime = 0, driver = 0;
  CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  CHECK_CUDA(cudaRuntimeGetVersion(&runtime));
  CHECK_CUDA(cudaDriverGetVersion(&driver));
  char commit[64] = "";
  if (FILE* pipe = popen("git rev-parse --short HEAD 2>/dev/null", "r")) {
    if (std::fgets(commit, sizeof commit, pipe) == nullptr) commit[0] = '\0';
    pclose(pipe);
  }
  commit[std::strcspn(commit, "\n")] = '\0';
  FILE* file = std::fopen(path, "w");
  if (file == nullptr) {
    std::perror(path);
    std::exit(1);
  }
  std::fprintf(file,
               "{\n \"environment\": {\n  \"gpu\": \"%s\",\n  \"cuda\": \"%d.%d\",\n"
               "  \"driver_cuda\": \"%d.%d\",\n  \"commit\": \"%s\",\n"
               "  \"command\": \"%s\"%s\n },\n \"runs\": [\n",
               device.name, runtime / 1000, runtime % 1000 / 10, driver / 1000, driver % 1000 / 10,
               commit, source, more.c_str());
  for (size_t i = 0; i < runs.size(); ++i) {
    std::fprintf(file, "  %s%s\n", runs[i].c_str(), i + 1 < runs.size() ? "," : "");
  }
  std::fprintf(file, " ]\n}\n");
  std::fclose(file);
}

}  // namespace openspec::bench
