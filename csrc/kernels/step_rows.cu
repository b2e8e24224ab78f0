#include <cuda_runtime.h>

#include "kernels/block_sum.cuh"
#include "kernels/launch.cuh"
#include "kernels/step_rows.h"

namespace openspec {
namespace {

constexpr int kThreads = kMaxStepSpans;  // a thread of the one block for each span
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Values of FinishReason (runtime/step.h).
constexpr int kRunning = 0, kStop = 1, kLength = 2;

__device__ int block_sum(int value, int* warp_sums) {
  const int total = __reduce_add_sync(kAllLanes, value);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = total;
  __syncthreads();
  const int result = __reduce_add_sync(kAllLanes, warp_sums[threadIdx.x % 32]);
  __syncthreads();
  return result;
}

__device__ unsigned block_max(unsigned value, int* warp_values) {
  const unsigned best = __reduce_max_sync(kAllLanes, value);
  if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = static_cast<int>(best);
  __syncthreads();
  const unsigned result =
      __reduce_max_sync(kAllLanes, static_cast<unsigned>(warp_values[threadIdx.x % 32]));
  __syncthreads();
  return result;
}

__global__ void __launch_bounds__(kThreads) begin_step_kernel(BeginStepParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const StepHeader header = *params.input.header;
  const DeviceTable& table = params.table;
  for (int i = threadIdx.x; i < header.num_slot_updates; i += kThreads) {
    const SlotUpdate update = params.input.slot_updates[i];
    table.num_tokens[update.slot] = update.num_tokens;
    table.kv_len[update.slot] = update.kv_len;
    table.prompt_len[update.slot] = update.prompt_len;
    table.max_num_tokens[update.slot] = update.max_num_tokens;
    table.is_active[update.slot] = update.is_active;
  }
  for (int i = threadIdx.x; i < header.num_page_updates; i += kThreads) {
    const PageUpdate update = params.input.page_updates[i];
    table.pages[static_cast<int64_t>(update.slot) * table.max_pages_per_seq + update.index] =
        update.page;
  }
  __syncthreads();
  const int s = threadIdx.x;
  if (s >= params.max_spans) return;
  int slot = 0, num_wanted = 0;
  if (s < header.num_spans) {
    const StepSpan span = params.input.spans[s];
    slot = span.slot;
    const int num_tokens = table.num_tokens[slot];
    const bool is_sampled =
        table.is_active[slot] != 0 && table.kv_len[slot] + span.num_new_tokens == num_tokens;
    // The token chosen after the last draft must still fit.
    const int room = table.max_num_tokens[slot] - num_tokens - 1;
    if (is_sampled) num_wanted = max(0, min(span.max_drafts, room));
  }
  params.seq[s] = slot;
  params.num_wanted[s] = num_wanted;
}

/// Drafts of a chain of `offered` whose survival, as the bits of a float in [0, 1], is at least
/// `bound`.
__device__ int count_surviving(float acceptance, int offered, unsigned bound) {
  float survival = 1.0f;
  int count = 0;
  while (count < offered) {
    survival *= acceptance;
    if (__float_as_uint(survival) < bound) break;
    ++count;
  }
  return count;
}

/// The share of one span in `room` rows for drafts; every thread of the block calls it.
__device__ int grant(float acceptance, int offered, int room, int* shared) {
  if (block_sum(offered, shared) <= room) return offered;
  // The lowest bound that no more than `room` drafts reach.
  unsigned low = 0, high = 0x3f800001u;  // just above 1: nothing reaches it
  while (low < high) {
    const unsigned middle = low + (high - low) / 2;
    if (block_sum(count_surviving(acceptance, offered, middle), shared) <= room) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  int granted = count_surviving(acceptance, offered, high);
  // What is left goes to the best of those below the bound, which are equal, in rounds of one draft
  // each: where acceptance is 0 or 1, all drafts of a span are equal.
  for (int left = room - block_sum(granted, shared); left > 0;) {
    float next = 1.0f;
    for (int i = 0; i <= granted; ++i) next *= acceptance;
    const unsigned bits = granted < offered ? __float_as_uint(next) + 1 : 0;
    const unsigned best = block_max(bits, shared);
    if (best == 0) break;
    int total;
    const int before = cuda::block_exclusive_sum(bits == best ? 1 : 0, shared, &total);
    granted += bits == best && before < left ? 1 : 0;
    left -= min(left, total);
  }
  return granted;
}

struct SpanRows {
  int slot, kv_len, num_new, num_scored, sample_begin, first_choice;
};

__global__ void __launch_bounds__(kThreads) layout_rows_kernel(LayoutRowsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  __shared__ int warp_values[kWarps];
  __shared__ int begin_of[kMaxStepSpans + 1];
  __shared__ SpanRows rows_of[kMaxStepSpans];
  const StepHeader header = *params.input.header;
  const DeviceTable& table = params.table;
  const int s = threadIdx.x;

  SpanRows span = {0, 0, 0, 0, 0, -1};
  bool is_sampled = false;
  int offered = 0;
  float acceptance = 0.0f;
  if (s < header.num_spans) {
    const StepSpan wanted = params.input.spans[s];
    span.slot = wanted.slot;
    acceptance = fminf(fmaxf(wanted.acceptance, 0.0f), 1.0f);
    const int num_tokens = table.num_tokens[span.slot];
    span.kv_len = table.kv_len[span.slot];
    if (table.is_active[span.slot] != 0 && span.kv_len + wanted.num_new_tokens <= num_tokens) {
      span.num_new = wanted.num_new_tokens;
      is_sampled = span.kv_len + span.num_new == num_tokens;
      if (table.sampling[span.slot].num_prompt_logprobs >= 0) {
        const int end = min(span.kv_len + span.num_new, table.prompt_len[span.slot] - 1);
        span.num_scored = max(0, end - span.kv_len);
      }
    }
    if (is_sampled) {
      const int most = min(params.num_drafts[s], params.num_wanted[s]);
      const int32_t* drafts = params.drafts + static_cast<int64_t>(s) * params.max_drafts;
      while (offered < most && drafts[offered] >= 0 && drafts[offered] < params.vocab_size) {
        ++offered;
      }
    }
  }
  const int room = min(header.row_budget, params.num_rows) - block_sum(span.num_new, warp_values);
  const int granted = grant(acceptance, offered, max(room, 0), warp_values);
  int num_rows, num_samples;
  const int row_begin = cuda::block_exclusive_sum(span.num_new + granted, warp_values, &num_rows);
  const int of_samples = span.num_scored + (is_sampled ? 1 + granted : 0);
  span.sample_begin = cuda::block_exclusive_sum(of_samples, warp_values, &num_samples);
  if (is_sampled) span.first_choice = span.sample_begin + span.num_scored;
  begin_of[s] = row_begin;
  rows_of[s] = span;
  if (s == 0) begin_of[kMaxStepSpans] = num_rows;
  if (s < params.max_spans) {
    params.span_begin[s] = row_begin;
    params.span_kv_len[s] = span.kv_len;
    params.span_seq[s] = span.slot;
    params.num_offered[s] = offered;
    params.num_granted[s] = granted;
    params.first_choice[s] = span.first_choice;
    params.sample_begin[s] = span.sample_begin;
  }
  if (s == 0) {
    params.span_begin[params.max_spans] = num_rows;
    params.sample_begin[params.max_spans] = num_samples;
  }
  __syncthreads();

  for (int row = threadIdx.x; row < params.num_rows; row += kThreads) {
    int token = 0, position = 0, parent = -1, index = -1;
    int64_t kv_slot = -1;
    if (row < num_rows) {
      // The last span that begins at or before the row: behind empty ones.
      int low = 0, high = kMaxStepSpans;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (begin_of[middle] <= row) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      index = low - 1;
      const SpanRows of = rows_of[index];
      const int i = row - begin_of[index];
      const int32_t* history = table.tokens + of.slot * table.tokens_stride;
      position = of.kv_len + i;
      parent = i == 0 ? -1 : row - 1;
      token = i < of.num_new
                  ? history[position]
                  : params.drafts[static_cast<int64_t>(index) * params.max_drafts + i - of.num_new];
      const int32_t page = table.pages[static_cast<int64_t>(of.slot) * table.max_pages_per_seq +
                                       position / params.page_size];
      kv_slot = static_cast<int64_t>(page) * params.page_size + position % params.page_size;
      if (i < of.num_scored) {
        params.sample_row[of.sample_begin + i] = row;
        params.score_token[of.sample_begin + i] = history[position + 1];
      }
      if (of.first_choice >= 0 && i >= of.num_new - 1) {
        params.sample_row[of.first_choice + i - (of.num_new - 1)] = row;
        params.score_token[of.first_choice + i - (of.num_new - 1)] = -1;
      }
    }
    params.row_token[row] = token;
    params.row_position[row] = position;
    params.row_span[row] = index;
    params.row_parent[row] = parent;
    params.row_kv_slot[row] = kv_slot;
  }
  for (int i = num_samples + threadIdx.x; i < params.num_samples; i += kThreads) {
    params.sample_row[i] = -1;
    params.score_token[i] = -1;
  }
}

constexpr int kCommitThreads = 128;

/// A warp for each span; 32 tokens of its run at a time.
__global__ void __launch_bounds__(kCommitThreads) commit_rows_kernel(CommitRowsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const StepHeader header = *params.input.header;
  const int s = (blockIdx.x * kCommitThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (s >= header.num_spans) {
    if (s < params.num_spans && lane == 0) params.num_computed[s] = 0;
    return;
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
  const bool has_rows = table.is_active[slot] != 0 && kv_len + span.num_new_tokens <= num_tokens;
  if (has_rows) outcome.num_computed = span.num_new_tokens;
  if (outcome.first_choice >= 0) {
    const int granted = params.num_granted[s], offered = params.num_offered[s];
    const int judged = min(offered, granted + 1);
    const int32_t* chosen = params.chosen + outcome.first_choice;
    const int32_t* drafts = params.drafts + static_cast<int64_t>(s) * params.max_drafts;
    int32_t* history = table.tokens + slot * table.tokens_stride + num_tokens;
    int32_t* out = params.tokens + entry * (1 + params.max_drafts);
    const int prompt_len = table.prompt_len[slot], limit = table.max_num_tokens[slot];
    const int min_tokens = sampling.min_tokens, num_stop_ids = sampling.num_stop_ids;
    const int32_t* stop_ids = sampling.stop_ids;
    outcome.num_drafts = granted;
    outcome.num_offered = offered;
    outcome.num_judged = judged;
    bool goes_on = true, is_right = true;
    for (int base = 0; base <= granted && is_right; base += 32) {
      // Token i of the run is what was chosen after i accepted drafts.
      const int i = base + lane;
      const int32_t token = i <= granted ? chosen[i] : -1;
      const unsigned wrong = __ballot_sync(kAllLanes, !(i < judged && drafts[i] == token));
      const int num_right = wrong == 0 ? 32 : __ffs(wrong) - 1;
      outcome.num_right += num_right;
      is_right = num_right == 32;
      if (!goes_on) continue;
      const int num_in_run = min(min(base + num_right, granted) + 1, base + 32) - base;
      bool is_stop = false;
      if (i <= granted && num_tokens + i + 1 - prompt_len > min_tokens) {
        for (int j = 0; j < num_stop_ids; ++j) is_stop = is_stop || stop_ids[j] == token;
      }
      const bool is_last = num_tokens + i + 1 >= limit;
      const unsigned ends = __ballot_sync(kAllLanes, lane < num_in_run && (is_stop || is_last));
      const int count = ends == 0 ? num_in_run : __ffs(ends);
      if (lane < count) {
        history[i] = token;
        out[i] = token;
      }
      outcome.num_tokens += count;
      if (ends != 0) {
        const bool by_stop = __shfl_sync(kAllLanes, is_stop, count - 1);
        outcome.finish = by_stop ? kStop : kLength;
        goes_on = false;
      }
    }
    outcome.num_accepted = min(outcome.num_tokens, min(outcome.num_right, granted));
    outcome.num_computed += outcome.num_tokens - 1;
  }
  __syncwarp();
  if (lane == 0) {
    params.outcomes[entry] = outcome;
    params.num_computed[s] = outcome.num_computed;
    if (has_rows) {
      table.kv_len[slot] = kv_len + outcome.num_computed;
      table.num_tokens[slot] = num_tokens + outcome.num_tokens;
      if (outcome.finish != kRunning) table.is_active[slot] = 0;
    }
  }
  if (params.logprobs == nullptr ||
      (sampling.num_logprobs < 0 && sampling.num_prompt_logprobs < 0)) {
    return;
  }
  const int64_t ring_begin = static_cast<int64_t>(header.ring_index) * params.max_samples;
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

}  // namespace

int begin_step_cuda(const BeginStepParams& params, void* stream) {
  return cuda::launch(begin_step_kernel, 1, kThreads, 0, stream, params);
}

int layout_rows_cuda(const LayoutRowsParams& params, void* stream) {
  return cuda::launch(layout_rows_kernel, 1, kThreads, 0, stream, params);
}

int commit_rows_cuda(const CommitRowsParams& params, void* stream) {
  const int num_blocks = (params.num_spans * 32 + kCommitThreads - 1) / kCommitThreads;
  return cuda::launch(commit_rows_kernel, num_blocks, kCommitThreads, 0, stream, params);
}

}  // namespace openspec
