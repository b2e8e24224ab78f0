#include <cuda_runtime.h>

#include "kernels/common/launch.cuh"
#include "kernels/exchange/exchange.cuh"
#include "kernels/steps/step_rows.h"

namespace openspec {
namespace {

constexpr int kThreads = 128;
constexpr unsigned kAllLanes = 0xffffffffu;

// Values of FinishReason (runtime/state/lease.h).
constexpr int kRunning = 0, kStop = 1, kLength = 2;

/// What the choices of a span say of its drafts: the accepted ones, and see DraftJudgement.
struct Verdict {
  int num_accepted = 0, num_judged = 0, num_right = 0;
};

/// `chosen` [1 + granted]; by one warp, as the next.
__device__ Verdict judge_chain(const int32_t* drafts, int offered, int granted,
                               const int32_t* chosen) {
  const int lane = threadIdx.x % 32;
  const int most = min(offered, granted + 1);
  Verdict verdict;
  for (int base = 0; base < most; base += 32) {
    const int i = base + lane;
    const unsigned wrong = __ballot_sync(kAllLanes, !(i < most && drafts[i] == chosen[i]));
    verdict.num_right += wrong == 0 ? 32 : __ffs(wrong) - 1;
    if (wrong != 0) break;
  }
  const bool has_choice = verdict.num_right < most && chosen[verdict.num_right] >= 0;
  verdict.num_judged = verdict.num_right + (has_choice ? 1 : 0);
  verdict.num_accepted = min(verdict.num_right, granted);
  return verdict;
}

/// Writes the rows of the accepted drafts, of which `first_row` is that of the first draft. Among
/// siblings that are equal the first counts.
__device__ Verdict judge_tree(const int32_t* drafts, const int32_t* parents, int offered,
                              int granted, const int32_t* chosen, int first_row,
                              int32_t* accepted_row) {
  const int lane = threadIdx.x % 32;
  Verdict verdict;
  int at = -1;
  bool has_child = false;
  // Children come after their parent: one pass follows the whole path.
  for (int base = 0; base < offered && at < granted; base += 32) {
    const int i = base + lane;
    const int32_t parent = i < offered ? parents[i] : -2, token = i < offered ? drafts[i] : -1;
    while (at < granted) {
      const bool is_child = parent == at;
      const unsigned children = __ballot_sync(kAllLanes, is_child);
      const unsigned right = __ballot_sync(kAllLanes, is_child && token == chosen[at + 1]);
      has_child = has_child || children != 0;
      if (right == 0) break;
      at = base + __ffs(right) - 1;
      has_child = false;
      ++verdict.num_right;
      if (at >= granted) break;
      if (lane == 0) accepted_row[verdict.num_accepted] = first_row + at;
      ++verdict.num_accepted;
    }
  }
  verdict.num_judged = verdict.num_right + (has_child && chosen[at + 1] >= 0 ? 1 : 0);
  __syncwarp();
  return verdict;
}

/// Compares the copy of span `s` with the run of chosen tokens, which stand in its history.
__device__ __forceinline__ void judge_copy(const CommitRowsParams& params, int s,
                                           const int32_t* run, StepOutcome& outcome) {
  const CopiedDrafts& copied = params.copied;
  __syncwarp();
  const Verdict verdict = judge_chain(copied.drafts + static_cast<int64_t>(s) * copied.max_drafts,
                                      copied.num_drafts[s], outcome.num_tokens - 1, run);
  outcome.is_copied = params.is_copied[s];
  outcome.copy_class = params.copy_class[s];
  outcome.num_copied_judged = verdict.num_judged;
  outcome.num_copied_right = verdict.num_right;
}

__device__ __forceinline__ void report_drafts(const CommitRowsParams& params, int64_t entry,
                                              int64_t first_draft, const int32_t* drafts,
                                              int granted, bool has_tree) {
  const int lane = threadIdx.x % 32;
  const int64_t first_out = entry * params.max_drafts;
  for (int i = lane; i < granted; i += 32) {
    params.out_drafts[first_out + i] = drafts[i];
    params.out_parents[first_out + i] = has_tree ? params.parents[first_draft + i] : i - 1;
    if (params.scores != nullptr) {
      params.out_scores[first_out + i] = params.scores[first_draft + i];
    }
  }
}

__device__ __forceinline__ void copy_logprobs(const CommitRowsParams& params, int ring_index,
                                              const StepOutcome& outcome) {
  const int lane = threadIdx.x % 32;
  const int64_t ring_begin = static_cast<int64_t>(ring_index) * params.max_samples;
  constexpr int kWidth = 1 + kMaxLogprobs;
  const int end = min(outcome.sample_end, params.max_samples);
  for (int i = outcome.sample_begin * kWidth + lane; i < end * kWidth; i += 32) {
    params.out_logprob_ids[ring_begin * kWidth + i] = params.logprob_ids[i];
    params.out_logprobs[ring_begin * kWidth + i] = params.logprobs[i];
  }
  for (int i = outcome.sample_begin + lane; i < end; i += 32) {
    params.out_ranks[ring_begin + i] = params.ranks[i];
  }
}

/// What the step folded becomes the slot's base. Returns the blocks in it.
__device__ __forceinline__ int take_folded(const CommitRowsParams& params, int span, int slot) {
  if (params.folded_write == nullptr) return 0;
  const DeviceTable& table = params.table;
  const int num_folded = params.folded_write[span];
  if (num_folded == params.folded_read[span]) return num_folded;
  const int first = slot * table.pages_per_base;
  for (int i = threadIdx.x % 32; i < table.pages_per_base; i += 32) {
    table.base_pages[first + i] = table.base_targets[first + i];
  }
  if (threadIdx.x % 32 == 0) table.num_folded[slot] = num_folded;
  return num_folded;
}

/// A warp for each span; 32 tokens of its run at a time.
__global__ void __launch_bounds__(kThreads) commit_rows_kernel(CommitRowsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const StepHeader header = *params.input.header;
  const int s = (blockIdx.x * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (s >= header.num_spans) {
    if (s < params.num_spans && lane == 0) params.num_computed[s] = 0;
    return;
  }
  if (params.exchange != nullptr && s == 0 && lane == 0) {
    params.out_counts[header.ring_index] = cuda::take_counts(*params.exchange);
  }
  if (params.experts != nullptr && s == 0 && lane == 0) {
    params.out_experts[header.ring_index] = *params.experts;
  }
  const DeviceTable& table = params.table;
  const StepSpan span = params.input.spans[s];
  const int slot = span.slot;
  const int kv_len = table.kv_len[slot], num_tokens = table.num_tokens[slot];
  const SamplingParams& sampling = table.sampling[slot];
  const int64_t entry = static_cast<int64_t>(header.ring_index) * params.max_spans + s;

  StepOutcome outcome;
  outcome.sample_begin = params.sample_begin[s];
  outcome.sample_end = params.sample_begin[s + 1];
  outcome.first_choice = params.first_choice[s];
  outcome.num_folded = take_folded(params, s, slot);
  const bool has_rows = table.is_active[slot] != 0 && kv_len + span.num_new_tokens <= num_tokens;
  if (has_rows) outcome.num_computed = span.num_new_tokens;
  if (has_rows && params.parents != nullptr) {
    const int begin = params.span_begin[s];
    for (int i = lane; i < span.num_new_tokens; i += 32) {
      params.committed_row[begin + i] = begin + i;
    }
  }
  if (outcome.first_choice >= 0) {
    const int granted = params.num_granted[s], offered = params.num_offered[s];
    const int32_t* chosen = params.chosen + outcome.first_choice;
    const int64_t first_draft = static_cast<int64_t>(s) * params.max_drafts;
    const int32_t* drafts = params.drafts + first_draft;
    const int first_row = params.span_begin[s] + span.num_new_tokens;  // of the drafts
    const bool has_tree = params.parents != nullptr;
    int32_t* accepted_row = has_tree ? params.committed_row + first_row : nullptr;
    const Verdict verdict = has_tree ? judge_tree(drafts, params.parents + first_draft, offered,
                                                  granted, chosen, first_row, accepted_row)
                                     : judge_chain(drafts, offered, granted, chosen);
    int32_t* history = table.tokens + slot * table.tokens_stride + num_tokens;
    int32_t* out = params.tokens + entry * (1 + params.max_drafts);
    int32_t* out_samples = params.samples + entry * (1 + params.max_drafts);
    const int prompt_len = table.prompt_len[slot], limit = table.max_num_tokens[slot];
    const int min_tokens = sampling.min_tokens, num_stop_ids = sampling.num_stop_ids;
    const int32_t* stop_ids = sampling.stop_ids;
    outcome.num_drafts = granted;
    outcome.num_offered = offered;
    outcome.num_judged = verdict.num_judged;
    outcome.num_right = verdict.num_right;
    for (int base = 0; base <= verdict.num_accepted && outcome.finish == kRunning; base += 32) {
      // Token i of the run is what was chosen after i accepted drafts; the last may have no choice.
      const int i = base + lane;
      const bool is_accepted = i <= verdict.num_accepted;
      int sample = i;
      if (has_tree && i > 0 && is_accepted) sample = 1 + accepted_row[i - 1] - first_row;
      const int32_t token = is_accepted ? chosen[sample] : -1;
      const bool is_in_run = token >= 0;
      bool is_stop = false;
      if (is_in_run && num_tokens + i + 1 - prompt_len > min_tokens) {
        for (int j = 0; j < num_stop_ids; ++j) is_stop = is_stop || stop_ids[j] == token;
      }
      const bool is_last = num_tokens + i + 1 >= limit;
      const unsigned ends = __ballot_sync(kAllLanes, is_in_run && (is_stop || is_last));
      const int num_in_run = __popc(__ballot_sync(kAllLanes, is_in_run));
      const int count = ends == 0 ? num_in_run : __ffs(ends);
      if (lane < count) {
        history[i] = token;
        out[i] = token;
        out_samples[i] = outcome.first_choice + sample;
      }
      outcome.num_tokens += count;
      if (ends != 0) outcome.finish = __shfl_sync(kAllLanes, is_stop, count - 1) ? kStop : kLength;
    }
    if (sampling.reports_steps) {
      outcome.has_scores = params.scores != nullptr;
      report_drafts(params, entry, first_draft, drafts, granted, has_tree);
    }
    outcome.num_accepted = min(outcome.num_tokens, verdict.num_accepted);
    if (params.copied.max_drafts > 0) judge_copy(params, s, history, outcome);
    outcome.num_computed += outcome.num_tokens - 1;
  }
  __syncwarp();
  if (lane == 0) {
    params.outcomes[entry] = outcome;
    params.num_computed[s] = outcome.num_computed;
    if (has_rows) {
      table.kv_len[slot] = kv_len + outcome.num_computed;
      if (table.kept_begin != nullptr && !params.keeps_rows) {
        table.kept_begin[slot] = kv_len + outcome.num_computed;
      }
      table.num_tokens[slot] = num_tokens + outcome.num_tokens;
      if (outcome.finish != kRunning) table.is_active[slot] = 0;
    }
  }
  if (params.logprobs == nullptr ||
      (sampling.num_logprobs < 0 && sampling.num_prompt_logprobs < 0)) {
    return;
  }
  copy_logprobs(params, header.ring_index, outcome);
}

}  // namespace

int commit_rows_cuda(const CommitRowsParams& params, void* stream) {
  const int num_blocks = (params.num_spans * 32 + kThreads - 1) / kThreads;
  return cuda::launch(commit_rows_kernel, num_blocks, kThreads, 0, stream, params);
}

}  // namespace openspec
