#pragma once

#include <cstdint>

/// What the ops that choose or draft tokens share with the sequence table.
namespace openspec {

/// Below this a temperature counts as 0, as in vLLM.
inline constexpr float kMinTemperature = 1e-5f;

/// How a sequence chooses its tokens; one per slot of the sequence table. Pointers lie on the
/// device that runs the step.
struct SamplingParams {
  float temperature = 0.0f;  // 0: argmax
  float top_p = 1.0f;
  float min_p = 0.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  float repetition_penalty = 1.0f;
  int32_t top_k = 0;  // 0: off
  int32_t min_tokens = 0;
  uint64_t seed = 0;
  int32_t num_stop_ids = 0;
  int32_t num_bias = 0;
  int32_t num_allowed = 0;  // 0: every token is allowed
  int32_t num_bad_words = 0;
  const int32_t* stop_ids = nullptr;   // [num_stop_ids] masked while fewer than min_tokens are out
  const int32_t* bias_ids = nullptr;   // [num_bias]
  const float* bias_values = nullptr;  // [num_bias] added to the logits; -inf bans
  const int32_t* allowed_ids = nullptr;  // [num_allowed]
  // Where the ids of each word end in this array, [num_bad_words], then the ids, word after word;
  // none is empty.
  const int32_t* bad_words = nullptr;
  int32_t num_logprobs = -1;         // -1: none; 0: the chosen token's only; n: and the n best
  bool raw_logprobs = true;          // of the model's logits; false: of the distribution drawn from
  int32_t num_prompt_logprobs = -1;  // as num_logprobs, for rows that score prompt tokens
  bool reports_steps = false;        // wants to know each step's drafts
};

inline constexpr int kMaxLogprobs = 20;

/// The logits that chains of drafts were drawn from, on the device that runs the step.
struct DraftLogits {
  // Those of draft i of sequence s, [vocab_size], begin at row[s] * row_stride + i * depth_stride.
  const float* values = nullptr;
  int64_t row_stride = 0, depth_stride = 0;
  const int32_t* row = nullptr;  // [num_seqs]
  int vocab_size = 0;
  // [target's vocab_size] the column of each token, -1: none; null: the token's own number.
  const int32_t* column_of = nullptr;
};

/// Chains of drafts after last known tokens, each drawn from softmax(its logits / temperature)
/// with `has_own_noise`.
struct DrawnDrafts {
  const int32_t* tokens = nullptr;  // [num_spans, max_drafts]
  const int32_t* counts =
      nullptr;  // [num_spans] drafts of each span, whether they have rows or not
  int max_drafts = 0;
  DraftLogits logits = {};  // by span
};

}  // namespace openspec
