#include "kernels/drafts/token_pairs.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "kernels/choose/sample_math.h"
#include "kernels/drafts/draft_tree.h"
#include "kernels/token_pairs_testing.h"

using namespace openspec;
using namespace openspec::testing;

namespace {

using Ids = std::vector<int32_t>;

/// What candidate b of a position counts for behind a token, where the position weighs the terms.
double weighed_value(const PairsCase& c, size_t i, int depth, int before, size_t b) {
  const auto sample = static_cast<size_t>(c.first_sample[i] + depth);
  const size_t at = sample * static_cast<size_t>(c.top_k) + b;
  const SamplingParams& sampling = c.sampling[static_cast<size_t>(c.seq[i])];
  const double value = static_cast<double>(c.scores[at]) + c.worth_at(sample, before, c.tokens[at]);
  if (sampling.temperature == 0.0f) return value;
  const int position = c.table.num_tokens[static_cast<size_t>(c.seq[i])] + depth;
  const float noise = sample_math::gumbel(sampling.seed, position, c.tokens[at]);
  return value / static_cast<double>(sampling.temperature) + static_cast<double>(noise);
}

}  // namespace

TEST(a_step_adds_what_pairs_are_worth) {
  Rng rng(1);
  ThreadPool pool(2);
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (!has_isa(isa)) continue;
    force_isa(isa);
    for (const int rank : {8, 40, 256}) {
      const PairsCase c(rng, 5, 2077, rank, 1);
      for (const int depth : {0, 1, PairsCase::kMaxDepth - 1}) {
        std::vector<float> logits = c.logits;
        Ids sample(c.seq.size(), -9);
        block_step_cpu({.pool = &pool}, c.step(depth, logits, sample));
        std::vector<bool> is_changed(static_cast<size_t>(c.num_samples), false);
        for (size_t i = 0; i < c.seq.size(); ++i) {
          const int at = c.first_sample[i] + depth;
          CHECK_EQ(sample[i], depth < c.num_drafts[i] ? at : -1);
          if (sample[i] < 0) continue;
          is_changed[static_cast<size_t>(at)] = true;
          const int before = depth == 0 ? c.last_token(i) : c.chosen[static_cast<size_t>(at - 1)];
          for (int token = 0; token < c.vocab_size; ++token) {
            const auto column = static_cast<size_t>(at * c.vocab_size + token);
            CHECK_NEAR(logits[column], c.logits[column] + c.worth(before, token), 2e-5);
          }
        }
        for (size_t i = 0; i < logits.size(); ++i) {
          const size_t at = i / static_cast<size_t>(c.vocab_size);
          CHECK(is_changed[at] || logits[i] == c.logits[i]);
        }
      }
    }
  }
}

TEST(candidates_are_scored_behind_each_token_before) {
  Rng rng(2);
  for (const int top_k : {1, 4, kMaxTopDrafts}) {
    const PairsCase c(rng, 9, 300, 24, top_k);
    Ids ranks(c.num_pairs(), -7);
    std::vector<float> scores(c.num_pairs(), 7.0f);
    block_pairs_cpu({}, c.best(ranks, scores));
    const auto k = static_cast<size_t>(top_k);
    for (size_t i = 0; i < c.seq.size(); ++i) {
      const float temperature = c.sampling[static_cast<size_t>(c.seq[i])].temperature;
      for (int depth = 0; depth < c.num_drafts[i]; ++depth) {
        const auto sample = static_cast<size_t>(c.first_sample[i] + depth);
        for (size_t a = 0; a < k; ++a) {
          const size_t at = (sample * k + a) * k;
          if (depth == 0) {
            for (size_t b = 0; b < k; ++b) {
              CHECK_EQ(ranks[at + b], a == 0 ? static_cast<int>(b) : -7);
              CHECK_EQ(scores[at + b], a == 0 ? c.scores[sample * k + b] : 7.0f);
            }
            continue;
          }
          const int before = c.tokens[(sample - 1) * k + a];
          std::vector<double> values;
          double known = 0.0, total = 0.0;
          for (size_t b = 0; b < k; ++b) {
            const double score = static_cast<double>(c.scores[sample * k + b]);
            values.push_back(score + c.worth(before, c.tokens[sample * k + b]) /
                                         (temperature == 0.0f ? 1.0 : temperature));
            known += std::exp(score);
            total += std::exp(values.back());
          }
          total += 1.0 - known;
          std::vector<bool> is_there(k, false);
          for (size_t b = 0; b < k; ++b) {
            const auto candidate = static_cast<size_t>(ranks[at + b]);
            CHECK(candidate < k && !is_there[candidate]);
            is_there[candidate] = true;
            const double expected = std::min(0.0, values[candidate] - std::log(total));
            if (std::isinf(values[candidate])) {
              CHECK(std::isinf(scores[at + b]) && scores[at + b] < 0.0f);
            } else {
              CHECK_NEAR(scores[at + b], expected, 1e-4);
            }
            CHECK(b == 0 || scores[at + b] <= scores[at + b - 1]);
          }
        }
      }
    }
  }
}

