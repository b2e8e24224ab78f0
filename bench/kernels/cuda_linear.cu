// Micro-benchmark of the CUDA linear on the shapes of Qwen3-4B: the 145 linears of a step as one
// graph with distinct weights, and every matrix alone, beside the read bandwidth of the same run;
// then the matrices of draft models that have no counterpart there.
//
//   bench_cuda_linear [--json FILE] [--sweep | --formats]
//
// The chain has no small kernels between the linears; the engine's benchmark has. `auto` is what
// linear_cuda chooses, `stream` and `wgmma` are its kernels by themselves, `cublas` is cuBLASLt
// where it was found when building (the same products, rounded to bf16, without SwiGLU). --sweep
// goes through the plans of both kernels, which decide speed and never bits, and shows the fastest.
// --formats compares bf16 with e4m3, the LM head bf16 and left out of more than 256 rows.
// Medians of replays; a matrix alone is 36 launches with 36 different weights.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cuda_bench.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/tiles.cuh"
#include "kernels/linear/wgmma.h"
#include "read_bandwidth.h"

#ifdef OPENSPEC_HAS_CUBLASLT
#include "cublas_linear.h"
#endif

namespace {

using namespace openspec;

constexpr int kNumLayers = 36;
constexpr int kMaxRows = 2048;
constexpr int kMaxPartialRows = 256;  // as in the engine

/// Pairs of bf16 values of either sign, all with the same biased exponent.
__global__ void fill_kernel(uint32_t* pairs, int64_t num_pairs, uint32_t exponent) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_pairs;
       i += stride) {
    uint64_t hash = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u;
    hash = (hash ^ (hash >> 29)) * 0xbf58476d1ce4e5b9u;
    const auto random = static_cast<uint32_t>(hash >> 32);
    pairs[i] = (random & 0x807f807fu) | exponent << 7 | exponent << 23;
  }
}

int num_sms() {
  int count = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

void fill(void* data, size_t bytes, uint32_t exponent) {
  fill_kernel<<<num_sms() * 8, 256>>>(static_cast<uint32_t*>(data), static_cast<int64_t>(bytes / 4),
                                      exponent);
  CHECK_CUDA(cudaGetLastError());
}

/// Median microseconds of a replay of what `enqueue` puts into the stream.
double median_us(const std::function<void(cudaStream_t)>& enqueue, int num_replays) {
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreate(&stream));
  cudaGraphExec_t replay = bench::record(stream, [&] { enqueue(stream); });
  std::vector<cudaEvent_t> events(static_cast<size_t>(num_replays) + 1);
  for (cudaEvent_t& event : events) CHECK_CUDA(cudaEventCreate(&event));
  CHECK_CUDA(cudaEventRecord(events[0], stream));
  for (size_t i = 1; i < events.size(); ++i) {
    CHECK_CUDA(cudaGraphLaunch(replay, stream));
    CHECK_CUDA(cudaEventRecord(events[i], stream));
  }
  CHECK_CUDA(cudaStreamSynchronize(stream));
  std::vector<float> times(static_cast<size_t>(num_replays));
  for (size_t i = 0; i < times.size(); ++i) {
    CHECK_CUDA(cudaEventElapsedTime(&times[i], events[i], events[i + 1]));
  }
  for (const cudaEvent_t event : events) CHECK_CUDA(cudaEventDestroy(event));
  CHECK_CUDA(cudaGraphExecDestroy(replay));
  CHECK_CUDA(cudaStreamDestroy(stream));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e3;
}

struct Matrix {
  const char* name;
  int num_outputs;
  int num_inputs;
  LinearEpilogue epilogue;
  bool may_split;  // up to kMaxPartialRows the sums of its splits are left to the next kernel
  DType out_dtype;
  int num_copies;

  uint8_t* weights = nullptr;
  float* scales = nullptr;
  void* out = nullptr;

