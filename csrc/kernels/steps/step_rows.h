#pragma once

#include <cstddef>
#include <cstdint>

#include "core/copied_drafts.h"
#include "kernels/choose/sampling_params.h"
#include "kernels/common/exec.h"
#include "kernels/common/expert_counts.h"
#include "kernels/common/rows.h"

/// The small ops around the forward pass of a step on CUDA: what the host plans in terms of
/// sequences becomes rows, and the rows' choices become committed tokens, without the host. The CPU
/// engine does the same in core/row_layout.h and runtime/step/host_step.cpp, which the tests
/// compare with.
namespace openspec {

struct ExchangeState;

/// The sequence table in device memory, by slot.
struct DeviceTable {
  int32_t* tokens = nullptr;  // [max_num_seqs, tokens_stride] history, last token included
  int64_t tokens_stride = 0;
  int32_t* num_tokens = nullptr;      // [max_num_seqs]
  int32_t* kv_len = nullptr;          // [max_num_seqs] tokens whose KV is committed
  int32_t* prompt_len = nullptr;      // [max_num_seqs]
  int32_t* max_num_tokens = nullptr;  // [max_num_seqs] prompt and output, at most
  int32_t* is_active = nullptr;       // [max_num_seqs] 0: finished, computes no more rows
  int32_t* pages = nullptr;           // [max_num_seqs, max_pages_per_seq]
  int max_pages_per_seq = 0;
  SamplingParams* sampling = nullptr;  // [max_num_seqs]
  int32_t* kept_begin = nullptr;       // [max_num_seqs] see KeptRows; null: nothing is kept
  // Bases of running states (runtime/state/slot_bases.h): the pages that each lies in, those that a
  // step folds it into, and the blocks that it holds.
  int32_t *base_pages = nullptr, *base_targets = nullptr;  // [max_num_seqs, pages_per_base]
  int32_t* num_folded = nullptr;                           // [max_num_seqs]
  int pages_per_base = 0;                                  // 0: there are no bases
};

/// What the host says of one sequence's share of a step.
struct StepSpan {
  int32_t slot = 0;
  int32_t num_new_tokens = 0;  // known tokens to compute: 1 in decode
  int32_t max_drafts = 0;      // that pages are reserved for
  float acceptance =
      0.0f;            // conditional, of each draft: which drafts go first where rows are short
  int32_t folds = 0;   // boolean: there are pages to fold the base into
  uint64_t owner = 0;  // see RecallParams
  float copied_acceptance[kNumCopyClasses] = {};  // `acceptance` of copies, see ChooseSourceParams
};
/// A slot that the host (re)wrote.
struct SlotUpdate {
  int32_t slot = 0, num_tokens = 0, kv_len = 0, prompt_len = 0, max_num_tokens = 0, is_active = 0;
  int32_t num_folded = 0;
};
struct PageUpdate {
  int32_t slot = 0, index = 0, page = 0;
};
struct StepHeader {
  int32_t num_spans = 0, num_slot_updates = 0, num_page_updates = 0;
  int32_t row_budget = 0;  // rows to lay, drafts included, at most
  int32_t ring_index = 0;  // where the outcome goes
  // See ChooseSourceParams: tokens that a row costs, and drafts that get rows of each span that has
  // any, were all to get as many.
  float row_price = 0.0f;
  int32_t row_share = 0;
};

/// What the ops of a step read of it, in device memory.
struct StepInput {
  const StepHeader* header = nullptr;
  const StepSpan* spans = nullptr;  // [max_spans]
};

inline constexpr int kMaxStepSpans = 1024;  // sequences of a step

/// Takes a step's input from where the host wrote it, applies the updates and says how many drafts
/// each span may have. Launched anew for each step, for where its input lies is an argument; what
/// it leaves is found by recorded ops.
struct BeginStepParams {
  StepHeader header;
  // In pinned host memory, read as it lies there.
  const StepSpan* host_spans = nullptr;      // [header.num_spans]
  const SlotUpdate* slot_updates = nullptr;  // [header.num_slot_updates]
  const PageUpdate* page_updates = nullptr;  // [header.num_page_updates]
  const int32_t* base_targets = nullptr;  // [header.num_spans, pages_per_base] of those that fold
  DeviceTable table;
  int max_spans = 0;
  StepHeader* out_header = nullptr;  // for the step's StepInput
  StepSpan* spans = nullptr;         // out [header.num_spans], for the step's StepInput
  int32_t* seq = nullptr;            // out [max_spans] slot of each span; 0 after the last one
  int32_t* num_wanted = nullptr;     // out [max_spans] drafts that can still be used; 0 for a span
                                     // that ends before the last known token, or is finished
  uint64_t* owners = nullptr;        // out [max_spans]; null: nobody asks
  int max_drafter_drafts = 0;
  int32_t* num_drafter_wanted = nullptr;  // out [max_spans] of these what a drafter may have; null:
                                          // all of them
};
int begin_step_cuda(const BeginStepParams& params, void* stream);

/// Copies of a step: what followed earlier places that are like the ends of the texts.
struct CopiedDrafts {
  int max_drafts = 0;                   // of a span; 0: the step has none
  const int32_t* drafts = nullptr;      // [max_spans, max_drafts]
  const int32_t* num_drafts = nullptr;  // [max_spans]
  const int32_t* match_len = nullptr;   // [max_spans], see CopyLookupParams
};

/// Takes the drafts of each span from its drafter or from its copy, whichever is worth more
/// (core/copied_drafts.h), the drafter's where they are equal. Drafts count as far as they are
/// likely to get rows: a copy may be longer than the step has room for.
struct ChooseSourceParams {
  StepInput input;
  StepSpan* spans = nullptr;  // out: `acceptance` becomes that of what is taken
  int max_spans = 0;
  CopiedDrafts copied = {};
  bool takes_copies = false;  // else they are only judged
  // The drafter's, [max_spans, max_drafter_drafts] and [max_spans]; null counts: it has none.
  int max_drafter_drafts = 0;
  const int32_t *drafter_drafts = nullptr, *num_drafter_drafts = nullptr,
                *drafter_parents = nullptr;
  const float* drafter_scores = nullptr;
  // out, as for layout_rows
  int max_drafts = 0;
  int32_t *drafts = nullptr, *num_drafts = nullptr;
  int32_t* parents = nullptr;     // null: chains
  float* scores = nullptr;        // null: none
  int32_t* is_copied = nullptr;   // [max_spans], as the next
  int32_t* copy_class = nullptr;  // -1: there is no copy
};
int choose_source_cuda(const ChooseSourceParams& params, void* stream);

/// Puts drafts from the host first, before those of the device (core/put_first.h).
struct MergeDraftsParams {
  // In pinned host memory: tokens of each span that come first.
  const int32_t* num_lead = nullptr;  // [num_spans]
  const int32_t* lead = nullptr;      // [num_spans, max_drafts]
  int num_spans = 0;
  int max_drafts = 0;
  bool has_drafts = false;  // whether there are any besides
  // In and out, as for layout_rows.
  int32_t* drafts = nullptr;
  int32_t* num_drafts = nullptr;
  int32_t* parents = nullptr;  // null: chains
  float* scores = nullptr;     // null: none
};
int merge_drafts_cuda(const MergeDraftsParams& params, void* stream);

/// Spends the row budget on drafts and lays all rows out, as RowLayout does: span after span, known
/// tokens, then drafts. Where the budget is short, drafts go in falling order of survival (by their
/// scores, or else acceptance to the power of their place), equal ones in rounds over the spans. A
/// draft that is no token id, stands before the one that it follows or has a higher score than one
/// before it ends its span's drafts.
struct LayoutRowsParams {
  StepInput input;
  DeviceTable table;
  const int32_t* num_wanted = nullptr;  // [max_spans]
  const int32_t* drafts = nullptr;      // [max_spans, max_drafts]
  const int32_t* num_drafts = nullptr;  // [max_spans]
  const int32_t* parents = nullptr;     // [max_spans, max_drafts] of trees, see Draft; null: chains
  const float* scores = nullptr;        // [max_spans, max_drafts], see Draft; null: none
  int max_spans = 0;
  int max_drafts = 0;
  int page_size = 0;
  int vocab_size = 0;
  int num_rows = 0;     // rows of the batch, padding included
  int num_samples = 0;  // entries of sample_row, padding included
  // out
  int32_t* row_token = nullptr;  // [num_rows], as the next four
  int32_t* row_position = nullptr;
  int32_t* row_span = nullptr;
  int32_t* row_parent = nullptr;
  int64_t* row_kv_slot = nullptr;
  int32_t* span_begin = nullptr;   // [max_spans + 1]
  int32_t* span_kv_len = nullptr;  // [max_spans], as the following but sample_begin
  int32_t* span_seq = nullptr;
  int32_t* num_offered = nullptr;   // usable drafts
  int32_t* num_granted = nullptr;   // of these, drafts that got a row
  int32_t* first_choice = nullptr;  // sample of the last known token; -1: none
  int32_t* sample_begin = nullptr;  // [max_spans + 1]
  int32_t* sample_row = nullptr;    // [num_samples]
  int32_t* score_token = nullptr;   // [num_samples]
  // [max_spans] Blocks in the span's base before and after the step; null: there are no bases.
  int32_t *folded_read = nullptr, *folded_write = nullptr;
};
int layout_rows_cuda(const LayoutRowsParams& params, void* stream);

/// What a step did for one span.
struct StepOutcome {
  int32_t num_computed = 0;  // tokens whose KV became committed
  int32_t num_tokens = 0;    // chosen tokens, in CommitRowsParams::tokens
  int32_t finish = 0;        // FinishReason
  int32_t num_drafts = 0;    // drafts that had rows
  int32_t num_accepted = 0;  // drafts among the chosen tokens
  int32_t num_offered = 0;
  int32_t num_judged = 0;  // see DraftJudgement
  int32_t num_right = 0;
  int32_t first_choice = -1, sample_begin = 0, sample_end = 0;
  int32_t has_scores = 0;  // whether the drafts in the ring have scores
  int32_t is_copied = 0;   // whether drafts after those of the host are a copy
  int32_t copy_class = -1, num_copied_judged = 0, num_copied_right = 0;  // see CopyJudgement
  int32_t num_folded = 0;  // blocks in the base after the step
};

/// Accepts the longest run of drafts that equal the choices (accept_drafts), stops at stop ids and
/// limits, and commits: history, lengths, and the outcome to the ring in pinned memory. A run ends
/// before a choice of -1, which is none; the last token of what is known is computed again then.
struct CommitRowsParams {
  StepInput input;
  DeviceTable table;
  bool keeps_rows = false;           // for the drafter, which else learns from them now
  const int32_t* drafts = nullptr;   // [max_spans, max_drafts], as for layout_rows
  const int32_t* parents = nullptr;  // [max_spans, max_drafts]; null: chains
  const float* scores = nullptr;     // [max_spans, max_drafts]; null: none
  CopiedDrafts copied = {};          // verified or not
  // [max_spans] as of choose_source, where there are copies
  const int32_t *is_copied = nullptr, *copy_class = nullptr;
  const int32_t* span_begin = nullptr;  // [num_spans + 1] first row of each span
  const int32_t* num_offered = nullptr;
  const int32_t* num_granted = nullptr;
  const int32_t* first_choice = nullptr;
  const int32_t* sample_begin = nullptr;  // [max_spans + 1]
  const int32_t* chosen = nullptr;        // [num_samples]
  // [num_spans] as of layout_rows; what was folded becomes the base. Null: there are none.
  const int32_t *folded_read = nullptr, *folded_write = nullptr;
  // Log-probabilities of the samples, or null; see ChooseParams.
  const int32_t* logprob_ids = nullptr;
  const float* logprobs = nullptr;
  const int32_t* ranks = nullptr;
  int num_spans = 0;  // room of the step's arrays
  int max_spans = 0;  // that an entry of the ring has room for, as the next two
  int max_drafts = 0;
  int max_samples = 0;
  int32_t* num_computed = nullptr;  // out [num_spans], for what follows in the same step
  // out [num_rows] with parents: which rows count, see ExtendRowsParams
  int32_t* committed_row = nullptr;
  // out, each [ring, ...], pinned
  StepOutcome* outcomes = nullptr;  // [ring, max_spans]
  int32_t* tokens = nullptr;        // [ring, max_spans, 1 + max_drafts], as the next
  int32_t* samples = nullptr;       // where each was chosen
  // [ring, max_spans, max_drafts] drafts that had rows, for sequences with reports_steps
  int32_t *out_drafts = nullptr, *out_parents = nullptr;
  float* out_scores = nullptr;
  int32_t* out_logprob_ids = nullptr;  // [ring, max_samples, 1 + kMaxLogprobs], as the next
  float* out_logprobs = nullptr;
  int32_t* out_ranks = nullptr;  // [ring, max_samples]
  // Where ranks share the target, this one's: what it counted goes to out_counts, too.
  ExchangeState* exchange = nullptr;
  ExchangeCounts* out_counts = nullptr;  // [ring]
  // Of a target with experts: what they have done so far goes to out_experts, too.
  const ExpertCounts* experts = nullptr;
  ExpertCounts* out_experts = nullptr;  // [ring]
};
int commit_rows_cuda(const CommitRowsParams& params, void* stream);

}  // namespace openspec