TEST(a_path_takes_the_best_candidate_behind_each_draft) {
  Rng rng(3);
  int num_others = 0;  // drafts that are not their position's own best
  for (const int top_k : {1, 5, kMaxTopDrafts}) {
    const PairsCase c(rng, 9, 300, 24, top_k);
    Ids chosen(static_cast<size_t>(c.num_samples), -7);
    block_path_cpu({}, c.path(chosen));
    const auto k = static_cast<size_t>(top_k);
    for (size_t i = 0; i < c.seq.size(); ++i) {
      const float temperature = c.sampling[static_cast<size_t>(c.seq[i])].temperature;
      int before = -1;
      for (int depth = 0; depth < c.num_drafts[i]; ++depth) {
        const auto sample = static_cast<size_t>(c.first_sample[i] + depth);
        if (depth == 0) {
          before = c.tokens[sample * k];
          CHECK_EQ(chosen[sample], before);
          continue;
        }
        const auto value = [&](int token, double score) {
          return score + c.worth(before, token) / (temperature == 0.0f ? 1.0 : temperature);
        };
        const int found = chosen[sample];
        double best = -std::numeric_limits<double>::infinity(), own = best;
        for (size_t b = 0; b < k; ++b) {
          const int token = c.tokens[sample * k + b];
          const double here = value(token, static_cast<double>(c.scores[sample * k + b]));
          best = std::max(best, here);
          if (token == found) own = std::max(own, here);
        }
        CHECK_NEAR(own, best, 1e-4);
        num_others += found != c.tokens[sample * k];
        before = found;
      }
    }
  }
  CHECK(num_others > 0);
}

TEST(weighed_pairs_and_noise_choose_among_the_candidates_alone) {
  Rng rng(5);
  const double none = -std::numeric_limits<double>::infinity();
  for (const int top_k : {1, 4, 16}) {
    const PairsCase c(rng, 9, 300, 24, top_k);
    const auto k = static_cast<size_t>(top_k);
    Ids chosen(static_cast<size_t>(c.num_samples), -7), ranks(c.num_pairs(), -7);
    std::vector<float> scores(c.num_pairs(), 7.0f);
    BlockPathParams path = c.path(chosen);
    BlockPairsParams best = c.best(ranks, scores);
    path.terms = best.terms = c.terms();
    block_path_cpu({}, path);
    block_pairs_cpu({}, best);
    for (size_t i = 0; i < c.seq.size(); ++i) {
      int before = c.last_token(i);
      for (int depth = 0; depth < c.num_drafts[i]; ++depth) {
        const auto sample = static_cast<size_t>(c.first_sample[i] + depth);
        double highest = none, found = none;
        for (size_t b = 0; b < k; ++b) {
          const double value = weighed_value(c, i, depth, before, b);
          highest = std::max(highest, value);
          if (c.tokens[sample * k + b] == chosen[sample]) found = std::max(found, value);
        }
        CHECK_NEAR(found, highest, 1e-4);
        before = chosen[sample];

        for (size_t a = 0; a < (depth == 0 ? 1 : k); ++a) {
          const int behind = depth == 0 ? c.last_token(i) : c.tokens[(sample - 1) * k + a];
          double total = 0.0;
          for (size_t b = 0; b < k; ++b) total += std::exp(weighed_value(c, i, depth, behind, b));
          for (size_t b = 0; b < k; ++b) {
            const size_t at = (sample * k + a) * k + b;
            const auto candidate = static_cast<size_t>(ranks[at]);
            const double value = weighed_value(c, i, depth, behind, candidate);
            if (std::isinf(value)) {
              CHECK(std::isinf(scores[at]));
            } else {
              CHECK_NEAR(scores[at], std::min(0.0, value - std::log(total)), 2e-4);
            }
            CHECK(b == 0 || scores[at] <= scores[at - 1]);
          }
        }
      }
    }
  }
}

