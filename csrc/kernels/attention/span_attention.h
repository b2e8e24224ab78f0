#pragma once

#include "kernels/common/exec.h"
#include "kernels/common/rows.h"

namespace openspec {

/// CUDA: a kernel and a cut for a step, instead of those that suit it: for tests and benchmarks.
/// Its results do not depend on them.
struct AttentionChoice {
  enum class Kernel { kSuited, kCluster, kWarp, kCta, kPrefill };
  Kernel kernel = Kernel::kSuited;
  int tile_pairs = 0;   // of kWarp and kCta
  int ctas_per_sm = 0;  // of kCta
  // 0: as suits. Of kWarp and kCta one of those in plan.cuh; of kPrefill 8 cuts tiles into
  // segments, another does not.
  int range_blocks = 0;
};

/// Grouped-query attention of every row over its committed prefix [0, span_kv_len) and, inside its
/// span, over itself and its ancestors (row_parent), or over all rows (is_causal), whose KV is
/// already in the pages.
///
/// Row r of a span keeps its KV at token index span_kv_len + (r - span_begin). For a chain that is
/// the row's position, so a row sees the same tokens in the same order whether they are committed
/// or drafted: scores, maximum, exponentials and the weighted sum are taken in token order, and a
/// row's output is a bitwise function of its own prefix. (Blocks of 128 visible tokens, merged in
/// order; see span_attention_cpu.cpp.)
///
/// On the CPU head_dim is a multiple of 32 up to 256, and pages should be aligned to 64 bytes.
struct SpanAttentionParams {
  RowBatch rows;
  const void* q = nullptr;  // [num_rows, num_q_heads * head_dim] dtype
  void* out = nullptr;      // [num_rows, num_q_heads * head_dim] dtype
  KvLayerView kv;
  PageTableView page_table;
  int num_q_heads = 0;
  float scale = 0.0f;  // 1 / sqrt(head_dim)
  DType dtype = DType::kF32;
  float* workspace = nullptr;  // span_attention_workspace_bytes_cpu(...)
  int max_tokens = 0;          // longest context (prefix + span) the workspace was sized for
  int first_token = 0;  // tokens before it are not seen; at most 32, and below every row's position
  // False: every row of a span sees all of its rows, before and after it, as those of a block that
  // is drafted at once. Spans are no trees then.
  bool is_causal = true;
  // A sliding window; 0: none. Rows see the last `window` committed tokens of their span, and of
  // their span what is_causal says: a block that is drafted at once sees what its first row sees.
  // Where it follows the rows, which are causal then, a row sees the last `window` tokens of all
  // that it would see, its own included. The plan does not depend on it.
  int window = 0;
  bool window_follows_rows = false;
  // CUDA: promises that between the plan and this op, and after all that wrote the page table and
  // the prefixes' KV, there was a fence (RopeAnglesParams). These are then read before the previous
  // op is complete.
  bool is_behind_fence = false;
  AttentionChoice choice = {};
};

/// Scratch for every thread, and room for the blocks of one long context that several threads
/// share.
size_t span_attention_workspace_bytes_cpu(int num_threads, int num_q_heads, int max_tokens);
void span_attention_cpu(const ExecContext& exec, const SpanAttentionParams& params);

/// CUDA: a step of chains with these numbers of rows is attended to faster if it has room for few
/// spans, kFewSpans at most, and expects none to be longer than short_kv_len(). Up to
/// kMaxRowsOfShortSpans rows, steps with room for most_short_spans_cuda() spans are faster as well,
/// and those with room for one faster still.
inline constexpr int kFewSpans = 4;
inline constexpr int short_kv_len(int num_rows, int num_spans) {
  return num_rows <= 8 && num_spans <= 2 ? 2048 : 1024;
}
inline constexpr int kMinRowsOfFewSpans = 5, kMaxRowsOfFewSpans = 32;
inline constexpr int kMaxRowsOfShortSpans = 16;
/// Spans whose clusters take two rounds at most on the current device; 0: it has none for such
/// heads.
int most_short_spans_cuda(int num_kv_heads, int head_dim);
/// CUDA: from so many rows on long spans, as of prompts, have a kernel of their own on sm_90a. A
/// step that expects none (RowBatch::max_span_rows) does without its launch.
inline constexpr int kMinRowsOfLongSpans = 97;
/// CUDA: rows of a span that is no chain, at most.
inline constexpr int kMaxTreeRows = 256;

/// bf16, head_dim 64, 128 or 256, num_q_heads / num_kv_heads in [1, 8]. Heads of 256: chains alone,
/// on devices with 201 KiB of shared memory for a block of threads.
size_t span_attention_workspace_bytes_cuda(int max_num_rows, int max_num_spans, int num_q_heads,
                                           int head_dim, int max_tokens);
/// Whether the current device has kernels for heads of a size.
bool has_span_attention_cuda(int head_dim);
/// Lists the step's work in the workspace, from the lengths on the device: once per step, before
/// the first layer's span_attention_cuda. Only the geometry in `params` counts.
int span_attention_plan_cuda(const SpanAttentionParams& params, void* stream);
int span_attention_cuda(const SpanAttentionParams& params, void* stream);

}  // namespace openspec
