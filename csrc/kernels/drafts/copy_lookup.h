#pragma once

#include <cstdint>

#include "kernels/common/exec.h"

namespace openspec {

/// Prompt lookup: for every sequence the longest suffix of its history, between min_match_len and
/// max_match_len tokens long, that also occurs earlier within the last max_lookback tokens; the
/// tokens after that occurrence are the draft.
///
/// The longest length wins; among equal lengths the most recent occurrence, or the earliest when
/// `earliest` is set (vLLM's choice). A match may overlap the suffix; where the copy runs past the
/// end of the history it goes on through the draft itself (a history of period p is continued with
/// period p). O(max_lookback) per sequence, by the prefix function of the reversed window.
///
/// Source: prompt lookup decoding; Knuth, Morris, Pratt.
struct CopyLookupParams {
  const int32_t* tokens = nullptr;  // [max_num_seqs, tokens_stride] token history by slot
  int64_t tokens_stride = 0;
  const int32_t* num_tokens = nullptr;  // [max_num_seqs] history length
  const int32_t* seq = nullptr;         // [num_seqs] slots to look up
  const int32_t* num_wanted = nullptr;  // [num_seqs] drafts wanted, at most max_drafts; 0 skips
  int num_seqs = 0;
  int max_drafts = 0;
  int min_match_len = 1;
  int max_match_len = 4;
  int max_lookback = 4096;  // tokens
  bool earliest = false;
  int32_t* drafts = nullptr;      // out [num_seqs, max_drafts]; entries past num_drafts are -1
  int32_t* num_drafts = nullptr;  // out [num_seqs]
  int32_t* match_len = nullptr;   // out [num_seqs] length of the matched suffix, 0: none
  int32_t* workspace = nullptr;   // [num_seqs, max_lookback]: the prefix function
};

size_t copy_lookup_workspace_bytes(int num_seqs, int max_lookback);

void copy_lookup_cpu(const ExecContext& exec, const CopyLookupParams& params);
/// One thread block per sequence. Returns a cudaError_t.
int copy_lookup_cuda(const CopyLookupParams& params, void* stream);

}  // namespace openspec
