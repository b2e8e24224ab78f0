#include "kernels/choose/sample_math.h"
#include "kernels/choose/vocab_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/drafts/draft_tree.h"
#include "kernels/drafts/token_pairs.h"
#include "kernels/isa_cpu.h"

namespace openspec::OPENSPEC_ISA {

namespace {

namespace sm = ::openspec::sample_math;

/// The state of a token, padded with zeros to whole vectors.
struct State {
  float values[kMaxPairRank] = {};
};

/// The sums of the products of kLanes rows with a state.
OPENSPEC_INLINE Vf products(const uint16_t* rows, const State& state, int rank) {
  Vf sums[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const uint16_t* row = rows + int64_t{i} * rank;
    Vf sum{};
    int k = 0;
    for (; k + kLanes <= rank; k += kLanes) {
      float values[kLanes];
      bf16_to_float(row + k, values, kLanes);
      sum = fma(load(values), load(state.values + k), sum);
    }
    if (k < rank) {
      float values[kLanes] = {};
      bf16_to_float(row + k, values, rank - k);
      sum = fma(load(values), load(state.values + k), sum);
    }
    sums[i] = sum;
  }
  transpose(sums);
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) sums[i] += sums[i + step];
  }
  return sums[0];
}

}  // namespace

void block_step(const ExecContext& exec, const BlockStepParams& params) {
  const TokenPairs& pairs = params.pairs;
  for (int i = 0; i < params.num_seqs; ++i) {
    params.sample[i] = -1;
    if (params.depth >= params.num_drafts[i]) continue;
    const int sample = params.first_sample[i] + params.depth;
    params.sample[i] = sample;
    const uint16_t* from;
    if (params.states != nullptr) {
      from = row_of(params.states, i, pairs.rank);
    } else {
      const int32_t before =
          params.depth > 0 ? params.chosen[sample - 1] : last_token(params.table, params.seq[i]);
      from = row_of(pairs.first, before, pairs.rank);
    }
    State state;
    bf16_to_float(from, state.values, pairs.rank);
    float* logits = params.logits + int64_t{sample} * pairs.vocab_size;
    constexpr int64_t kColumns = 1024;  // of a task, a multiple of every kLanes
    exec.pool->parallel_for(ceil_div(pairs.vocab_size, kColumns), [&](int64_t task) {
      const int64_t end = min_of<int64_t>(pairs.vocab_size, (task + 1) * kColumns);
      int64_t column = task * kColumns;
      for (; column + kLanes <= end; column += kLanes) {
        const Vf gained = products(row_of(pairs.second, column, pairs.rank), state, pairs.rank);
        store(logits + column, load(logits + column) + gained);
      }
      for (; column < end; ++column) {
        const uint16_t* row = row_of(pairs.second, column, pairs.rank);
        float sum = 0.0f;
        for (int k = 0; k < pairs.rank; ++k) sum += bf16_to_float(row[k]) * state.values[k];
        logits[column] += sum;
      }
    });
  }
}

namespace {

/// The first token's side of the pairs at one sample.
void load_first(const TokenPairs& pairs, const PairTerms& terms, int64_t sample, int32_t token,
                State* state) {
  bf16_to_float(row_of(pairs.first, token, pairs.rank), state->values, pairs.rank);
  if (terms.factors == nullptr) return;
  for (int k = 0; k < pairs.rank; ++k) {
    const int64_t at = sample * pairs.rank + k;
    if (terms.dtype == DType::kF32) {
      state->values[k] *= static_cast<const float*>(terms.factors)[at];
    } else {
      const float factor = bf16_to_float(static_cast<const uint16_t*>(terms.factors)[at]);
      state->values[k] = round_to_bf16(state->values[k] * factor);
    }
  }
}

/// What a pair is worth, as a warp of a GPU adds it up: eight terms to a lane, then by halves. On a
/// GPU products are of bf16 and exact, so only the order of the additions counts.
float worth_of(const State& first, const uint16_t* second, int rank) {
  constexpr int kParts = 32, kTerms = 8;
  float sums[kParts] = {};
  for (int part = 0; part * kTerms < rank; ++part) {
    for (int k = part * kTerms; k < (part + 1) * kTerms; ++k) {
      sums[part] += first.values[k] * bf16_to_float(second[k]);
    }
  }
  for (int step = kParts / 2; step > 0; step /= 2) {
    for (int part = 0; part < step; ++part) sums[part] += sums[part + step];
  }
  return sums[0];
}

/// What candidates of one position count for after one token.
template <typename Params>
class Candidates {
 public:
  Candidates(const Params& params, int seq, int depth)
      : params_(params),
        sample_(int64_t{params.first_sample[seq]} + depth),
        slot_(params.seq[seq]),
        sampling_(params.sampling[slot_]),
        scale_(pair_scale(sampling_)) {
    if (params.terms.factors == nullptr) return;
    position_ = params.terms.table.num_tokens[slot_] + depth;
    has_noise_ = sampling_.temperature >= kMinTemperature;
  }

