#include "kernels/drafts/token_pairs.h"

#include "cuda/draft_rows_device.h"
#include "kernels/token_pairs_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

NeedsDevice needs_device;

using Ids = std::vector<int32_t>;

/// A PairsCase's arrays on the device.
struct DevicePairs {
  explicit DevicePairs(const PairsCase& c)
      : table(c.table),
        seq(c.seq),
        first_sample(c.first_sample),
        num_drafts(c.num_drafts),
        chosen(c.chosen),
        tokens(c.tokens),
        first(c.first),
        second(c.second),
        token_of(c.token_of),
        column_of(c.column_of),
        logits(c.logits),
        factors(c.factors),
        scores(c.scores),
        sampling(c.sampling) {}
  template <typename Params>
  Params place(Params params) const {
    if constexpr (requires { params.table; }) params.table = table.view();
    params.seq = seq.as<int32_t>();
    params.first_sample = first_sample.as<int32_t>();
    params.pairs.first = first.data();
    params.pairs.second = second.data();
    if (params.pairs.column_of != nullptr) {
      params.pairs.token_of = token_of.as<int32_t>();
      params.pairs.column_of = column_of.as<int32_t>();
    }
    if constexpr (requires { params.scores; }) {
      params.tokens = tokens.as<int32_t>();
      params.scores = scores.as<float>();
      params.sampling = sampling.as<SamplingParams>();
      if (params.terms.factors != nullptr) {
        params.terms.factors = factors.data();
        params.terms.table = table.view();
      }
    }
    return params;
  }
  DeviceTableCopy table;
  DeviceBuffer seq, first_sample, num_drafts, chosen, tokens, first, second, token_of, column_of,
      logits, factors, scores, sampling;
};

struct Candidates {
  int num_seqs, vocab_size, rank, top_k;
};
constexpr Candidates kCandidates[] = {{1, 151936, 256, 64},
                                      {9, 700, 24, 16},
                                      {70, 1000, 136, 33},
                                      {9, 5000, 256, 50},
                                      {300, 333, 8, 1}};

}  // namespace

TEST(steps_are_as_exact_as_the_cpus) {
  Rng rng(1);
  ThreadPool pool(1);
  struct Case {
    int num_seqs, vocab_size, rank;
  };
  for (const Case& of : {Case{1, 151936, 256}, Case{3, 4096, 64}, Case{8, 5003, 256},
                         Case{70, 1000, 136}, Case{150, 333, 8}}) {
    const PairsCase c(rng, of.num_seqs, of.vocab_size, of.rank, 1);
    const DevicePairs device(c);
    for (const int depth : {0, 1, PairsCase::kMaxDepth - 1}) {
      std::vector<float> logits = c.logits;
      Ids sample(c.seq.size(), -9);
      BlockStepParams params = c.step(depth, logits, sample);
      block_step_cpu({.pool = &pool}, params);
      const DeviceBuffer device_logits(c.logits), device_sample(sample);
      params = device.place(params);
      params.num_drafts = device.num_drafts.as<int32_t>();
      params.chosen = device.chosen.as<int32_t>();
      params.logits = device_logits.as<float>();
      params.sample = device_sample.as<int32_t>();
      CHECK_CUDA(block_step_cuda(params, nullptr));
      CHECK(device_sample.download<int32_t>() == sample);
      const std::vector<float> found = device_logits.download<float>();
      for (size_t i = 0; i < found.size(); ++i) CHECK_NEAR(found[i], logits[i], 2e-5);
      CHECK(device_logits.guard_is_whole() && device_sample.guard_is_whole());
    }
  }
}

TEST(a_step_does_not_depend_on_other_sequences) {
  Rng rng(2);
  const PairsCase c(rng, 70, 1000, 256, 1);
  const DevicePairs device(c);
  Ids sample(c.seq.size());
  std::vector<float> logits = c.logits;
  BlockStepParams params = device.place(c.step(0, logits, sample));
  params.num_drafts = device.num_drafts.as<int32_t>();
  params.chosen = device.chosen.as<int32_t>();
  const auto run = [&](int first_seq, int num_seqs) {
    const DeviceBuffer device_logits(c.logits), device_sample(sample);
    BlockStepParams part = params;
    part.seq += first_seq;
    part.first_sample += first_seq;
    part.num_drafts += first_seq;
    part.num_seqs = num_seqs;
    part.logits = device_logits.as<float>();
    part.sample = device_sample.as<int32_t>();
    CHECK_CUDA(block_step_cuda(part, nullptr));
    return device_logits.download<float>();
  };
  const std::vector<float> together = run(0, 70);
  for (const int i : {0, 6, 65, 69}) {
    const auto at = static_cast<size_t>(i);
    if (c.num_drafts[at] == 0) continue;
    const std::vector<float> alone = run(i, 1);
    const auto first = c.first_sample[at] * c.vocab_size;
    CHECK(std::equal(alone.begin() + first, alone.begin() + first + c.vocab_size,
                     together.begin() + first));
  }
}

