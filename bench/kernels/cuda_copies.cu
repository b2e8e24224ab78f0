// Times what copies cost a step on CUDA: the lookup in the texts' own past, and in a full memory of
// recent answers; microseconds of one launch among kLaunches in a replayed graph, each overlapping
// the one before it (launch.cuh).
//
//   bench_cuda_copies [--json FILE]
//
// Every launch looks for other ends of texts, half of which stand in the memory, so what is read of
// it is seldom in a cache.

#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cuda_bench.h"
#include "kernels/drafts/copy_lookup.h"
#include "kernels/drafts/draft_memory.h"

namespace {

using namespace openspec;
using namespace openspec::bench;

constexpr int kLaunches = 32, kRepeats = 20;
constexpr int kSeqs[] = {1, 4, 16, 64};
constexpr int kMostSeqs = 64, kMaxDrafts = 15, kHistory = 4096;
constexpr uint64_t kOwner = 7;
constexpr size_t kMemoryBytes = size_t{64} << 20;
constexpr int kAnswer = 600;  // tokens

/// A memory that answers have filled, and texts of which every other one ends like a part of them.
struct Memory {
  explicit Memory(cudaStream_t stream) {
    constexpr uint32_t kCapacity = kMemoryBytes / DraftMemory::kTokenBytes;
    memory = {device_array<int32_t>(kCapacity), device_array<uint64_t>(kCapacity),
              device_array<uint32_t>(DraftMemory::kNumLengths * kCapacity), kCapacity};
    CHECK_CUDA(
        cudaMemset(memory.places, 0, DraftMemory::kNumLengths * kCapacity * sizeof(uint32_t)));
    std::mt19937 random(1);
    std::vector<int32_t> answers(kCapacity);
    std::generate(answers.begin(), answers.end(),
                  [&] { return static_cast<int>(random() % 151936); });
    const int32_t* tokens = device_copy(answers);
    for (uint32_t at = 0; at + kAnswer < kCapacity; at += kAnswer + 1) {
      CHECK_CUDA(remember_cuda({memory, at, kOwner, tokens + at, kAnswer}, stream));
    }
    CHECK_CUDA(cudaStreamSynchronize(stream));
    std::vector<int32_t> texts(size_t{kLaunches} * kMostSeqs * kHistory);
    std::generate(texts.begin(), texts.end(), [&] { return static_cast<int>(random() % 151936); });
    for (size_t text = 0; text < texts.size() / kHistory; text += 2) {
      const size_t answer = random() % (kCapacity / (kAnswer + 1) - 1);
      const auto from =
          answers.begin() + static_cast<ptrdiff_t>(answer * (kAnswer + 1) + random() % 500);
      std::copy(from, from + 32,
                texts.begin() + static_cast<ptrdiff_t>((text + 1) * kHistory - 32));
    }
    history = device_copy(texts);
  }

  DraftMemory memory;
  const int32_t* history;
};

/// What both lookups read and write.
struct Arrays {
  std::vector<int32_t> slots = [] {
    std::vector<int32_t> values(size_t{kLaunches} * kMostSeqs);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int32_t>(i);
    return values;
  }();
  const int32_t* seq = device_copy(slots);
  const int32_t* lengths = device_copy(std::vector<int32_t>(slots.size(), kHistory));
  const int32_t* wanted = device_copy(std::vector<int32_t>(slots.size(), kMaxDrafts));
  const uint64_t* owners = device_copy(std::vector<uint64_t>(slots.size(), kOwner));
  int32_t* drafts = device_array<int32_t>(size_t{kMostSeqs} * kMaxDrafts);
  int32_t* counts = device_array<int32_t>(kMostSeqs);
  int32_t* match_len = device_copy(std::vector<int32_t>(kMostSeqs, 0));
};

}  // namespace

int main(int argc, char** argv) {
  const char* path = json_path(argc, argv);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Memory memory(stream);
  const Arrays arrays;
  std::vector<std::string> runs;
  const auto time = [&](const char* op, int num_seqs, const auto& launch) {
    const double us = graph_us(stream, kRepeats,
                               [&] {
                                 for (int i = 0; i < kLaunches; ++i)
                                   CHECK_CUDA(launch(i * kMostSeqs));
                               }) /
                      kLaunches;
    std::printf("%-23s %3d sequences %7.2f us\n", op, num_seqs, us);
    char line[120];
    std::snprintf(line, sizeof line, "{\"op\": \"%s\", \"num_seqs\": %d, \"us\": %.2f}", op,
                  num_seqs, us);
    runs.push_back(line);
    return us;
  };
  for (const int num_seqs : kSeqs) {
    const auto look_up = [&](int first) {
      return copy_lookup_cuda({.tokens = memory.history,
                               .tokens_stride = kHistory,
                               .num_tokens = arrays.lengths,
                               .seq = arrays.seq + first,
                               .num_wanted = arrays.wanted,
                               .num_seqs = num_seqs,
                               .max_drafts = kMaxDrafts,
                               .min_match_len = kMinMatchLen,
                               .max_match_len = kMaxMatchLen,
                               .drafts = arrays.drafts,
                               .num_drafts = arrays.counts,
                               .match_len = arrays.match_len},
                              stream);
    };
    const double own = time("own texts", num_seqs, look_up);
    const double both = time("own texts and a memory", num_seqs, [&](int first) {
      CHECK_CUDA(look_up(first));
      return recall_cuda({.memory = memory.memory,
                          .history = memory.history,
                          .history_stride = kHistory,
                          .num_tokens = arrays.lengths,
                          .seq = arrays.seq + first,
                          .owners = arrays.owners,
                          .num_wanted = arrays.wanted,
                          .num_seqs = num_seqs,
                          .max_drafts = kMaxDrafts,
                          .drafts = arrays.drafts,
                          .num_drafts = arrays.counts,
                          .match_len = arrays.match_len},
                         stream);
    });
    std::printf("the memory of 64 MiB: %.2f us more\n", both - own);
  }
  int found = 0;
  std::vector<int32_t> lengths(kMostSeqs);
  CHECK_CUDA(cudaMemcpy(lengths.data(), arrays.match_len, kMostSeqs * sizeof(int32_t),
                        cudaMemcpyDeviceToHost));
  for (const int32_t length : lengths) found += length > 0;
  std::printf("%d of %d texts were found\n", found, kMostSeqs);
  if (path != nullptr) write_json(path, "bench/kernels/cuda_copies.cu", runs);
  return found > kMostSeqs / 4 ? 0 : 1;  // of equal hashes the last is known
}
