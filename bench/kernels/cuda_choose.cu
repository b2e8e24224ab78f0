// Times `choose` on CUDA at the vocabulary of Qwen3, and for drafts of a head's smaller one too,
// beside `top_drafts`: microseconds of one call (two kernels) among kCalls in a replayed graph.
//
//   bench_cuda_choose [--json FILE]
//
// Up to some 64 rows the logits come from L2, as behind the product that makes them. It does not
// show rows that want different things in one call: these take as long as the slowest kind alone,
// or less.

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cuda_bench.h"
#include "kernels/choose/choose.h"
#include "kernels/drafts/draft_tree.h"

namespace {

using namespace openspec;
using namespace openspec::bench;

constexpr int kCalls = 20;
constexpr int kRepeats = 15;
constexpr int kRows[] = {1, 4, 16, 64, 256};
constexpr int kMaxRows = 256;
constexpr int kVocab = 151936;
constexpr int kHistory = 1000;
constexpr int kDraftVocab = 32000;
constexpr int kDraftVocabs[] = {kDraftVocab, kVocab};
constexpr int kTopK = 4;  // best drafts of a row

/// A few bell-shaped rows with some outstanding tokens, over and over.
float* make_logits() {
  constexpr int kDistinct = 8;
  std::minstd_rand engine(1);
  std::normal_distribution<float> normal(0.0f, 2.5f);
  std::vector<float> rows(static_cast<size_t>(kDistinct) * kVocab);
  for (float& logit : rows) logit = normal(engine);
  for (int row = 0; row < kDistinct; ++row) {
    for (int i = 0; i < 30; ++i) {
      rows[static_cast<size_t>(row) * kVocab + engine() % kVocab] = 18.0f - 0.3f * i;
    }
  }
  float* logits = device_array<float>(static_cast<size_t>(kMaxRows) * kVocab);
  for (int row = 0; row < kMaxRows; row += kDistinct) {
    CHECK_CUDA(cudaMemcpy(logits + static_cast<size_t>(row) * kVocab, rows.data(),
                          rows.size() * sizeof(float), cudaMemcpyHostToDevice));
  }
  return logits;
}

/// Every row is a sequence of its own.
ChooseParams make_inputs() {
  std::vector<int32_t> index(kMaxRows), tokens(static_cast<size_t>(kMaxRows) * kHistory);
  std::minstd_rand engine(2);
  for (int i = 0; i < kMaxRows; ++i) index[i] = i;
  for (int32_t& token : tokens) token = static_cast<int32_t>(engine() % kVocab);
  const int32_t* identity = device_copy(index);
  ChooseParams params;
  params.rows.num_rows = kMaxRows;
  params.rows.num_spans = kMaxRows;
  params.rows.row_token = identity;
  params.rows.row_position = device_copy(std::vector<int32_t>(kMaxRows, kHistory - 1));
  params.rows.row_span = identity;
  params.rows.row_parent = device_copy(std::vector<int32_t>(kMaxRows, -1));
  params.rows.span_seq = identity;
  params.sample_row = identity;
  params.logits = make_logits();
  params.vocab_size = kVocab;
  params.tokens = device_copy(tokens);
  params.tokens_stride = kHistory;
  params.num_tokens = device_copy(std::vector<int32_t>(kMaxRows, kHistory));
  params.prompt_len = device_copy(std::vector<int32_t>(kMaxRows, kHistory / 2));
  params.chosen = device_array<int32_t>(kMaxRows);
  void* logprobs = nullptr;
  CHECK_CUDA(cudaMallocHost(&logprobs, kMaxRows * (1 + kMaxLogprobs) * sizeof(float)));
  params.logprobs = static_cast<float*>(logprobs);
  params.logprob_ids = device_array<int32_t>(kMaxRows * (1 + kMaxLogprobs));
  params.ranks = device_array<int32_t>(kMaxRows);
  params.workspace = device_array<float>(choose_workspace_bytes_cuda(kMaxRows, kVocab) / 4);
  return params;
}

/// A draft behind every row, of a drafter that knows some of the tokens. Nearly all are rejected,
/// which takes longest.
DrawnDrafts make_drafts() {
  std::minstd_rand engine(3);
  std::normal_distribution<float> normal(0.0f, 2.5f);
  std::vector<int32_t> index(kMaxRows), token_of(kDraftVocab), column_of(kVocab, -1);
  for (int i = 0; i < kMaxRows; ++i) index[i] = i;
  for (int i = 0; i < kDraftVocab; ++i) column_of[token_of[i] = i / 8 * 37 + i % 8] = i;
  std::vector<float> logits(static_cast<size_t>(kMaxRows) * kDraftVocab);
  for (float& logit : logits) logit = normal(engine);
  std::vector<int32_t> tokens(kMaxRows);
  for (int32_t& token : tokens) token = token_of[engine() % kDraftVocab];
  DrawnDrafts drafts;
  drafts.tokens = device_copy(tokens);
  drafts.counts = device_copy(std::vector<int32_t>(kMaxRows, 1));
  drafts.max_drafts = 1;
  drafts.logits.values = device_copy(logits);
  drafts.logits.row_stride = kDraftVocab;
  drafts.logits.row = device_copy(index);
  drafts.logits.vocab_size = kDraftVocab;
  drafts.logits.column_of = device_copy(column_of);
  return drafts;
}

struct Kind {
  const char* name;
  SamplingParams sampling;
  bool has_drafts = false;
};

std::vector<Kind> make_kinds() {
  std::vector<Kind> kinds(9);
  kinds[0].name = "greedy";
  kinds[1].name = "sampled";
  kinds[1].sampling.temperature = 1.0f;
  kinds[2].name = "top_k_top_p";  // what Qwen3 recommends
  kinds[2].sampling.temperature = 0.6f;
  kinds[2].sampling.top_k = 20;
  kinds[2].sampling.top_p = 0.95f;
  kinds[3].name = "top_p";
  kinds[3].sampling.temperature = 1.0f;
  kinds[3].sampling.top_p = 0.9f;
  kinds[4].name = "penalties";
  kinds[4].sampling.repetition_penalty = 1.1f;
  kinds[4].sampling.presence_penalty = 0.5f;
  kinds[5].name = "logprobs_5";
  kinds[5].sampling.num_logprobs = 5;
  kinds[6].name = "flat_top_p";  // more than fits a list of candidates: passes over the row
  kinds[6].sampling.temperature = 20.0f;
  kinds[6].sampling.top_p = 0.9f;
  kinds[7] = {"rejection", kinds[1].sampling, true};
  kinds[8] = {"rejection_top_k_top_p", kinds[2].sampling, true};
  return kinds;
}

struct Run {
  const char* op;
  const char* kind;
  int vocab_size, num_rows;
  double us;