  size_t bytes() const { return linear_packed_bytes_cuda(num_outputs, num_inputs); }
  size_t num_scales() const {
    const auto count = static_cast<size_t>(num_outputs);
    return std::max(count, count / 8 * (static_cast<size_t>(num_inputs) / kScaleInputs));
  }
  int num_splits() const { return may_split ? linear_num_splits(num_outputs, num_inputs) : 1; }
  LinearParams params(int copy, int num_rows, const void* x,
                      ScaleKind kind = ScaleKind::kNone) const {
    const bool is_apart = may_split && num_rows <= kMaxPartialRows;
    LinearParams params;
    if (kind != ScaleKind::kNone) {
      params.weight.format = MatrixFormat::kE4M3;
      params.weight.scale_kind = kind;
      params.weight.scales = scales + static_cast<size_t>(copy) * num_scales();
    }
    params.weight.data = weights + static_cast<size_t>(copy) *
                                       format_bytes(params.weight.format, num_outputs, num_inputs);
    params.weight.num_outputs = num_outputs;
    params.weight.num_inputs = num_inputs;
    params.weight.epilogue = epilogue;
    params.weight.layout = LinearLayout::kTiles;
    params.weight.num_splits = num_splits();
    params.x = x;
    params.out = is_apart ? nullptr : out;
    params.partials = is_apart ? static_cast<float*>(out) : nullptr;
    params.num_rows = num_rows;
    params.dtype = DType::kBF16;
    params.out_dtype = out_dtype;
    return params;
  }
};

using Linear = std::function<int(const LinearParams&, cudaStream_t)>;

struct Kernel {
  const char* name;
  Linear linear;
};