TEST(tables_that_cannot_be_read_are_refused) {
  ThreadPool pool(1);
  for (const int rank : {0, 12, kMaxPairRank + 8}) {
    BlockStepParams params;
    params.pairs.rank = rank;
    CHECK_THROWS(block_step_cpu({.pool = &pool}, params), EngineError, "rank");
  }
}

TEST(a_path_takes_the_best_successor_where_it_beats_all_candidates) {
  Rng rng(7);
  int num_others = 0;  // drafts that are no candidates
  for (const bool is_mapped : {false, true}) {
    for (const int top_k : {1, 16}) {
      const PairsCase c(rng, 9, 301, 24, top_k, is_mapped);
      Ids chosen(static_cast<size_t>(c.num_samples), -7), successors = c.unknown_successors();
      block_path_cpu({}, c.path(chosen, successors));
      const auto k = static_cast<size_t>(top_k);
      for (size_t i = 0; i < c.seq.size(); ++i) {
        const auto slot = static_cast<size_t>(c.seq[i]);
        const SamplingParams& sampling = c.sampling[slot];
        const double temperature = sampling.temperature;
        const double scale = temperature == 0.0 ? 1.0 : 1.0 / temperature;
        for (int depth = 1; depth < c.num_drafts[i]; ++depth) {
          const auto sample = static_cast<size_t>(c.first_sample[i] + depth);
          const int before = chosen[sample - 1];
          const auto* behind = &successors[static_cast<size_t>(before * kNumSuccessors)];
          // They are those that are worth most, best first.
          std::vector<double> worths;
          for (int column = 0; column < c.vocab_size; ++column) {
            worths.push_back(c.worth(before, c.token_at(column)));
          }
          std::ranges::sort(worths, std::greater{});
          for (size_t rank = 0; rank < kNumSuccessors; ++rank) {
            CHECK_NEAR(c.worth(before, behind[rank]), worths[rank], 1e-5);
          }
          const auto alone = [&](int token) {
            const auto column = static_cast<size_t>(c.column_at(token));
            const double logit = c.logits[sample * static_cast<size_t>(c.vocab_size) + column];
            const int position = c.table.num_tokens[slot] + depth;
            return logit * scale +
                   (temperature == 0.0
                        ? 0.0
                        : static_cast<double>(sample_math::gumbel(sampling.seed, position, token)));
          };
          const int found = chosen[sample];
          double best = -std::numeric_limits<double>::infinity(), own = best;
          const auto offer = [&](int token, double score) {
            const double value = score + c.worth(before, token) * scale;
            best = std::max(best, value);
            if (token == found) own = std::max(own, value);
          };
          bool is_candidate = false;
          for (size_t b = 0; b < k; ++b) {
            const int token = c.tokens[sample * k + b];
            is_candidate = is_candidate || token == found;
            offer(token, static_cast<double>(c.scores[sample * k + b]));
          }
          const double first = alone(c.tokens[sample * k]);
          for (int rank = 0; rank < kNumSuccessors; ++rank) {
            const double score = static_cast<double>(c.scores[sample * k]);
            offer(behind[rank], std::min(0.0, alone(behind[rank]) - first + score));
          }
          CHECK_NEAR(own, best, 1e-4);
          num_others += !is_candidate;
        }
      }
    }
  }
  CHECK(num_others > 0);
}
