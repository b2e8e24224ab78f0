// Times what it costs on CUDA that the drafts of a block know the token before them, at the
// vocabulary of Qwen3, rank 256 and blocks of seven: microseconds for all drafts of a step, in a
// replayed graph.
//
//   bench_cuda_token_pairs [--json FILE]
//
// A chain of all tokens reads one table once for every draft: `floor` is what that takes at the
// bandwidth of plain reading. A path of candidates and a tree read it once for the first draft,
// then the rows of candidates alone, and with successors the rows of these.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda_bench.h"
#include "kernels/choose/choose.h"
#include "kernels/drafts/draft_block.h"
#include "kernels/drafts/draft_tree.h"
#include "kernels/drafts/token_pairs.h"
#include "read_bandwidth.h"

namespace {

using namespace openspec;
using namespace openspec::bench;

constexpr int kVocab = 151936, kRank = 256, kDepth = 7, kTopK = 64, kNodes = 31;
constexpr int kMaxSeqs = 64, kMaxSamples = kMaxSeqs * kDepth;
constexpr int kRepeats = 15;

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

/// Median time in microseconds of one `call` among several in a replayed graph.
template <typename Call>
double call_us(cudaStream_t stream, const Call& call) {
  constexpr int kCalls = 10;
  return graph_us(stream, kRepeats,
                  [&] {
                    for (int i = 0; i < kCalls; ++i) call();
                  }) /
         kCalls;
}

}  // namespace

int main(int argc, char** argv) {
  const char* path = json_path(argc, argv);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const double bandwidth = read_bandwidth(size_t{4} << 30);
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
  auto* chosen = device_copy(std::vector<int32_t>(kMaxSamples, 0));
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
  choice.workspace = device_array<float>(choose_workspace_bytes_cuda(kMaxSamples, kVocab) / 4);

  TopDraftsParams top = {.rows = choice.rows,
                         .sample_row = choice.sample_row,
                         .logits = logits,
                         .vocab_size = kVocab,
                         .sampling = sampling,
                         .top_k = kTopK,
                         .tokens = device_array<int32_t>(kMaxSamples * kTopK),
                         .scores = device_array<float>(kMaxSamples * kTopK)};
  top.workspace = device_array<float>(top_drafts_workspace_bytes_cuda(kMaxSamples, kVocab) / 4);
  BlockPathParams along = {.seq = seqs,
                           .first_sample = first_sample,
                           .num_drafts = depths,
                           .top_k = kTopK,
                           .tokens = top.tokens,
                           .scores = top.scores,
                           .sampling = sampling,
                           .pairs = pairs,
                           .chosen = chosen};
  std::vector<int32_t> followers(size_t{kVocab} * kNumSuccessors);
  for (int32_t& token : followers) token = static_cast<int32_t>(engine() % kVocab);
  BlockPathParams with_successors = along;
  with_successors.successors = device_copy(followers);
  with_successors.logits = logits;
  with_successors.table = table;
  BlockPairsParams behind = {.seq = seqs,
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

  std::vector<std::string> runs;
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
      const double chain = call_us(stream, [&] {
        for (int depth = 0; depth < kDepth; ++depth) {
          step(depth);
          choose();
        }
      });
      const double steps = call_us(stream, [&] {
        for (int depth = 0; depth < kDepth; ++depth) step(depth);
      });
      const double one_way = call_us(stream, [&] {
        for (int depth = 0; depth < kDepth; ++depth) step(0);
      });
      const double drawn_at_once = call_us(stream, [&] {
        choice.num_samples = num_seqs * kDepth;
        choice.samples = nullptr;
        CHECK_CUDA(choose_cuda(choice, stream));
        choice.samples = samples;
      });
      const double best_path = call_us(stream, [&] {
        top.num_samples = num_seqs * kDepth;
        along.num_seqs = num_seqs;
        step(0);
        CHECK_CUDA(top_drafts_cuda(top, stream));
        CHECK_CUDA(block_path_cuda(along, stream));
      });
      const double path_tail = call_us(stream, [&] { CHECK_CUDA(block_path_cuda(along, stream)); });
      const double successors_tail = call_us(stream, [&] {
        with_successors.num_seqs = num_seqs;
        CHECK_CUDA(block_path_cuda(with_successors, stream));
      });
      const double tree = call_us(stream, [&] {
        top.num_samples = num_seqs * kDepth;
        behind.num_seqs = trees.num_seqs = num_seqs;
        step(0);
        CHECK_CUDA(top_drafts_cuda(top, stream));
        CHECK_CUDA(block_pairs_cuda(behind, stream));
        CHECK_CUDA(block_trees_cuda(trees, stream));
      });
      const double tail = call_us(stream, [&] {
        CHECK_CUDA(block_pairs_cuda(behind, stream));
        CHECK_CUDA(block_trees_cuda(trees, stream));
      });
      runs.push_back(std::string("{\"temperature\": ") + (temperature > 0.0f ? "1" : "0") +
                     ", \"sequences\": " + std::to_string(num_seqs) + ", \"floor_us\": " +
                     std::to_string(floor_us) + ", \"chain_us\": " + std::to_string(chain) +
                     ", \"chain_steps_us\": " + std::to_string(steps) +
                     ", \"chain_steps_one_way_us\": " + std::to_string(one_way) +
                     ", \"choice_without_pairs_us\": " + std::to_string(drawn_at_once) +
                     ", \"path_us\": " + std::to_string(best_path) +
                     ", \"path_without_candidates_us\": " + std::to_string(path_tail) +
                     ", \"path_with_successors_us\": " + std::to_string(successors_tail) +
                     ", \"tree_us\": " + std::to_string(tree) +
                     ", \"tree_pairs_and_nodes_us\": " + std::to_string(tail) + "}");
      std::printf(
          "temperature %.0f, %2d sequences: chain %7.1f us (%.2f x floor), its steps alone %7.1f, "
          "read the same way each time %7.1f; path of %d candidates %6.1f, without these %5.1f, "
          "then with successors %5.1f, choice without pairs %5.1f; tree of %d %6.1f, of which "
          "pairs and nodes %5.1f\n",
          temperature, num_seqs, chain, chain / floor_us, steps, one_way, kTopK, best_path,
          path_tail, successors_tail, drawn_at_once, kNodes, tree, tail);
    }
  }
  if (path != nullptr) write_json(path, "bench/kernels/cuda_token_pairs.cu", runs);
  return 0;
}