  std::string json() const {
    char line[160];
    std::snprintf(line, sizeof line,
                  "{\"op\": \"%s\", \"kind\": \"%s\", \"vocab_size\": %d, \"rows\": %d, "
                  "\"us\": %.2f}",
                  op, kind, vocab_size, num_rows, us);
    return line;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const char* path = json_path(argc, argv);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ChooseParams params = make_inputs();
  SamplingParams* sampling = device_array<SamplingParams>(kMaxRows);
  params.sampling = sampling;
  int32_t* best = device_array<int32_t>(kMaxRows * kTopK);
  float* scores = device_array<float>(kMaxRows * kTopK);
  const DrawnDrafts drawn = make_drafts();
  std::vector<std::string> runs;
  for (const Kind& kind : make_kinds()) {
    std::vector<SamplingParams> by_slot(kMaxRows, kind.sampling);
    for (int i = 0; i < kMaxRows; ++i) by_slot[i].seed = static_cast<uint64_t>(i);
    CHECK_CUDA(cudaMemcpy(sampling, by_slot.data(), by_slot.size() * sizeof(SamplingParams),
                          cudaMemcpyHostToDevice));
    params.drafts = kind.has_drafts ? drawn : DrawnDrafts{};
    const auto measure = [&](const char* op, int vocab_size, const auto& call) {
      std::printf("%-10s %6d %-21s", op, vocab_size, kind.name);
      for (const int num_rows : kRows) {
        const double us = graph_us(stream, kRepeats,
                                   [&] {
                                     for (int i = 0; i < kCalls; ++i) CHECK_CUDA(call(num_rows));
                                   }) /
                          kCalls;
        runs.push_back(Run{op, kind.name, vocab_size, num_rows, us}.json());
        std::printf("  %3d rows %7.2f us", num_rows, us);
      }
      std::printf("\n");
    };
    measure("choose", kVocab, [&](int num_rows) {
      params.num_samples = num_rows;
      return choose_cuda(params, stream);
    });
    // Penalties and log-probabilities do not count for drafts.
    const bool is_for_drafts =
        kind.sampling.num_logprobs < 0 && kind.sampling.presence_penalty == 0.0f;
    if (kind.has_drafts || !is_for_drafts) continue;
    for (const int vocab_size : kDraftVocabs) {
      measure("drafts", vocab_size, [&](int num_rows) {
        ChooseParams drafts = params;
        drafts.is_draft = true;
        drafts.num_samples = num_rows;
        drafts.vocab_size = vocab_size;
        return choose_cuda(drafts, stream);
      });
      measure("top_drafts", vocab_size, [&](int num_rows) {
        return top_drafts_cuda({.rows = params.rows,
                                .sample_row = params.sample_row,
                                .num_samples = num_rows,
                                .logits = params.logits,
                                .vocab_size = vocab_size,
                                .sampling = params.sampling,
                                .top_k = kTopK,
                                .tokens = best,
                                .scores = scores,
                                .workspace = params.workspace},
                               stream);
      });
    }
  }
  if (path != nullptr) write_json(path, "bench/kernels/cuda_choose.cu", runs);
  return 0;
}
