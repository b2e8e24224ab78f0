#pragma once

/// The arithmetic of a small target that keeps a running state, and of a drafter that guesses at
/// it: integers in a fixed order, the same on the CPU and in the kernels of `running_state.cu`.

#include <cstdint>

#include "kernels/common/exec.h"
#include "kernels/common/records.h"
#include "kernels/common/rows.h"

namespace openspec::testing {

/// Words of a layer's state. Each goes its own way through layers and positions; the logits mix
/// all.
constexpr int kStateWords = 4;
/// Records before its own that a row reads.
constexpr int kStateReads = 2;

OPENSPEC_HD uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

/// A layer's word at a position, from those at the two positions before and what comes in.
OPENSPEC_HD uint32_t next_word(uint32_t last, uint32_t before_last, uint32_t input) {
  return mixed(last * 5u + (before_last << 7 | before_last >> 25) + mixed(input + 0x9e3779b9u));
}

/// The token that most often follows another one.
OPENSPEC_HD int32_t usual_next(int32_t token) { return token % 8 == 7 ? token - 7 : token + 1; }

/// Of a row with the words of the last layer; three times in four the usual token is the best.
OPENSPEC_HD float logit_of(const uint32_t* words, int32_t token, int32_t column) {
  const uint32_t state = mixed(words[0] ^ mixed(words[1] ^ mixed(words[2] ^ mixed(words[3]))));
  const float value =
      static_cast<float>(mixed(state + static_cast<uint32_t>(column) * 0x01000193u) >> 8) *
      0x1p-24f;
  return value * 6.0f + (state % 4 != 0 && column == usual_next(token) ? 8.0f : 0.0f);
}

struct RunningPass {
  RowBatch rows;
  RecordView records;
  int num_layers = 0;
  uint32_t* states = nullptr;  // out [num_rows, num_layers, kStateWords]
};

/// Word `word` of all rows of a span.
OPENSPEC_HD void run_span(const RunningPass& pass, int span, int word) {
  const RowBatch& rows = pass.rows;
  const int begin = rows.span_begin[span], num_rows = rows.span_begin[span + 1] - begin;
  const int slot = rows.span_seq[span], kv_len = rows.span_kv_len[span];
  const int width = pass.num_layers * kStateWords;
  for (int i = 0; i < num_rows; ++i) {
    // Where the two states before this row are: in rows of this step, or in the ring.
    const uint32_t* sources[kStateReads] = {nullptr, nullptr};
    int row = begin + i, num_committed = 0;
    for (int back = 0; back < kStateReads; ++back) {
      row = row < 0 ? row : rows.row_parent[row];
      if (row >= 0) {
        sources[back] = pass.states + int64_t{row} * width;
      } else if (const int position = kv_len - ++num_committed; position >= 0) {
        sources[back] = reinterpret_cast<const uint32_t*>(pass.records.at(slot, position));
      }
    }
    uint32_t input =
        static_cast<uint32_t>(rows.row_token[begin + i]) + 77u * static_cast<uint32_t>(word);
    uint32_t* out = pass.states + int64_t{begin + i} * width;
    for (int at = word; at < width; at += kStateWords) {
      const uint32_t last = sources[0] == nullptr ? 0 : sources[0][at];
      const uint32_t before_last = sources[1] == nullptr ? 0 : sources[1][at];
      input = out[at] = next_word(last, before_last, input);
    }
    if (num_rows - i > pass.records.ring_size) continue;
    auto* record = reinterpret_cast<uint32_t*>(pass.records.at(slot, kv_len + i));
    for (int at = word; at < width; at += kStateWords) record[at] = out[at];
  }
}

/// The logits of one row of the last pass.
struct RunningLogits {
  const uint32_t* states = nullptr;  // of RunningPass
  const int32_t* row_token = nullptr;
  const int32_t* row = nullptr;  // [count]
  int num_layers = 0;
  int vocab_size = 0;
  float* out = nullptr;  // [count, vocab_size]
};

OPENSPEC_HD void run_logit(const RunningLogits& pass, int entry, int column) {
  const int row = pass.row[entry];
  if (row < 0) return;
  const uint32_t* words =
      pass.states + (int64_t{row} * pass.num_layers + pass.num_layers - 1) * kStateWords;
  pass.out[int64_t{entry} * pass.vocab_size + column] =
      logit_of(words, pass.row_token[row], column);
}

/// Drafts of one sequence: the usual tokens, wrong from a depth on that changes from step to step;
/// as a tree with a wrong sibling at every depth, before or after the right one.
struct RunningDrafts {
  const int32_t* last_token = nullptr;  // the last known one
  int num_tokens = 0;
  int num_wanted = 0;
  int32_t* drafts = nullptr;   // out [num_wanted], as the next two
  int32_t* parents = nullptr;  // null: a chain
  float* scores = nullptr;     // null: none
};

OPENSPEC_HD int32_t guess(const RunningDrafts& draft) {
  const int num_right = static_cast<int>(mixed(static_cast<uint32_t>(draft.num_tokens)) % 9u);
  int32_t token = *draft.last_token, above = -1;
  int count = 0;
  for (int depth = 0; count < draft.num_wanted; ++depth) {
    token = usual_next(token);
    const int32_t wrong = usual_next(token);
    const int width = draft.parents == nullptr ? 1 : 2;
    const int right_at = width == 1 ? 0 : (draft.num_tokens + depth) % 2;
    int next_above = above;
    for (int k = 0; k < width && count < draft.num_wanted; ++k, ++count) {
      const bool is_right = k == right_at && depth < num_right;
      draft.drafts[count] = is_right ? token : wrong;
      if (draft.parents != nullptr) draft.parents[count] = above;
      if (draft.scores != nullptr) draft.scores[count] = -0.25f * static_cast<float>(depth);
      if (k == right_at) next_above = count;
    }
    above = next_above;
  }
  return count;
}

/// The drafts of a step's sequences; arrays as WantedDrafts and TableView have them.
struct RunningGuesses {
  const int32_t* tokens = nullptr;
  int64_t tokens_stride = 0;
  const int32_t *num_tokens = nullptr, *seq = nullptr, *num_wanted = nullptr;
  int num_seqs = 0, max_drafts = 0;
  int32_t *drafts = nullptr, *num_drafts = nullptr, *parents = nullptr;
  float* scores = nullptr;
};

OPENSPEC_HD void guess_of(const RunningGuesses& all, int i) {
  all.num_drafts[i] = 0;
  if (all.num_wanted[i] == 0) return;
  const int64_t first = int64_t{i} * all.max_drafts;
  const int slot = all.seq[i], num_tokens = all.num_tokens[slot];
  all.num_drafts[i] =
      guess({all.tokens + slot * all.tokens_stride + num_tokens - 1, num_tokens, all.num_wanted[i],
             all.drafts + first, all.parents == nullptr ? nullptr : all.parents + first,
             all.scores == nullptr ? nullptr : all.scores + first});
}

/// The kernels, in tests of CUDA.
struct RunningKernels {
  int (*pass)(const RunningPass&, void* stream) = nullptr;
  int (*logits)(const RunningLogits&, int count, void* stream) = nullptr;
  int (*guesses)(const RunningGuesses&, void* stream) = nullptr;
};
inline RunningKernels running_kernels;

}  // namespace openspec::testing