TEST(paths_match_the_cpu) {
  Rng rng(4);
  for (const Candidates& of : kCandidates) {
    const PairsCase c(rng, of.num_seqs, of.vocab_size, of.rank, of.top_k);
    const DevicePairs device(c);
    for (const bool are_weighed : {false, true}) {
      Ids chosen(static_cast<size_t>(c.num_samples), -1);
      BlockPathParams params = c.path(chosen);
      if (are_weighed) params.terms = c.terms();
      block_path_cpu({}, params);
      const DeviceBuffer device_chosen(chosen.size() * sizeof(int32_t));
      params = device.place(params);
      params.num_drafts = device.num_drafts.as<int32_t>();
      params.chosen = device_chosen.as<int32_t>();
      CHECK_CUDA(block_path_cuda(params, nullptr));
      CHECK(device_chosen.download<int32_t>() == chosen);
      CHECK(device_chosen.guard_is_whole());
    }
  }
}

TEST(paths_over_successors_match_the_cpu) {
  Rng rng(5);
  for (const Candidates& of : kCandidates) {
    for (const bool is_mapped : {false, true}) {
      if (is_mapped && of.vocab_size > 10000) continue;  // the CPU takes long over them
      const PairsCase c(rng, of.num_seqs, of.vocab_size, of.rank, of.top_k, is_mapped);
      const DevicePairs device(c);
      Ids chosen(static_cast<size_t>(c.num_samples), -1), successors = c.unknown_successors();
      BlockPathParams params = c.path(chosen, successors);
      block_path_cpu({}, params);
      // What the CPU needed it has found; other rows the device does not ask for.
      const DeviceBuffer device_chosen(chosen.size() * sizeof(int32_t)), found(successors);
      params = device.place(params);
      params.num_drafts = device.num_drafts.as<int32_t>();
      params.successors = found.as<int32_t>();
      params.logits = device.logits.as<float>();
      params.chosen = device_chosen.as<int32_t>();
      CHECK_CUDA(block_path_cuda(params, nullptr));
      CHECK(device_chosen.download<int32_t>() == chosen);
      CHECK(device_chosen.guard_is_whole() && found.guard_is_whole());
    }
  }
}

TEST(scores_of_pairs_match_the_cpu) {
  Rng rng(3);
  for (const Candidates& of : kCandidates) {
    const PairsCase c(rng, of.num_seqs, of.vocab_size, of.rank, of.top_k);
    const DevicePairs device(c);
    for (const bool are_weighed : {false, true}) {
      // What is not written keeps the device's poison.
      Ids ranks(c.num_pairs(), -1);
      std::vector<float> scores(c.num_pairs());
      std::fill_n(reinterpret_cast<uint32_t*>(scores.data()), scores.size(), 0xffffffffu);
      BlockPairsParams params = c.best(ranks, scores);
      if (are_weighed) params.terms = c.terms();
      block_pairs_cpu({}, params);
      const DeviceBuffer device_ranks(c.num_pairs() * sizeof(int32_t)),
          device_scores(c.num_pairs() * sizeof(float));
      params = device.place(params);
      params.num_depths = device.num_drafts.as<int32_t>();
      params.pair_ranks = device_ranks.as<int32_t>();
      params.pair_scores = device_scores.as<float>();
      CHECK_CUDA(block_pairs_cuda(params, nullptr));
      CHECK(device_ranks.download<int32_t>() == ranks);
      const std::vector<float> found = device_scores.download<float>();
      CHECK(std::memcmp(found.data(), scores.data(), scores.size() * sizeof(float)) == 0);
      CHECK(device_ranks.guard_is_whole() && device_scores.guard_is_whole());
    }
  }
}
