#include <algorithm>

#include "core/check.h"
#include "kernels/drafts/copy_lookup.h"

namespace openspec {

namespace {

struct Match {
  int length = 0;
  int end = 0;  // index in the window just after the occurrence
};

// The longest suffix of `window` (at most max_match_len tokens) that also ends at an earlier place.
//
// Read backwards, the window's suffix is a prefix, and the prefix function gives for every place
// the longest suffix of the window that ends there. Capping it at max_match_len keeps it exact:
// whenever it reaches the cap it falls back to the next shorter border.
Match longest_match(const int32_t* window, int size, const CopyLookupParams& params,
                    int32_t* border) {
  const auto reversed = [&](int i) { return window[size - 1 - i]; };
  Match best;
  border[0] = 0;
  int length = 0;
  for (int i = 1; i < size; ++i) {
    if (length == params.max_match_len) length = border[length - 1];
    while (length > 0 && reversed(i) != reversed(length)) length = border[length - 1];
    if (reversed(i) == reversed(length)) ++length;
    border[i] = length;
    // Rising i is falling recency. reversed(i) is the occurrence's first token.
    if (length > best.length || (params.earliest && length == best.length && length > 0)) {
      best.length = length;
      best.end = size - 1 - i + length;
    }
  }
  return best.length >= params.min_match_len ? best : Match{};
}

}  // namespace

size_t copy_lookup_workspace_bytes(int num_seqs, int max_lookback) {
  return static_cast<size_t>(num_seqs) * static_cast<size_t>(max_lookback) * sizeof(int32_t);
}

void copy_lookup_cpu(const ExecContext& exec, const CopyLookupParams& params) {
  OPENSPEC_CHECK(1 <= params.min_match_len && params.min_match_len <= params.max_match_len,
                 "n-grams of ", params.min_match_len, " to ", params.max_match_len, " tokens");
  const auto look_up = [&](int64_t i) {
    int32_t* drafts = params.drafts + i * params.max_drafts;
    std::fill(drafts, drafts + params.max_drafts, -1);
    params.num_drafts[i] = 0;
    params.match_len[i] = 0;
    const int num_wanted = std::min(params.num_wanted[i], params.max_drafts);
    if (num_wanted <= 0) return;
    const int64_t slot = params.seq[i];
    const int num_tokens = params.num_tokens[slot];
    const int size = std::min(num_tokens, params.max_lookback);
    if (size < 2) return;
    const int32_t* window = params.tokens + slot * params.tokens_stride + (num_tokens - size);
    const Match match =
        longest_match(window, size, params, params.workspace + i * params.max_lookback);
    if (match.length == 0) return;
    const int period = size - match.end;
    for (int j = 0; j < num_wanted; ++j) {
      drafts[j] = j < period ? window[match.end + j] : drafts[j - period];
    }
    params.num_drafts[i] = num_wanted;
    params.match_len[i] = match.length;
  };
  constexpr int64_t kMinParallelTokens = 8192;  // some 20 microseconds
  if (int64_t{params.num_seqs} * params.max_lookback >= kMinParallelTokens) {
    exec.pool->parallel_for(params.num_seqs, look_up);
  } else {
    for (int64_t i = 0; i < params.num_seqs; ++i) look_up(i);
  }
}

}  // namespace openspec
