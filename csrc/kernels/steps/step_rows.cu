#include <cuda_runtime.h>

#include "core/put_first.h"
#include "kernels/common/block_sum.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/delta_net/delta_states.h"
#include "kernels/steps/step_rows.h"

namespace openspec {
namespace {

constexpr int kThreads = kMaxStepSpans;  // a thread of the one block for each span
constexpr int kWarps = kThreads / 32;
constexpr int kMergeThreads = 128;
constexpr unsigned kAllLanes = 0xffffffffu;

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
  const StepHeader& header = params.header;
  const DeviceTable& table = params.table;
  const int s = threadIdx.x;
  // A look at the host's memory takes a microsecond or two: all of them at once.
  StepSpan span;
  if (s < header.num_spans) span = params.host_spans[s];
  for (int i = threadIdx.x; i < header.num_slot_updates; i += kThreads) {
    const SlotUpdate update = params.slot_updates[i];
    table.num_tokens[update.slot] = update.num_tokens;
    table.kv_len[update.slot] = update.kv_len;
    table.prompt_len[update.slot] = update.prompt_len;
    table.max_num_tokens[update.slot] = update.max_num_tokens;
    table.is_active[update.slot] = update.is_active;
    if (table.pages_per_base > 0) table.num_folded[update.slot] = update.num_folded;
    if (table.kept_begin != nullptr) table.kept_begin[update.slot] = update.kv_len;
  }
  for (int i = threadIdx.x; i < header.num_page_updates; i += kThreads) {
    const PageUpdate update = params.page_updates[i];
    table.pages[static_cast<int64_t>(update.slot) * table.max_pages_per_seq + update.index] =
        update.page;
  }
  if (s == 0) *params.out_header = header;
  if (s < header.num_spans) params.spans[s] = span;
  __syncthreads();
  for (int i = threadIdx.x; i < header.num_spans * table.pages_per_base; i += kThreads) {
    const StepSpan of = params.spans[i / table.pages_per_base];
    const int page = i % table.pages_per_base;
    if (of.folds == 0) continue;
    table.base_targets[of.slot * table.pages_per_base + page] = params.base_targets[i];
  }
  if (s >= params.max_spans) return;
  int num_wanted = 0;
  if (s < header.num_spans) {
    const int num_tokens = table.num_tokens[span.slot];
    const bool is_sampled = table.is_active[span.slot] != 0 &&
                            table.kv_len[span.slot] + span.num_new_tokens == num_tokens;
    // The token chosen after the last draft must still fit.
    const int room = table.max_num_tokens[span.slot] - num_tokens - 1;
    if (is_sampled) num_wanted = max(0, min(span.max_drafts, room));
  }
  params.seq[s] = span.slot;
  params.num_wanted[s] = num_wanted;
  if (params.owners != nullptr) params.owners[s] = span.owner;
  if (params.num_drafter_wanted != nullptr) {
    params.num_drafter_wanted[s] = min(num_wanted, params.max_drafter_drafts);
  }
}

/// A warp for each span: its lanes fetch what comes first in one look at the host's memory.
__global__ void __launch_bounds__(kMergeThreads) merge_drafts_kernel(MergeDraftsParams params) {
  extern __shared__ int32_t leads[];  // [warps, max_drafts]
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  const int s = (blockIdx.x * kMergeThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (s >= params.num_spans) return;
  const int num_lead = params.num_lead[s];
  if (num_lead == 0) return;
  const int64_t first = static_cast<int64_t>(s) * params.max_drafts;
  int32_t* lead = leads + threadIdx.x / 32 * params.max_drafts;
  for (int i = lane; i < num_lead; i += 32) lead[i] = params.lead[first + i];
  __syncwarp();
  if (lane != 0) return;
  const int num_drafts = params.has_drafts ? min(params.num_drafts[s], params.max_drafts) : 0;
  params.num_drafts[s] =
      put_first(lead, num_lead, params.drafts + first,
                params.parents != nullptr ? params.parents + first : nullptr,
                params.scores != nullptr ? params.scores + first : nullptr, num_drafts);
}

/// How likely a span's drafts are, as numbers that never rise from draft to draft.
struct Survivals {
  float acceptance;     // of each draft, in [0, 1]
  const float* scores;  // [drafts] at most 0, never rising; null: acceptance it is

  static constexpr unsigned kInfinity = 0x7f800000u;

  __device__ unsigned of(int draft) const {
    if (scores != nullptr) return kInfinity - __float_as_uint(fabsf(scores[draft]));
    float survival = 1.0f;
    for (int i = 0; i <= draft; ++i) survival *= acceptance;
    return __float_as_uint(survival);
  }
  /// How many of the first `offered` drafts are at least as likely as `bound`.
  __device__ int count(int offered, unsigned bound) const {
    int count = 0;
    if (scores == nullptr) {
      for (float survival = acceptance; count < offered; survival *= acceptance, ++count) {
        if (__float_as_uint(survival) < bound) break;
      }
      return count;
    }
    while (count < offered) {
      const int middle = (count + offered) / 2;
      if (of(middle) >= bound) {
        count = middle + 1;
      } else {
        offered = middle;
      }
    }
    return count;
  }
};

/// What spans may have rows for.
struct Offers {
  int count[kMaxStepSpans];
  float acceptance[kMaxStepSpans];
  const float* scores;  // [spans, max_drafts] or null
  int max_drafts;

  __device__ Survivals survivals(int span) const {
    const int64_t first = static_cast<int64_t>(span) * max_drafts;
    return {acceptance[span], scores != nullptr ? scores + first : nullptr};
  }
};

/// The share of the thread's span in `room` rows for drafts; every thread of the block calls it.
/// `offers`, in shared memory, is the same for all.
__device__ int grant(const Offers& offers, int num_spans, int room, int* shared) {
  const int offered = offers.count[threadIdx.x];
  if (block_sum(offered, shared) <= room) return offered;
  // The highest bound that more drafts reach than there is room for: five bits at a time, each warp
  // tries one value of these.
  unsigned bound = 0;
#pragma unroll 1
  for (int shift = 26;; shift = max(shift - 5, 0)) {
    const unsigned tried = bound + (threadIdx.x / 32 << shift);
    int count = 0;
    for (int span = threadIdx.x % 32; span < num_spans; span += 32) {
      count += offers.survivals(span).count(offers.count[span], tried);
    }
    const bool exceeds = __reduce_add_sync(kAllLanes, count) > room;
    bound += (__syncthreads_count(exceeds) / 32 - 1) << shift;
    if (shift == 0) break;
  }
  const Survivals survivals = offers.survivals(threadIdx.x);
  int granted = survivals.count(offered, bound + 1);
  // What is left goes to the best of the others, which are equal, in rounds of one draft each:
  // where acceptance is 0 or 1, all drafts of a span are equal.
  for (int left = room - block_sum(granted, shared); left > 0;) {
    const unsigned next = granted < offered ? survivals.of(granted) + 1 : 0;
    const unsigned best = block_max(next, shared);
    if (best == 0) break;
    int total;
    const int before = cuda::block_exclusive_sum(next == best ? 1 : 0, shared, &total);
    granted += next == best && before < left ? 1 : 0;
    left -= min(left, total);
  }
  return granted;
}

/// Whether draft i of a span, whose drafts begin at `first`, ends those that can have rows.
__device__ bool is_unusable(const LayoutRowsParams& params, int64_t first, int i) {
  const int32_t token = params.drafts[first + i];
  if (token < 0 || token >= params.vocab_size) return true;
  if (params.parents != nullptr) {
    const int32_t above = params.parents[first + i];
    if (above < -1 || above >= i) return true;
  }
  if (params.scores == nullptr) return false;
  return !(params.scores[first + i] <= (i > 0 ? params.scores[first + i - 1] : 0.0f));
}

struct SpanRows {
  int slot, kv_len, num_new, num_scored, sample_begin, first_choice;
};

/// How many drafts of each span can have rows: those up to the first that cannot.
__device__ __forceinline__ void count_drafts(const LayoutRowsParams& params, int* count) {
  const int s = threadIdx.x;
  count[s] = s < params.max_spans ? max(min(params.num_drafts[s], params.num_wanted[s]), 0) : 0;
  if (__syncthreads_or(count[s] > 0)) {
    for (int i = threadIdx.x; i < params.max_spans * params.max_drafts; i += kThreads) {
      const int of = i / params.max_drafts, draft = i % params.max_drafts;
      if (draft < count[of] && is_unusable(params, i - draft, draft)) {
        atomicMin(&count[of], draft);
      }
    }
    __syncthreads();
  }
}

/// What a row of the step is: of spans that have begun at `begin_of` the last one's, or nothing.
__device__ __forceinline__ void write_row(const LayoutRowsParams& params, int row, int num_rows,
                                          int num_spans, const int* begin_of,
                                          const SpanRows* rows_of) {
  const DeviceTable& table = params.table;
  int token = 0, position = 0, parent = -1, index = -1;
  int64_t kv_slot = -1;
  if (row < num_rows) {
    // The last span that begins at or before the row: after empty ones.
    int low = 0, high = num_spans;
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
    const int kv_index = of.kv_len + i;
    const int32_t page = table.pages[static_cast<int64_t>(of.slot) * table.max_pages_per_seq +
                                     kv_index / params.page_size];
    position = kv_index;
    parent = i == 0 ? -1 : row - 1;
    if (i < of.num_new) {
      token = history[position];
    } else {
      const int64_t first = static_cast<int64_t>(index) * params.max_drafts;
      const int draft = i - of.num_new;
      token = params.drafts[first + draft];
      if (params.parents != nullptr) {
        const int last_known = row - draft - 1;
        int above = params.parents[first + draft];
        parent = last_known + 1 + above;
        position = of.kv_len + of.num_new;
        for (; above >= 0; above = params.parents[first + above]) ++position;
      }
    }
    kv_slot = static_cast<int64_t>(page) * params.page_size + kv_index % params.page_size;
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

__global__ void __launch_bounds__(kThreads) layout_rows_kernel(LayoutRowsParams params) {
  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  __shared__ int warp_values[kWarps];
  __shared__ int begin_of[kMaxStepSpans];
  __shared__ SpanRows rows_of[kMaxStepSpans];
  __shared__ Offers offers;
  const StepHeader header = *params.input.header;
  const DeviceTable& table = params.table;
  const int s = threadIdx.x;
  count_drafts(params, offers.count);

  SpanRows span = {0, 0, 0, 0, 0, -1};
  bool is_sampled = false, folds = false;
  offers.acceptance[s] = 0.0f;
  if (s < header.num_spans) {
    const StepSpan wanted = params.input.spans[s];
    span.slot = wanted.slot;
    folds = wanted.folds != 0;
    offers.acceptance[s] = fminf(fmaxf(wanted.acceptance, 0.0f), 1.0f);
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
  }
  if (!is_sampled) offers.count[s] = 0;
  if (s == 0) {
    offers.scores = params.scores;
    offers.max_drafts = params.max_drafts;
  }
  const int offered = offers.count[s];
  const int room = min(header.row_budget, params.num_rows) - block_sum(span.num_new, warp_values);
  const int granted = grant(offers, header.num_spans, max(room, 0), warp_values);
  int num_rows, num_samples;
  const int row_begin = cuda::block_exclusive_sum(span.num_new + granted, warp_values, &num_rows);
  const int of_samples = span.num_scored + (is_sampled ? 1 + granted : 0);
  span.sample_begin = cuda::block_exclusive_sum(of_samples, warp_values, &num_samples);
  if (is_sampled) span.first_choice = span.sample_begin + span.num_scored;
  begin_of[s] = row_begin;
  rows_of[s] = span;
  if (s < params.max_spans) {
    params.span_begin[s] = row_begin;
    params.span_kv_len[s] = span.kv_len;
    params.span_seq[s] = span.slot;
    params.num_offered[s] = offered;
    params.num_granted[s] = granted;
    params.first_choice[s] = span.first_choice;
    params.sample_begin[s] = span.sample_begin;
    if (params.folded_read != nullptr) {
      const int num_folded = s < header.num_spans ? table.num_folded[span.slot] : 0;
      const int after = folds ? folded_after(span.kv_len, span.num_new + granted) : 0;
      params.folded_read[s] = num_folded;
      params.folded_write[s] = span.num_new > 0 ? max(num_folded, after) : num_folded;
    }
  }
  if (s == 0) {
    params.span_begin[params.max_spans] = num_rows;
    params.sample_begin[params.max_spans] = num_samples;
  }
  __syncthreads();

  for (int row = threadIdx.x; row < params.num_rows; row += kThreads) {
    write_row(params, row, num_rows, header.num_spans, begin_of, rows_of);
  }
  for (int i = num_samples + threadIdx.x; i < params.num_samples; i += kThreads) {
    params.sample_row[i] = -1;
    params.score_token[i] = -1;
  }
}

}  // namespace

int begin_step_cuda(const BeginStepParams& params, void* stream) {
  return cuda::launch(begin_step_kernel, 1, kThreads, 0, stream, params);
}

int merge_drafts_cuda(const MergeDraftsParams& params, void* stream) {
  const int num_blocks = (params.num_spans * 32 + kMergeThreads - 1) / kMergeThreads;
  const size_t shared_bytes =
      sizeof(int32_t) * (kMergeThreads / 32) * static_cast<size_t>(params.max_drafts);
  return cuda::launch(merge_drafts_kernel, num_blocks, kMergeThreads, shared_bytes, stream, params);
}

int layout_rows_cuda(const LayoutRowsParams& params, void* stream) {
  return cuda::launch(layout_rows_kernel, 1, kThreads, 0, stream, params);
}

}  // namespace openspec
