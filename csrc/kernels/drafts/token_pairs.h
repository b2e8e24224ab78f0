#pragma once

#include <cstdint>

#include "kernels/choose/sampling_params.h"
#include "kernels/common/exec.h"
#include "kernels/drafts/table_rows.h"

/// Drafts of a block that know the token before them: a *pair* of tokens, a and b after it, is
/// worth second[b] . first[a], which is added to b's logit.
///
/// Where a position says which terms of a pair count for it (PairTerms), its drafts are chosen
/// among its candidates alone.
///
/// Sources: DSpark's Markov head (DeepSpec, DeepSeek 2026); DFlash2's selector (z-lab, 2026).
namespace openspec {

inline constexpr int kMaxPairRank = 256;
inline constexpr int kNumSuccessors = 32;

struct TokenPairs {
  const void* first = nullptr;   // [tokens, rank] bf16, by token
  const void* second = nullptr;  // [vocab_size, rank] bf16, by column of the logits
  int vocab_size = 0;            // of the logits
  int rank = 0;                  // a multiple of 8, at most kMaxPairRank
  // Of logits for some of the tokens, see ChooseParams; null: columns are tokens.
  const int32_t* token_of = nullptr;   // [vocab_size]
  const int32_t* column_of = nullptr;  // [tokens]
};

/// What positions make of pairs. At sample s a pair is worth second[b] . (first[a] * factors[s]),
/// the inner product rounded to `dtype`. Scores are then those of the logits as they are, the noise
/// of sampled requests (choose.h) is drawn for the candidates alone, and first positions know no
/// pairs yet: what stands before them is the sequence's last known token.
struct PairTerms {
  const void* factors = nullptr;  // [num_samples, rank] dtype; null: pairs are worth what they are
  DType dtype = DType::kF32;
  TableView table;
};

/// A row of one of the tables.
OPENSPEC_HD const uint16_t* row_of(const void* table, int64_t token, int rank) {
  return static_cast<const uint16_t*>(table) + token * rank;
}
OPENSPEC_HD int32_t column_of(const TokenPairs& pairs, int32_t token) {
  return pairs.column_of == nullptr ? token : pairs.column_of[token];
}
OPENSPEC_HD const uint16_t* second_row(const TokenPairs& pairs, int32_t token) {
  return row_of(pairs.second, column_of(pairs, token), pairs.rank);
}
/// What a pair counts for beside a log-probability.
OPENSPEC_HD float pair_scale(const SamplingParams& sampling) {
  return sampling.temperature < kMinTemperature ? 1.0f : 1.0f / sampling.temperature;
}

/// The drafts at `depth` of all blocks, one for each sequence that has so many: their logits gain
/// what pairs with the token before them are worth.
struct BlockStepParams {
  TableView table;
  const int32_t* seq = nullptr;           // [num_seqs] slots
  const int32_t* first_sample = nullptr;  // [num_seqs]
  const int32_t* num_drafts = nullptr;    // [num_seqs]
  int num_seqs = 0;
  int depth = 0;
  const int32_t* chosen = nullptr;  // [num_samples] tokens of the drafts before
  TokenPairs pairs;
  // [num_seqs, rank] bf16 rows in the place of those of `first`; null: these.
  const void* states = nullptr;
  float* logits = nullptr;    // in and out [num_samples, vocab_size]
  int32_t* sample = nullptr;  // out [num_seqs] whose logits these are; -1: no draft at this depth
};

void block_step_cpu(const ExecContext& exec, const BlockStepParams& params);
/// Sums in another order than the CPU's; a logit's depends on nothing but its own pair.
int block_step_cuda(const BlockStepParams& params, void* stream);

/// The drafts of blocks, one after another, from the candidates of every position: after the draft
/// a before it the candidate b with the highest
///
///   s_b + pair(a, b) / temperature    (greedy: temperature 1),
///
/// of equal ones the lower, s_b being its log-probability without a pair. That is what all tokens
/// would give, as long as the best of them is a candidate. What stands before a first position is
/// known: its scores hold their pairs already (block_step), and its draft is the best of them.
///
/// Candidates are also the *successors* of the draft before, where they are given: the
/// kNumSuccessors tokens that pairs with it are worth most with. So the best of all tokens is found
/// unless it is far down both by itself and after that draft.
///
/// With `terms` all positions take the candidate with the highest (s_b + pair(a, b)) / temperature
/// + noise; greedy ones without noise.
struct BlockPathParams {
  const int32_t* seq = nullptr;           // [num_seqs] slots
  const int32_t* first_sample = nullptr;  // [num_seqs] sample of the first position
  const int32_t* num_drafts = nullptr;    // [num_seqs]
  int num_seqs = 0;
  int top_k = 0;                             // at most kMaxTopDrafts
  const int32_t* tokens = nullptr;           // [num_samples, top_k] candidates, best first
  const float* scores = nullptr;             // [num_samples, top_k] falling, at most 0; -inf: none
  const SamplingParams* sampling = nullptr;  // [max_num_seqs] by slot
  TokenPairs pairs;
  PairTerms terms = {};
  // [tokens, kNumSuccessors] tokens, best first, without `terms`; null: there are none. On the CPU
  // rows that begin with -1 are not known yet, and filled in where they are needed.
  int32_t* successors = nullptr;
  const float* logits = nullptr;  // with successors: [num_samples, pairs.vocab_size]
  TableView table = {};           // with successors: lengths, for the noise
  int32_t* chosen = nullptr;      // out [num_samples] tokens
};

void block_path_cpu(const ExecContext& exec, const BlockPathParams& params);
/// The CPU's result.
int block_path_cuda(const BlockPathParams& params, void* stream);

/// How likely the best tokens of every position are after each of those before it, for trees. Of
/// the candidates b of a position, scores s_b being their log-probabilities without a pair, the
/// score after a is
///
///   v_b - log(sum over the candidates of e^v + 1 - sum over the candidates of e^s),
///   v_b = s_b + pair(a, b) / temperature    (greedy: temperature 1),
///
/// at most 0: tokens that are no candidates are taken to gain nothing. A first position has one
/// token before it, the last known one, in the place of candidate 0, and its scores, which hold
/// their pairs already (block_step), stay as they are.
///
/// With `terms` v_b = (s_b + pair(a, b)) / temperature + noise, at first positions as well, and the
/// score is v_b - log(sum over the candidates of e^v).
struct BlockPairsParams {
  const int32_t* seq = nullptr;           // [num_seqs] slots
  const int32_t* first_sample = nullptr;  // [num_seqs] sample of the first position
  const int32_t* num_depths = nullptr;    // [num_seqs] positions
  int num_seqs = 0;
  int max_depth = 0;
  int top_k = 0;                             // at most kMaxTopDrafts
  const int32_t* tokens = nullptr;           // [num_samples, top_k] candidates, best first
  const float* scores = nullptr;             // [num_samples, top_k] falling, at most 0; -inf: none
  const SamplingParams* sampling = nullptr;  // [max_num_seqs] by slot
  TokenPairs pairs;
  PairTerms terms = {};
  // out [num_samples, top_k (candidate before), top_k]: candidates and their scores, best first, of
  // equal ones the lower first. A first position has the entries of candidate 0 alone.
  int32_t* pair_ranks = nullptr;
  float* pair_scores = nullptr;
};

void block_pairs_cpu(const ExecContext& exec, const BlockPairsParams& params);
/// The CPU's result, bit for bit.
int block_pairs_cuda(const BlockPairsParams& params, void* stream);

}  // namespace openspec
