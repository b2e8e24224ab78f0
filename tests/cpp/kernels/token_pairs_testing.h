#pragma once

/// What the tests of pairs of tokens share, on the CPU and on CUDA.

#include <algorithm>
#include <limits>

#include "kernels/draft_rows_testing.h"
#include "kernels/drafts/token_pairs.h"

namespace openspec::testing {

/// Blocks of drafts in which pairs count; those of some sequences are empty.
struct PairsCase {
  /// With `is_mapped` logits are for some of the tokens: those of odd numbers.
  PairsCase(Rng& rng, int num_seqs, int vocab_size, int rank, int top_k, bool is_mapped = false)
      : vocab_size(vocab_size),
        num_tokens(is_mapped ? 2 * vocab_size : vocab_size),
        rank(rank),
        top_k(top_k),
        table(num_seqs, 32, 4),
        sampling(static_cast<size_t>(num_seqs)) {
    for (int i = 0; i < num_seqs; ++i) {
      table.set(i, {rng.integer(0, num_tokens - 1), rng.integer(0, num_tokens - 1)});
      sampling[static_cast<size_t>(i)].temperature =
          i % 3 == 0 ? 0.0f : 0.5f * static_cast<float>(i % 7);
      seq.push_back((i * 5 + 2) % num_seqs);
      first_sample.push_back(num_samples);
      num_drafts.push_back(num_seqs > 1 && i % 4 == 3 ? 0 : rng.integer(1, kMaxDepth));
      num_samples += num_drafts.back();
    }
    const auto width = static_cast<size_t>(rank);
    for (float x : rng.normals(static_cast<size_t>(num_tokens) * width)) {
      first.push_back(to_bf16(x));
    }
    for (float x : rng.normals(static_cast<size_t>(vocab_size) * width, 0.3f)) {
      second.push_back(to_bf16(x));
    }
    for (int token = 0; is_mapped && token < num_tokens; ++token) {
      if (token % 2 != 0) token_of.push_back(token);
      column_of.push_back(token % 2 == 0 ? -1 : token / 2);
    }
    logits = rng.normals(static_cast<size_t>(num_samples) * static_cast<size_t>(vocab_size), 3.0f);
    for (int sample = 0; sample < num_samples; ++sample) {
      chosen.push_back(token_at(rng.integer(0, vocab_size - 1)));
      float score = 0.0f;
      for (int k = 0; k < top_k; ++k) {
        // Distinct ones, falling in score; some are missing.
        tokens.push_back(token_at((column_at(chosen.back()) + 7 * k) % vocab_size));
        score -= 0.1f + 0.2f * static_cast<float>(rng.integer(0, 9)) + (k == 0 ? 0.5f : 1.5f);
        if (k > 2 && rng.integer(0, 5) == 0) score = -std::numeric_limits<float>::infinity();
        scores.push_back(score);
      }
    }
    const auto num_factors = static_cast<size_t>(num_samples) * static_cast<size_t>(rank);
    for (float x : rng.normals(num_factors)) factors.push_back(to_bf16(x));
    for (size_t i = 0; i < sampling.size(); ++i) sampling[i].seed = 1000 + i;
  }

  int token_at(int column) const { return num_tokens == vocab_size ? column : 2 * column + 1; }
  int column_at(int token) const { return num_tokens == vocab_size ? token : token / 2; }
  TokenPairs pairs() const {
    const bool is_mapped = num_tokens > vocab_size;
    return {first.data(),
            second.data(),
            vocab_size,
            rank,
            is_mapped ? token_of.data() : nullptr,
            is_mapped ? column_of.data() : nullptr};
  }
  BlockStepParams step(int depth, std::vector<float>& out, std::vector<int32_t>& sample) const {
    return {.table = table.view(),
            .seq = seq.data(),
            .first_sample = first_sample.data(),
            .num_drafts = num_drafts.data(),
            .num_seqs = static_cast<int>(seq.size()),
            .depth = depth,
            .chosen = chosen.data(),
            .pairs = pairs(),
            .logits = out.data(),
            .sample = sample.data()};
  }
  /// Of positions that weigh the pairs' terms.
  PairTerms terms() const { return {factors.data(), DType::kBF16, table.view()}; }
  BlockPathParams path(std::vector<int32_t>& found) const {
    return {.seq = seq.data(),
            .first_sample = first_sample.data(),
            .num_drafts = num_drafts.data(),
            .num_seqs = static_cast<int>(seq.size()),
            .top_k = top_k,
            .tokens = tokens.data(),
            .scores = scores.data(),
            .sampling = sampling.data(),
            .pairs = pairs(),
            .chosen = found.data()};
  }
  BlockPairsParams best(std::vector<int32_t>& ranks, std::vector<float>& found) const {
    return {.seq = seq.data(),
            .first_sample = first_sample.data(),
            .num_depths = num_drafts.data(),
            .num_seqs = static_cast<int>(seq.size()),
            .max_depth = kMaxDepth,
            .top_k = top_k,
            .tokens = tokens.data(),
            .scores = scores.data(),
            .sampling = sampling.data(),
            .pairs = pairs(),
            .pair_ranks = ranks.data(),
            .pair_scores = found.data()};
  }
  size_t num_pairs() const { return tokens.size() * static_cast<size_t>(top_k); }
  /// A path that chooses among successors, too, which `successors` holds or will.
  BlockPathParams path(std::vector<int32_t>& found, std::vector<int32_t>& successors) const {
    BlockPathParams params = path(found);
    params.successors = successors.data();
    params.logits = logits.data();
    params.table = table.view();
    return params;
  }
  std::vector<int32_t> unknown_successors() const {
    return std::vector<int32_t>(static_cast<size_t>(num_tokens) * kNumSuccessors, -1);
  }
  /// What token b behind token a is worth.
  double worth(int a, int token) const {
    const int b = column_at(token);
    double sum = 0.0;
    for (int k = 0; k < rank; ++k) {
      sum += static_cast<double>(from_bf16(first[static_cast<size_t>(a * rank + k)])) *
             static_cast<double>(from_bf16(second[static_cast<size_t>(b * rank + k)]));
    }
    return sum;
  }
  /// The same at a sample that weighs the terms.
  double worth_at(size_t sample, int a, int token) const {
    const int b = column_at(token);
    double sum = 0.0;
    for (size_t k = 0; k < static_cast<size_t>(rank); ++k) {
      const float factor = from_bf16(factors[sample * static_cast<size_t>(rank) + k]);
      const float weighed = from_bf16(first[static_cast<size_t>(a * rank) + k]) * factor;
      sum += static_cast<double>(from_bf16(to_bf16(weighed))) *
             static_cast<double>(from_bf16(second[static_cast<size_t>(b * rank) + k]));
    }
    return sum;
  }
  int last_token(size_t i) const {
    const int slot = seq[i];
    return table.tokens[static_cast<size_t>(slot * table.stride +
                                            table.num_tokens[static_cast<size_t>(slot)] - 1)];
  }

  static constexpr int kMaxDepth = 5;
  int vocab_size, num_tokens, rank, top_k, num_samples = 0;
  DraftTable table;
  std::vector<SamplingParams> sampling;
  std::vector<int32_t> seq, first_sample, num_drafts, chosen, tokens, token_of, column_of;
  std::vector<uint16_t> first, second, factors;
  std::vector<float> logits, scores;
};

}  // namespace openspec::testing