class Bench {
 public:
  Bench() : read_bandwidth_(bench::read_bandwidth(size_t{4} << 30)) {
    constexpr LinearEpilogue kNone = LinearEpilogue::kNone, kSwiGlu = LinearEpilogue::kSwiGlu;
    matrices_ = {{"qkv", 6144, 2560, kNone, false, DType::kBF16, kNumLayers},
                 {"o", 2560, 4096, kNone, true, DType::kBF16, kNumLayers},
                 {"gate_up", 19456, 2560, kSwiGlu, false, DType::kBF16, kNumLayers},
                 {"down", 2560, 9728, kNone, true, DType::kBF16, kNumLayers},
                 {"lm_head", 151936, 2560, kNone, false, DType::kF32, 1}};
    for (const Matrix& matrix : matrices_) {
      weight_bytes_ += matrix.bytes() * static_cast<size_t>(matrix.num_copies);
    }
    weights_ = bench::device_array<uint8_t>(weight_bytes_);
    fill(weights_, weight_bytes_, 127 - 5);  // from 2^-5 to 2^-4
    uint8_t* at = weights_;
    for (Matrix& matrix : matrices_) {
      matrix.weights = at;
      at += matrix.bytes() * static_cast<size_t>(matrix.num_copies);
      const size_t num_scales = matrix.num_scales() * static_cast<size_t>(matrix.num_copies);
      matrix.scales = bench::device_array<float>(num_scales);
      // 4.4e-5: sums as moderate as those of bf16, whose silu takes as long.
      CHECK_CUDA(cudaMemset(matrix.scales, 0x38, num_scales * sizeof(float)));
      matrix.out = bench::device_array<float>(static_cast<size_t>(matrix.num_splits()) * kMaxRows *
                                              static_cast<size_t>(matrix.num_outputs));
    }
    draft_matrices_ = {{"fc_7680", 2560, 7680, kNone, true, DType::kBF16, kNumLayers},
                       {"fc_12800", 2560, 12800, kNone, true, DType::kBF16, kNumLayers},
                       {"qkv_5120", 6144, 5120, kNone, false, DType::kBF16, kNumLayers},
                       {"head_32k", 32000, 2560, kNone, false, DType::kF32, kNumLayers}};
    for (Matrix& matrix : draft_matrices_) {
      matrix.weights = weights_;
      matrix.out = matrices_.back().out;
    }
    const size_t x_bytes = static_cast<size_t>(kMaxRows) * 12800 * sizeof(__nv_bfloat16);
    x_ = bench::device_array<uint8_t>(x_bytes);
    fill(x_, x_bytes, 127);
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  const std::vector<Matrix>& matrices() const { return matrices_; }
  const std::vector<Matrix>& draft_matrices() const { return draft_matrices_; }
  const void* x() const { return x_; }
  size_t weight_bytes() const { return weight_bytes_; }
  double read_bandwidth() const { return read_bandwidth_; }
  /// Microseconds to read so many bytes at the bandwidth of this run.
  double floor_us(size_t bytes) const { return static_cast<double>(bytes) / read_bandwidth_ * 1e6; }

  double chain_us(const Linear& linear, int num_rows, int num_replays = 11,
                  ScaleKind kind = ScaleKind::kNone, bool has_head = true) const {
    return median_us(
        [&](cudaStream_t stream) {
          for (int layer = 0; layer < kNumLayers; ++layer) {
            for (const Matrix& matrix : matrices_) {
              if (matrix.num_copies == 1) continue;
              CHECK_CUDA(linear(matrix.params(layer, num_rows, x_, kind), stream));
            }
          }
          if (has_head) CHECK_CUDA(linear(matrices_.back().params(0, num_rows, x_), stream));
        },
        num_replays);
  }

  double matrix_us(const Matrix& matrix, const Linear& linear, int num_rows, int num_replays = 7,
                   ScaleKind kind = ScaleKind::kNone) const {
    const int num_launches = std::max(matrix.num_copies, 4);  // lm_head is larger than any cache
    return median_us(
               [&](cudaStream_t stream) {
                 for (int i = 0; i < num_launches; ++i) {
                   const int copy = i % matrix.num_copies;
                   CHECK_CUDA(linear(matrix.params(copy, num_rows, x_, kind), stream));
                 }
               },
               num_replays) /
           num_launches;
  }

 private:
  double read_bandwidth_;  // bytes per second, measured before anything else is allocated
  std::vector<Matrix> matrices_;
  std::vector<Matrix> draft_matrices_;  // over the same weights
  uint8_t* weights_ = nullptr;
  size_t weight_bytes_ = 0;
  void* x_ = nullptr;
};

struct Result {
  std::string name;
  std::string kernel;
  int num_rows;
  double us;
  double floor_us;
  size_t bytes;
};

void print(const Result& result) {
  std::printf("%-8s %-6s %4d rows %9.2f us  %5.2f TB/s  %5.1f %% of the read bandwidth\n",
              result.name.c_str(), result.kernel.c_str(), result.num_rows, result.us,
              static_cast<double>(result.bytes) / result.us * 1e-6,
              100.0 * result.floor_us / result.us);
}

void write_json(const char* path, const Bench& bench, const std::vector<Result>& results) {
  char text[256];
  std::vector<std::string> runs;
  for (const Result& result : results) {
    std::snprintf(text, sizeof text,
                  "{\"linear\": \"%s\", \"kernel\": \"%s\", \"num_rows\": %d, \"us\": %.2f, "
                  "\"floor_us\": %.2f, \"tb_per_s\": %.3f}",
                  result.name.c_str(), result.kernel.c_str(), result.num_rows, result.us,
                  result.floor_us, static_cast<double>(result.bytes) / result.us * 1e-6);
    runs.emplace_back(text);
  }
  std::snprintf(text, sizeof text,
                ",\n  \"model\": \"Qwen3-4B shapes, bf16\",\n  \"weight_bytes\": %zu,\n"
                "  \"read_tb_per_s\": %.3f",
                bench.weight_bytes(), bench.read_bandwidth() * 1e-12);
  bench::write_json(path, "bench/kernels/cuda_linear.cu", runs, text);
}

/// The linears of a step by the format of their weights, beside the time to read these bytes.
void compare_formats(const Bench& bench) {
  const std::pair<const char*, ScaleKind> formats[] = {
      {"bf16", ScaleKind::kNone}, {"outputs", ScaleKind::kOutput}, {"blocks", ScaleKind::kBlock}};
  const Linear linear = [](const LinearParams& p, cudaStream_t s) { return linear_cuda(p, s); };
  const size_t head_bytes = bench.matrices().back().bytes();
  const size_t layer_bytes = (bench.weight_bytes() - head_bytes) / 2;  // of e4m3, scales apart
  std::printf("\nrows  scales of        us  x e4m3 floor  x bf16 | of each matrix (x bf16)\n");
  for (const int num_rows : {1, 8, 16, 24, 32, 64, 128, 256, 550, 2048}) {
    const bool has_head = num_rows <= kMaxPartialRows;
    const double floor_us = bench.floor_us(layer_bytes + (has_head ? head_bytes : 0));
    std::map<std::string, double> bf16_us;  // the first format's
    for (const auto& [name, kind] : formats) {
      const double us = bench.chain_us(linear, num_rows, 11, kind, has_head);
      std::printf("%4d  %-8s  %9.1f  %12.3f  %6.3f |", num_rows, name, us, us / floor_us,
                  us / bf16_us.emplace("chain", us).first->second);
      for (const Matrix& matrix : bench.matrices()) {
        if (matrix.num_copies == 1) continue;
        const double one_us = bench.matrix_us(matrix, linear, num_rows, 5, kind);
        std::printf("  %s %.2f (%.2f)", matrix.name, one_us,
                    one_us / bf16_us.emplace(matrix.name, one_us).first->second);
      }
      std::printf("\n");
    }
  }
}

void sweep_stream(const Bench& bench) {
  std::printf("\nchain by linear_stream, us: 1 | 2 blocks per SM\n");
  for (const int num_rows : {1, 2, 4, 6, 8, 9, 12, 16, 24}) {
    std::printf("%4d rows", num_rows);
    for (const int blocks_per_sm : {1, 2}) {
      const Linear linear = [=](const LinearParams& params, cudaStream_t stream) {
        return cuda::linear_stream(params, stream, {blocks_per_sm});
      };
      std::printf("  %8.1f", bench.chain_us(linear, num_rows, 7));
    }
    std::printf("\n");
  }
}

std::string name(const cuda::WgmmaPlan& plan) {
  std::string text = std::to_string(plan.tile_rows) + "x" + std::to_string(plan.tile_units);
  if (plan.cluster > 1) text += " pairs";
  if (plan.num_runs > 0) text += " " + std::to_string(plan.num_runs) + " runs";
  return text + " " + std::to_string(plan.shared_kib) + " KiB";
}

/// Plans worth a try for so many rows of a matrix.
std::vector<cuda::WgmmaPlan> wgmma_plans(const Matrix& matrix, int num_rows) {
  std::vector<cuda::WgmmaPlan> plans;
  const int num_units = matrix.num_outputs / kLinearUnit;
  for (const int tile_rows : {32, 64, 96, 128}) {
    for (const int cluster : {1, 2}) {
      const int covered = tile_rows * cluster;
      if ((cluster == 2 && tile_rows < 96) || covered >= 2 * num_rows) continue;
      if (covered < num_rows && covered < 128) continue;
      const int num_splits = num_rows <= kMaxPartialRows ? matrix.num_splits() : 1;
      const int max_runs = num_sms() / cluster / num_splits;
      for (int units = 1; units <= 12; ++units) {
        // Runs: bands of tiles, all multiprocessors, one tile each, two tiles each.
        for (int runs : {0, max_runs, (num_units + units - 1) / units,
                         (num_units + 2 * units - 1) / (2 * units)}) {
          if (runs > max_runs || (runs > 0 && covered < num_rows)) continue;
          if (runs == max_runs && units > (num_units + runs - 1) / runs) continue;
          for (const int shared_kib : {104, 114, 128, 168, 226}) {
            if (shared_kib < 168 && tile_rows > 64) continue;
            plans.push_back({tile_rows, units, cluster, runs, shared_kib});
          }
        }
      }
    }
  }
  return plans;
}

/// Every matrix by every plan; then the chain, where blocks of one linear start beside those of the
/// one before: one matrix after the other takes what is best for the chain, of its fastest plans.
void sweep_wgmma(const Bench& bench) {
  constexpr size_t kShown = 4, kTried = 16;
  struct Timed {
    cuda::WgmmaPlan plan;
    double us;
  };
  const auto by = [](const cuda::WgmmaPlan& plan) {
    return [plan](const LinearParams& params, cudaStream_t stream) {
      return cuda::linear_wgmma_as(plan, params, stream);
    };
  };
  std::printf("\nfastest plans of linear_wgmma, us: tile rows x units\n");
  for (const int num_rows : {32, 64, 128, 256}) {
    std::vector<std::vector<Timed>> timed(bench.matrices().size());
    for (size_t i = 0; i < timed.size(); ++i) {
      const Matrix& matrix = bench.matrices()[i];
      for (const cuda::WgmmaPlan& plan : wgmma_plans(matrix, num_rows)) {
        if (by(plan)(matrix.params(0, num_rows, bench.x()), nullptr) != cudaSuccess) continue;
        timed[i].push_back({plan, bench.matrix_us(matrix, by(plan), num_rows, 3)});
      }
      std::sort(timed[i].begin(), timed[i].end(),
                [](const Timed& a, const Timed& b) { return a.us < b.us; });
      timed[i].resize(std::min(timed[i].size(), kTried));
      std::printf("%-8s %4d rows", matrix.name, num_rows);
      for (size_t j = 0; j < std::min(timed[i].size(), kShown); ++j) {
        std::printf("  %7.2f (%s)", timed[i][j].us, name(timed[i][j].plan).c_str());
      }
      std::printf("\n");
    }

    std::map<const void*, const cuda::WgmmaPlan*> plans;  // by a matrix's output
    const auto chain_us = [&] {
      return bench.chain_us(
          [&](const LinearParams& params, cudaStream_t stream) {
            const void* out = params.partials != nullptr ? params.partials : params.out;
            return cuda::linear_wgmma_as(*plans.at(out), params, stream);
          },
          num_rows, 5);
    };
    for (size_t i = 0; i < timed.size(); ++i) plans[bench.matrices()[i].out] = &timed[i][0].plan;
    double best_us = chain_us();
    for (size_t i = 0; i < timed.size(); ++i) {
      const cuda::WgmmaPlan*& plan = plans[bench.matrices()[i].out];
      const cuda::WgmmaPlan* best = plan;
      for (const Timed& other : timed[i]) {
        plan = &other.plan;
        const double us = chain_us();
        if (us >= best_us) continue;
        best_us = us;
        best = plan;
      }
      plan = best;
    }
    std::printf("chain    %4d rows %9.2f", num_rows, best_us);
    for (const Matrix& matrix : bench.matrices()) {
      std::printf("  %s (%s)", matrix.name, name(*plans[matrix.out]).c_str());
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const char* json = nullptr;
  bool is_sweep = false, is_of_formats = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
      json = argv[++i];
    } else if (std::strcmp(argv[i], "--sweep") == 0) {
      is_sweep = true;
    } else if (std::strcmp(argv[i], "--formats") == 0) {
      is_of_formats = true;
    } else {
      std::fprintf(stderr, "usage: %s [--json FILE] [--sweep | --formats]\n", argv[0]);
      return 2;
    }
  }
  const Bench bench;
  std::printf("reading at %.2f TB/s, %.3f GB of weights take %.1f us\n",
              bench.read_bandwidth() * 1e-12, static_cast<double>(bench.weight_bytes()) * 1e-9,
              bench.floor_us(bench.weight_bytes()));
  if (is_of_formats) {
    compare_formats(bench);
    return 0;
  }

  const std::vector<Kernel> kernels = {
      {"auto", [](const LinearParams& p, cudaStream_t s) { return linear_cuda(p, s); }},
      {"stream", [](const LinearParams& p, cudaStream_t s) { return cuda::linear_stream(p, s); }},
      {"wgmma", [](const LinearParams& p, cudaStream_t s) { return cuda::linear_wgmma(p, s); }}};
  const bool has_wgmma =
      cuda::linear_wgmma_takes(bench.matrices()[0].params(0, kMaxRows, nullptr).weight, kMaxRows);
  std::vector<Result> results;
  const auto add = [&](const Result& result) {
    results.push_back(result);
    print(result);
  };
  const auto add_all = [&](const std::string& name, const Linear& linear, int num_rows) {
    add({"chain", name, num_rows, bench.chain_us(linear, num_rows),
         bench.floor_us(bench.weight_bytes()), bench.weight_bytes()});
    for (const Matrix& matrix : bench.matrices()) {
      add({matrix.name, name, num_rows, bench.matrix_us(matrix, linear, num_rows),
           bench.floor_us(matrix.bytes()), matrix.bytes()});
    }
  };
  for (const int num_rows : {1, 8, 16, 24, 25, 32, 48, 64, 96, 128, 192, 256, 2048}) {
    for (const Kernel& kernel : kernels) {
      const std::string name = kernel.name;
      if (name == "wgmma" && (!has_wgmma || num_rows < 16)) continue;
      if (name == "stream" && (num_rows < 24 || num_rows > 64)) continue;
      add_all(name, kernel.linear, num_rows);
    }
  }
  for (const int num_rows : {1, 16}) {
    for (const Matrix& matrix : bench.draft_matrices()) {
      add({matrix.name, kernels[0].name, num_rows,
           bench.matrix_us(matrix, kernels[0].linear, num_rows), bench.floor_us(matrix.bytes()),
           matrix.bytes()});
    }
  }
#ifdef OPENSPEC_HAS_CUBLASLT
  bench::Cublas cublas(bench);
  const Linear by_cublas = [&](const LinearParams& p, cudaStream_t s) { return cublas(p, s); };
  for (const int num_rows : {1, 16, 64, 128, 256, 2048}) {
    cublas.prepare(num_rows);
    add_all("cublas", by_cublas, num_rows);
  }
#else
  std::printf("built without cuBLASLt: no comparison with it\n");
#endif
  if (json != nullptr) write_json(json, bench, results);
  if (is_sweep) {
    sweep_stream(bench);
    if (has_wgmma) sweep_wgmma(bench);
  }
  return 0;
}
