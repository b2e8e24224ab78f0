#include <algorithm>

#include "kernels/drafts/draft_memory.h"

namespace openspec {

void remember_cpu(const ExecContext&, const RememberParams& params) {
  const DraftMemory& memory = params.memory;
  for (int i = 0; i <= params.num_tokens; ++i) {
    const uint32_t at = (params.begin + static_cast<uint32_t>(i)) % memory.capacity;
    memory.tokens[at] = i < params.num_tokens ? params.tokens[i] : DraftMemory::kEnd;
    memory.owners[at] = params.owner;
    if (i == params.num_tokens) break;
    for (int number = 0; number < DraftMemory::kNumLengths; ++number) {
      if (i < DraftMemory::length(number)) continue;
      const auto token = [&](int back) { return params.tokens[i - 1 - back]; };
      *memory.place_of(number, params.owner, token) = params.begin + static_cast<uint32_t>(i);
    }
  }
}

void recall_cpu(const ExecContext&, const RecallParams& params) {
  const DraftMemory& memory = params.memory;
  for (int s = 0; s < params.num_seqs; ++s) {
    const int64_t slot = params.seq[s];
    const int most = std::min(params.num_wanted[s], params.max_drafts);
    if (most <= 0) continue;
    Recalled found;
    for (int number = 0; number < DraftMemory::kNumLengths && found.match_len == 0; ++number) {
      found = recall(memory, number, params.owners[s],
                     params.history + slot * params.history_stride, params.num_tokens[slot]);
    }
    if (found.match_len <= params.match_len[s]) continue;
    int32_t* drafts = params.drafts + static_cast<int64_t>(s) * params.max_drafts;
    int count = 0;
    for (; count < most; ++count) {
      const int32_t token =
          memory.tokens[(found.end + static_cast<uint32_t>(count)) % memory.capacity];
      if (token == DraftMemory::kEnd) break;
      drafts[count] = token;
    }
    if (count == 0) continue;
    std::fill(drafts + count, drafts + params.max_drafts, -1);
    params.num_drafts[s] = count;
    params.match_len[s] = found.match_len;
  }
}

}  // namespace openspec