  /// Candidate b, `first` being the token before.
  float value(const State& first, int b) const {
    const TokenPairs& pairs = params_.pairs;
    const int64_t at = sample_ * params_.top_k + b;
    const int32_t token = params_.tokens[at];
    const float worth = worth_of(first, second_row(pairs, token), pairs.rank);
    if (params_.terms.factors == nullptr) {
      return sm::sanitize(params_.scores[at] + worth * scale_);
    }
    const float value = (params_.scores[at] + worth) * scale_;
    const float noise = has_noise_ ? sm::gumbel(sampling_.seed, position_, token) : 0.0f;
    return sm::sanitize(value + noise);
  }
  int64_t sample() const { return sample_; }

 private:
  const Params& params_;
  const int64_t sample_;
  const int slot_;
  const SamplingParams& sampling_;
  const float scale_;
  int32_t position_ = 0;
  bool has_noise_ = false;
};

/// The candidates of one position after the token in place `before` of those before it.
void score_behind(const BlockPairsParams& params, int seq, int depth, int before, int32_t token) {
  const int top_k = params.top_k;
  const Candidates<BlockPairsParams> candidates(params, seq, depth);
  const int64_t sample = candidates.sample();
  const bool has_others = params.terms.factors == nullptr;
  State first;
  load_first(params.pairs, params.terms, sample, token, &first);
  float values[kMaxTopDrafts];
  float maximum = has_others ? 0.0f : kMinusInfinity;
  uint64_t known = 0;  // mass of the candidates without a pair
  for (int b = 0; b < top_k; ++b) {
    values[b] = candidates.value(first, b);
    maximum = max_of(maximum, values[b]);
    if (has_others) known += sm::fixed_mass(sm::exp_f32(params.scores[sample * top_k + b]));
  }
  if (maximum == kMinusInfinity) maximum = 0.0f;
  uint64_t total = 0;
  if (has_others) {
    const float others = max_of(0.0f, 1.0f - sm::mass_to_float(known));
    total = sm::fixed_mass(others * sm::exp_f32(-maximum));
  }
  for (int b = 0; b < top_k; ++b) total += sm::fixed_mass(sm::exp_f32(values[b] - maximum));
  const float log_total = total == 0 ? 0.0f : sm::log_f32(sm::mass_to_float(total));
  const int64_t to = (sample * top_k + before) * top_k;
  for (int b = 0; b < top_k; ++b) {
    int rank = 0;
    for (int other = 0; other < top_k; ++other) {
      rank += values[other] > values[b] || (values[other] == values[b] && other < b) ? 1 : 0;
    }
    params.pair_ranks[to + rank] = b;
    params.pair_scores[to + rank] = values[b] > kMinusInfinity
                                        ? min_of(0.0f, (values[b] - maximum) - log_total)
                                        : kMinusInfinity;
  }
}

}  // namespace

