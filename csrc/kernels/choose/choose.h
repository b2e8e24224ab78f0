#pragma once

#include <cstdint>

#include "kernels/choose/sampling_params.h"
#include "kernels/common/exec.h"
#include "kernels/common/rows.h"

namespace openspec {

/// In ChooseParams::sample_mask: nothing is chosen for the sample, and `chosen` becomes kNoChoice.
inline constexpr int32_t kHeldMask = -2;
inline constexpr int32_t kNoChoice = -1;

/// Every sampled row's own next token: a deterministic function of the row's prefix, the request's
/// seed and the position (design: "position-keyed choice").
///
///   1. logit_bias is added; tokens outside allowed_ids or outside the row's mask become -inf, and
///      stop ids while fewer than min_tokens tokens are out, and the last id of a bad word where
///      the row's prefix, its own draft ancestors included, ends in the ids before it;
///   2. repetition penalty over prompt and output, then frequency and presence penalties over the
///      output, each counting the row's own draft ancestors as output;
///   3. temperature 0 (below 1e-5): argmax (lowest id among equals). Otherwise logits * (1 /
///      temperature), then min_p, top_k (ties with the k-th largest stay), top_p (the smallest set
///      of values, ties together, whose mass reaches top_p), and argmax of logit + gumbel(seed,
///      position, id), `position` being the chosen token's own index: the row's position + 1.
///   4. rejection sampling, where `drafts` are given and the row has no mask, a draft d after it
///      (the i-th at position num_tokens - 1 + i) and a temperature: with p the distribution that
///      step 3 draws from and q the draft's, d is chosen with probability min(1, p(d) / q(d)), and
///      otherwise a token drawn from (p - q)+ with step 3's noise. Over d the choice is distributed
///      as p, but depends on the draft: it is another token than step 3's. A draft that cannot have
///      been drawn from its logits counts as none.
///
/// NaN counts as -inf and +inf as the largest number; where every logit is -inf, token 0 is chosen,
/// or with a mask the lowest token that it allows, which is never empty.
/// Token ids outside the vocabulary, in history or parameters, are ignored.
///
/// Sums that decide a filter or normalise a distribution are taken in fixed point, and exp and log
/// come from sample_math.h, so that the result does not depend on the order of summation or on the
/// device.
///
/// A row whose `score_token` is not -1 is a prompt row: nothing is chosen, the log-probability
/// reported is that of score_token (model's own distribution), whether or not its sequence asks for
/// log-probabilities.
///
/// Drafts (`is_draft`) are proposals of another model, drawn with the noise that the choice to be
/// guessed will be drawn with: row_position is that of the row's input token, as ever. Of the
/// sequence's parameters temperature, top_k, top_p, min_p and the seed count; bias, masks,
/// penalties, scores and log-probabilities are left out, so that nothing of the token history, of
/// the parameters' lists, of score_token and of the rows but span and position is read, nor
/// anything but `chosen` written. A drafter with a vocabulary of its own says with `token_of` which
/// tokens its logits are for: it then chooses what it would if it had all other tokens at -inf
/// (where every logit is -inf: its first token).
struct ChooseParams {
  RowBatch rows;
  // [num_samples] row of the batch that each logits row belongs to; -1: padding, for which nothing
  // is written.
  const int32_t* sample_row = nullptr;
  const int32_t* score_token = nullptr;  // [num_samples] token to score, or -1: choose
  int num_samples = 0;
  // Drafts alone: [num_samples] which samples those are, that is, entries of sample_row, rows of
  // logits and entries of chosen; -1: none. Null: all, in order.
  const int32_t* samples = nullptr;
  const float* logits = nullptr;  // [num_samples, vocab_size]; not modified
  int vocab_size = 0;
  bool is_draft = false;
  // Drafts alone: drawn without filters, and with noise that the choice does not share.
  bool has_own_noise = false;
  // [vocab_size] the token of each column of the logits, rising; null: the column's own number.
  // For drafts alone; an invalid argument otherwise.
  const int32_t* token_of = nullptr;
  DrawnDrafts drafts = {};  // no logits: choices do not depend on drafts
  // Masks of rows whose tokens a grammar limits: bit id % 32 of word id / 32 allows a token.
  const int32_t* row_masks = nullptr;  // [masks, (vocab_size + 31) / 32]
  // [num_samples] which of them, -1: none, or kHeldMask; null: none.
  const int32_t* sample_mask = nullptr;
  const SamplingParams* sampling = nullptr;  // [max_num_seqs] by slot
  const int32_t* tokens = nullptr;           // [max_num_seqs, tokens_stride] token history by slot
  int64_t tokens_stride = 0;
  const int32_t* num_tokens = nullptr;  // [max_num_seqs] history length, last token included
  const int32_t* prompt_len = nullptr;  // [max_num_seqs]
  // out [num_samples]; score_token's own id for prompt rows. Of a sample with kHeldMask nothing
  // else is written.
  int32_t* chosen = nullptr;
  // Log-probabilities; written for rows whose sequence asks for them. Entry 0 is the chosen (or
  // scored) token, entries 1..n the best n in falling order (equal values: lower id first); entries
  // after those are not written. The chosen token's value is bitwise equal to its value among the
  // best. Tokens that the filters dropped have -inf and follow by id; past the vocabulary the id is
  // -1.
  int32_t* logprob_ids = nullptr;  // out [num_samples, 1 + kMaxLogprobs] or null
  float* logprobs = nullptr;       // out [num_samples, 1 + kMaxLogprobs] or null
  int32_t* ranks = nullptr;    // out [num_samples] 1-based place of entry 0 in that order, or null
  float* workspace = nullptr;  // choose_workspace_bytes_cpu(...)
};

/// The same of `count` samples from the `first` on; not for a list of samples.
inline ChooseParams part_of(ChooseParams params, int first, int count) {
  const auto skip = [first](auto*& array, int64_t width = 1) {
    if (array != nullptr) array += first * width;
  };
  params.num_samples = count;
  skip(params.sample_row);
  skip(params.score_token);
  skip(params.sample_mask);
  skip(params.logits, params.vocab_size);
  skip(params.chosen);
  skip(params.logprob_ids, 1 + kMaxLogprobs);
  skip(params.logprobs, 1 + kMaxLogprobs);
  skip(params.ranks);
  return params;
}

size_t choose_workspace_bytes_cpu(int num_threads, int vocab_size);
void choose_cpu(const ExecContext& exec, const ChooseParams& params);

/// The CPU's result, bit for bit. Log-probabilities go to pinned host memory or to the device. What
/// the workspace holds before a call does not matter; it begins at a multiple of 128 bytes.
size_t choose_workspace_bytes_cuda(int max_num_samples, int vocab_size);
int choose_cuda(const ChooseParams& params, void* stream);

}  // namespace openspec
