// Times what it costs on CUDA that the drafts of a block know the token before them, at the
// vocabulary of Qwen3, rank 256 and blocks of seven: microseconds for all drafts of a step, in a
// replayed graph.
//
//   bench_cuda_token_pairs [--json FILE]
//
//   cmake --build build --target bench_cuda_token_pairs, or
//   nvcc -std=c++17 -O3 -DOPENSPEC_CUDA=1 -fmad=false -Icsrc --expt-relaxed-constexpr -arch=sm_90a
//     bench/kernels/cuda_token_pairs.cu bench/kernels/read_bandwidth.cu csrc/kernels/token_pairs.cu
//     csrc/kernels/choose.cu csrc/kernels/top_drafts.cu csrc/kernels/block_tree.cu (one line)
//
// A chain reads one table once for every draft: `floor` is what that takes at the bandwidth of
// plain reading. A tree reads the rows of its candidates alone.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/block_tree.h"
#include "kernels/draft_tree.h"
#include "kernels/token_pairs.h"
#include "read_bandwidth.h"

namespace {

using namespace openspec;

constexpr int kVocab = 151936, kRank = 256, kDepth = 7, kTopK = 64, kNodes = 31;
constexpr int kMaxSeqs = 64, kMaxSamples = kMaxSeqs * kDepth;
constexpr int kRepeats = 15;

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
  CHECK_CUDA(cudaMemset(data, 0, count * sizeof(T)));
  return static_cast<T*>(data);
}
template <typename T>
T* device_copy(const std::vector<T>& values) {
  T* data = device_array<T>(values.size());
  CHECK_CUDA(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

/// bf16 of about unit size over `scale`.
uint16_t* random_table(float scale) {
  std::minstd_rand engine(1);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<uint16_t> values(size_t{kVocab} * kRank);
  for (size_t i = 0; i < values.size(); ++i) {
    if (i >= 1 << 20) {
      values[i] = values[i % 1009 + (i & 0x7ffff)];
      continue;
    }
    const float value = normal(engine);
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    values[i] = static_cast<uint16_t>(bits >> 16);
  }
  return device_copy(values);
}

/// Median time in microseconds of a replayed graph of `call`.
template <typename Call>
double graph_us(cudaStream_t stream, const Call& call) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  call();
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  constexpr int kCalls = 10;
  for (int i = 0; i < kCalls; ++i) call();
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
  return static_cast<double>(times[kRepeats / 2]) * 1e3 / kCalls;
}

}  // namespace