namespace {

/// The tokens that are worth most after one, of equal ones the lower column first.
void find_successors(const TokenPairs& pairs, int32_t token, int32_t* out) {
  State first;
  bf16_to_float(row_of(pairs.first, token, pairs.rank), first.values, pairs.rank);
  Best best(kNumSuccessors);
  int32_t column = 0;
  for (; column + kLanes <= pairs.vocab_size; column += kLanes) {
    float worth[kLanes];
    store(worth, products(row_of(pairs.second, column, pairs.rank), first, pairs.rank));
    for (int i = 0; i < kLanes; ++i) best.add(column + i, worth[i]);
  }
  for (; column < pairs.vocab_size; ++column) {
    best.add(column, worth_of(first, row_of(pairs.second, column, pairs.rank), pairs.rank));
  }
  best.fill(pairs.vocab_size);
  for (int i = 0; i < kNumSuccessors; ++i) {
    out[i] = pairs.token_of == nullptr ? best.id(i) : pairs.token_of[best.id(i)];
  }
}

/// What tokens that need be no candidates count for by themselves at one sample of a path: what
/// they would as candidates.
class Loners {
 public:
  Loners(const BlockPathParams& params, int seq, int depth)
      : pairs_(params.pairs),
        sampling_(params.sampling[params.seq[seq]]),
        scale_(pair_scale(sampling_)),
        position_(params.table.num_tokens[params.seq[seq]] + depth) {
    const int64_t sample = int64_t{params.first_sample[seq]} + depth;
    logits_ = params.logits + sample * pairs_.vocab_size;
    best_value_ = value(params.tokens[sample * params.top_k]);
    best_score_ = params.scores[sample * params.top_k];
  }
  float score(int32_t token) const {
    const float alone = value(token);
    return alone > kMinusInfinity ? min_of(0.0f, (alone - best_value_) + best_score_) : alone;
  }

 private:
  float value(int32_t token) const {
    const float value = sm::sanitize(logits_[column_of(pairs_, token)] * scale_);
    if (sampling_.temperature < kMinTemperature) return value;
    return value + sm::gumbel(sampling_.seed, position_, token);
  }

  const TokenPairs& pairs_;
  const SamplingParams& sampling_;
  const float scale_;
  const int32_t position_;
  const float* logits_;
  float best_value_ = 0.0f, best_score_ = 0.0f;
};

}  // namespace

void block_path(const ExecContext&, const BlockPathParams& params) {
  for (int i = 0; i < params.num_seqs; ++i) {
    const int64_t first_sample = params.first_sample[i];
    const int num_drafts = params.num_drafts[i];
    if (num_drafts <= 0) continue;
    int depth = 0;
    int32_t before = params.tokens[first_sample * params.top_k];
    if (params.terms.factors != nullptr) {
      before = last_token(params.terms.table, params.seq[i]);
    } else {
      params.chosen[first_sample] = before;
      depth = 1;
    }
    for (; depth < num_drafts; ++depth) {
      const Candidates<BlockPathParams> candidates(params, i, depth);
      const int32_t* tokens = params.tokens + candidates.sample() * params.top_k;
      State first;
      load_first(params.pairs, params.terms, candidates.sample(), before, &first);
      float best = kMinusInfinity;
      int32_t found = tokens[0];
      for (int b = 0; b < params.top_k; ++b) {
        const float value = candidates.value(first, b);
        if (value <= best) continue;
        best = value;
        found = tokens[b];
      }
      if (params.successors != nullptr) {
        int32_t* successors = params.successors + int64_t{before} * kNumSuccessors;
        if (successors[0] < 0) find_successors(params.pairs, before, successors);
        const Loners loners(params, i, depth);
        const float scale = pair_scale(params.sampling[params.seq[i]]);
        const int rank = params.pairs.rank;
        for (int s = 0; s < kNumSuccessors; ++s) {
          const int32_t token = successors[s];
          const float worth = worth_of(first, second_row(params.pairs, token), rank);
          const float value = sm::sanitize(loners.score(token) + worth * scale);
          if (value <= best) continue;
          best = value;
          found = token;
        }
      }
      params.chosen[candidates.sample()] = before = found;
    }
  }
}

void block_pairs(const ExecContext&, const BlockPairsParams& params) {
  for (int i = 0; i < params.num_seqs; ++i) {
    for (int depth = 0; depth < params.num_depths[i]; ++depth) {
      const int64_t sample = int64_t{params.first_sample[i]} + depth;
      if (depth > 0) {
        const int32_t* before = params.tokens + (sample - 1) * params.top_k;
        for (int a = 0; a < params.top_k; ++a) score_behind(params, i, depth, a, before[a]);
      } else if (params.terms.factors != nullptr) {
        score_behind(params, i, depth, 0, last_token(params.terms.table, params.seq[i]));
      } else {
        const int64_t to = sample * params.top_k * params.top_k;
        for (int b = 0; b < params.top_k; ++b) {
          params.pair_ranks[to + b] = b;
          params.pair_scores[to + b] = params.scores[sample * params.top_k + b];
        }
      }
    }
  }
}

}  // namespace openspec::OPENSPEC_ISA
