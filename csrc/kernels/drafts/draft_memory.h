#pragma once

#include <cstdint>

#include "core/copied_drafts.h"
#include "kernels/common/exec.h"

namespace openspec {

/// Answers of this engine that copies may be taken from besides a text's own past: a ring of
/// tokens, and for several lengths of match where such tokens stood last. What is found is compared
/// token by token and by owner, so a place that is out of date, or another text of the same hash,
/// is no match.
struct DraftMemory {
  // Tokens that are looked for, the most first; a match may be as long as kMaxMatchLen.
  static constexpr int kNumLengths = 3;
  OPENSPEC_HD static constexpr int length(int number) { return 16 >> number; }
  static constexpr int32_t kEnd = -1;  // after an answer

  int32_t* tokens = nullptr;   // [capacity]
  uint64_t* owners = nullptr;  // [capacity] whose text it is
  uint32_t* places = nullptr;  // [kNumLengths, capacity] by hash: where the tokens after them
                               // stand, counted from the first ever written; 0: nowhere
  uint32_t capacity = 0;

  /// Bytes of a token of it.
  static constexpr size_t kTokenBytes =
      sizeof(int32_t) + sizeof(uint64_t) + kNumLengths * sizeof(uint32_t);

  /// Where the tokens before `end`, so many of them, are noted; `token(i)` is the i-th before it.
  template <typename TokenBefore>
  OPENSPEC_HD uint32_t* place_of(int number, uint64_t owner, const TokenBefore& token) const {
    uint64_t hash = owner + static_cast<uint64_t>(number);
    for (int i = 0; i < length(number); ++i) {
      hash = (hash ^ static_cast<uint32_t>(token(i))) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 29;
    }
    return places + static_cast<uint64_t>(number) * capacity + hash % capacity;
  }
};

/// Writes an answer to the memory, over the oldest ones.
struct RememberParams {
  DraftMemory memory = {};
  uint32_t begin = 0;  // tokens ever written before
  uint64_t owner = 0;
  const int32_t* tokens = nullptr;  // [num_tokens], fewer than the capacity
  int num_tokens = 0;
};

/// Puts a copy from the memory in the place of each sequence's own where its match is longer: of
/// the lengths that are noted the longest that is found, at the place that was written last.
struct RecallParams {
  DraftMemory memory = {};
  const int32_t* history = nullptr;  // [max_num_seqs, history_stride] by slot
  int64_t history_stride = 0;
  const int32_t* num_tokens = nullptr;  // [max_num_seqs] history length
  const int32_t* seq = nullptr;         // [num_seqs] slots
  const uint64_t* owners = nullptr;     // [num_seqs]
  const int32_t* num_wanted = nullptr;  // [num_seqs]
  int num_seqs = 0;
  int max_drafts = 0;
  // In and out, as copy_lookup leaves them: [num_seqs, max_drafts], [num_seqs], [num_seqs].
  int32_t *drafts = nullptr, *num_drafts = nullptr, *match_len = nullptr;
};

/// What a text is like: where in the memory it goes on; no tokens: nowhere.
struct Recalled {
  int match_len = 0;
  uint32_t end = 0;  // in the ring
};

/// Whether the last length(number) tokens of a text stand in the memory.
OPENSPEC_HD Recalled recall(const DraftMemory& memory, int number, uint64_t owner,
                            const int32_t* history, int num_tokens) {
  const int least = DraftMemory::length(number);
  if (num_tokens < least) return {};
  const auto known = [&](int i) { return history[num_tokens - 1 - i]; };
  const uint32_t place = *memory.place_of(number, owner, known);
  if (place == 0) return {};
  const uint32_t end = place % memory.capacity;
  // Before the first of the ring comes the last.
  const auto at = [&](int i) {
    const auto back = static_cast<uint32_t>(i) + 1;
    return end >= back ? end - back : end + memory.capacity - back;
  };
  int length = 0;
  while (length < kMaxMatchLen && length < num_tokens &&
         memory.tokens[at(length)] == known(length)) {
    ++length;
  }
  // Answers have an end between them: these tokens are of one.
  if (length < least || memory.owners[at(0)] != owner) return {};
  return {length, end};
}

void remember_cpu(const ExecContext& exec, const RememberParams& params);
void recall_cpu(const ExecContext& exec, const RecallParams& params);
/// Return a cudaError_t.
int remember_cuda(const RememberParams& params, void* stream);
int recall_cuda(const RecallParams& params, void* stream);

}  // namespace openspec