int main(int argc, char** argv) {
  const bool has_path = argc == 3 && std::strcmp(argv[1], "--json") == 0;
  if (argc != 1 && !has_path) {
    std::fprintf(stderr, "usage: %s [--json FILE]\n", argv[0]);
    return 2;
  }
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const double bandwidth = bench::read_bandwidth(size_t{4} << 30);
  const double floor_us = 1e6 * kDepth * kVocab * kRank * 2.0 / bandwidth;
  std::printf("read bandwidth %.3f TB/s, floor of a chain of %d: %.1f us\n", bandwidth / 1e12,
              kDepth, floor_us);

  std::vector<int32_t> seq(kMaxSeqs), first(kMaxSeqs), sample_row(kMaxSamples),
      row_span(kMaxSamples);
  for (int i = 0; i < kMaxSeqs; ++i) {
    seq[i] = i;
    first[i] = i * kDepth;
  }
  for (int i = 0; i < kMaxSamples; ++i) {
    sample_row[i] = i;
    row_span[i] = i / kDepth;
  }
  std::minstd_rand engine(3);
  std::normal_distribution<float> normal(0.0f, 2.5f);
  std::vector<float> row(kVocab);
  float* logits = device_array<float>(size_t{kMaxSamples} * kVocab);
  for (int i = 0; i < kMaxSamples; ++i) {
    if (i < 8) {
      for (float& logit : row) logit = normal(engine);
    }
    CHECK_CUDA(cudaMemcpy(logits + int64_t{i} * kVocab, row.data(), row.size() * sizeof(float),
                          cudaMemcpyHostToDevice));
  }
  TableView table;
  table.tokens = device_copy(std::vector<int32_t>(kMaxSeqs, 11));
  table.tokens_stride = 1;
  table.num_tokens = device_copy(std::vector<int32_t>(kMaxSeqs, 1));
  table.max_num_seqs = kMaxSeqs;

  const TokenPairs pairs = {random_table(1.0f), random_table(0.05f), kVocab, kRank};
  const int32_t* seqs = device_copy(seq);
  const int32_t* first_sample = device_copy(first);
  const int32_t* depths = device_copy(std::vector<int32_t>(kMaxSeqs, kDepth));
  const int32_t* nodes = device_copy(std::vector<int32_t>(kMaxSeqs, kNodes));
  auto* chosen = device_array<int32_t>(kMaxSamples);
  auto* samples = device_array<int32_t>(kMaxSeqs);
  auto* sampling = device_array<SamplingParams>(kMaxSeqs);

  ChooseParams choice;
  choice.rows.num_rows = kMaxSamples;
  choice.rows.num_spans = kMaxSeqs;
  choice.rows.row_position = device_copy(sample_row);
  choice.rows.row_span = device_copy(row_span);
  choice.rows.span_seq = seqs;
  choice.sample_row = device_copy(sample_row);
  choice.samples = samples;
  choice.logits = logits;
  choice.vocab_size = kVocab;
  choice.is_draft = true;
  choice.sampling = sampling;
  choice.chosen = chosen;
  choice.workspace = device_array<float>(choose_workspace_bytes_cuda(kMaxSeqs, kVocab) / 4);

  TopDraftsParams top = {.rows = choice.rows,
                         .sample_row = choice.sample_row,
                         .logits = logits,
                         .vocab_size = kVocab,
                         .sampling = sampling,
                         .top_k = kTopK,
                         .tokens = device_array<int32_t>(kMaxSamples * kTopK),
                         .scores = device_array<float>(kMaxSamples * kTopK)};
  top.workspace = device_array<float>(top_drafts_workspace_bytes_cuda(kMaxSamples, kVocab) / 4);
  BlockPairsParams behind = {.table = table,
                             .seq = seqs,
                             .first_sample = first_sample,
                             .num_depths = depths,
                             .max_depth = kDepth,
                             .top_k = kTopK,
                             .tokens = top.tokens,
                             .scores = top.scores,
                             .sampling = sampling,
                             .pairs = pairs,
                             .pair_ranks = device_array<int32_t>(kMaxSamples * kTopK * kTopK),
                             .pair_scores = device_array<float>(kMaxSamples * kTopK * kTopK)};
  BlockTreesParams trees = {.tokens = top.tokens,
                            .scores = top.scores,
                            .pair_ranks = behind.pair_ranks,
                            .pair_scores = behind.pair_scores,
                            .top_k = kTopK,
                            .first_sample = first_sample,
                            .num_depths = depths,
                            .num_wanted = nodes,
                            .max_drafts = kNodes,
                            .drafts = device_array<int32_t>(kMaxSeqs * kNodes),
                            .parents = device_array<int32_t>(kMaxSeqs * kNodes),
                            .path_scores = device_array<float>(kMaxSeqs * kNodes),
                            .num_drafts = device_array<int32_t>(kMaxSeqs)};

  std::string json = "{\n \"floor_us\": " + std::to_string(floor_us) + ",\n \"runs\": [";
  for (const float temperature : {0.0f, 1.0f}) {
    SamplingParams drawn;
    drawn.temperature = temperature;
    CHECK_CUDA(cudaMemcpy(sampling, std::vector<SamplingParams>(kMaxSeqs, drawn).data(),
                          kMaxSeqs * sizeof(SamplingParams), cudaMemcpyHostToDevice));
    for (const int num_seqs : {1, 4, 8, 16, 64}) {
      const auto step = [&](int depth) {
        CHECK_CUDA(block_step_cuda({.table = table,
                                    .seq = seqs,
                                    .first_sample = first_sample,
                                    .num_drafts = depths,
                                    .num_seqs = num_seqs,
                                    .depth = depth,
                                    .chosen = chosen,
                                    .pairs = pairs,
                                    .logits = logits,
                                    .sample = samples},
                                   stream));
      };
      const auto choose = [&] {
        choice.num_samples = num_seqs;
        CHECK_CUDA(choose_cuda(choice, stream));
      };
      const double chain = graph_us(stream, [&] {
        for (int depth = 0; depth < kDepth; ++depth) {
          step(depth);
          choose();
        }
      });
      const double steps = graph_us(stream, [&] {
        for (int depth = 0; depth < kDepth; ++depth) step(depth);
      });
      const double one_way = graph_us(stream, [&] {
        for (int depth = 0; depth < kDepth; ++depth) step(0);
      });
      const double tree = graph_us(stream, [&] {
        top.num_samples = num_seqs * kDepth;
        behind.num_seqs = trees.num_seqs = num_seqs;
        CHECK_CUDA(top_drafts_cuda(top, stream));
        CHECK_CUDA(block_pairs_cuda(behind, stream));
        CHECK_CUDA(block_trees_cuda(trees, stream));
      });
      const double tail = graph_us(stream, [&] {
        CHECK_CUDA(block_pairs_cuda(behind, stream));
        CHECK_CUDA(block_trees_cuda(trees, stream));
      });
      json += std::string(json.back() == '[' ? "" : ",") +
              "\n  {\"temperature\": " + (temperature > 0.0f ? "1" : "0") +
              ", \"sequences\": " + std::to_string(num_seqs) +
              ", \"chain_us\": " + std::to_string(chain) +
              ", \"chain_steps_us\": " + std::to_string(steps) +
              ", \"tree_us\": " + std::to_string(tree) +
              ", \"tree_pairs_and_nodes_us\": " + std::to_string(tail) + "}";
      std::printf(
          "temperature %.0f, %2d sequences: chain %7.1f us (%.2f x floor), its steps alone %7.1f, "
          "read the same way each time %7.1f; tree of %d %6.1f, of which pairs and nodes %5.1f\n",
          temperature, num_seqs, chain, chain / floor_us, steps, one_way, kNodes, tree, tail);
    }
  }
  if (has_path) {
    std::FILE* file = std::fopen(argv[2], "w");
    if (file == nullptr) {
      std::perror(argv[2]);
      return 1;
    }
    std::fprintf(file, "%s\n ]\n}\n", json.c_str());
    std::fclose(file);
  }
  return 0;
}
