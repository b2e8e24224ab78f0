#pragma once

#include <algorithm>
#include <vector>

#include "kernels/steps/step_rows.h"
#include "model/weights/buffer.h"
#include "runtime/drafting/runner_config.h"

namespace openspec {

inline size_t as_index(int i) { return static_cast<size_t>(i); }

/// The most drafts of a sequence, or 1: D below.
inline size_t most_drafts(const RunnerConfig& config) {
  return as_index(std::max(1, config.draft_room()));
}

/// What the host tells a step: an entry of its ring in pinned memory, or what stays of it on the
/// device, which has no updates. S is max_num_seqs.
struct StepInputArrays {
  StepHeader* header = nullptr;        // the device's
  StepSpan* spans = nullptr;           // [S]
  SlotUpdate* slot_updates = nullptr;  // [S]
  PageUpdate* page_updates = nullptr;
  int32_t* base_targets = nullptr;               // [S, P], P of a base
  int32_t *num_lead = nullptr, *lead = nullptr;  // [S], [S, D], see MergeDraftsParams
  int32_t* kept_slots = nullptr;                 // [S], whose kept rows are learned before
  // Proposals of a drafter that works on the host: up to the entry's end.
  int32_t *num_drafts = nullptr, *drafts = nullptr, *parents = nullptr;  // [S], [S, D], [S, D]
};

/// What steps leave for the host, in pinned memory.
struct StepOutcomeArrays {
  StepOutcome* outcomes = nullptr;                // [ring, S]
  int32_t *tokens = nullptr, *samples = nullptr;  // [ring, S, 1 + D]
  // Of sequences that want to know: what had rows.
  int32_t *drafts = nullptr, *parents = nullptr;     // [ring, S, D]
  float* scores = nullptr;                           // [ring, S, D]
  int32_t *logprob_ids = nullptr, *ranks = nullptr;  // [ring, R, 1 + kMaxLogprobs], [ring, R]
  float* logprobs = nullptr;                         // [ring, R, 1 + kMaxLogprobs]
  ExchangeCounts* exchange = nullptr;                // [ring], where ranks share the target
  ExpertCounts* experts = nullptr;                   // [ring] so far, of a target with experts
};

/// A step's arrays on the device; R is max_num_batched_tokens. The kernels' contracts say more.
struct DeviceArrays {
  DeviceTable table;
  StepInputArrays input;
  int32_t *seq = nullptr, *num_wanted = nullptr, *span_kv_len = nullptr, *span_seq = nullptr,
          *num_offered = nullptr, *num_granted = nullptr, *num_computed = nullptr,
          *first_choice = nullptr;                                       // [S], as the next
  int32_t *folded_read = nullptr, *folded_write = nullptr;               // null without bases
  int32_t *span_begin = nullptr, *sample_begin = nullptr;                // [S + 1]
  int32_t *num_drafts = nullptr, *drafts = nullptr, *parents = nullptr;  // [S], [S, D], [S, D]
  float* scores = nullptr;                                               // [S, D]
  // Where there are copies, C of a sequence at most: those, and the drafter's of which at most P.
  int32_t *num_copied = nullptr, *copied = nullptr;     // [S], [S, C]
  int32_t *is_copied = nullptr, *copy_class = nullptr;  // [S]
  int32_t *num_drafter_wanted = nullptr, *num_drafter_drafts = nullptr, *drafter_drafts = nullptr,
          *drafter_parents = nullptr;  // [S], [S], [S, P], [S, P]
  uint64_t* owners = nullptr;          // [S]
  float* drafter_scores = nullptr;     // [S, P]
  int32_t *row_token = nullptr, *row_position = nullptr, *row_span = nullptr, *row_parent = nullptr,
          *committed_row = nullptr, *sample_row = nullptr, *score_token = nullptr,
          *chosen = nullptr, *ranks = nullptr;  // [R]
  int64_t* row_kv_slot = nullptr;               // [R]
  int32_t* logprob_ids = nullptr;               // [R, 1 + kMaxLogprobs], as the next
  float *logprobs = nullptr, *logits = nullptr, *choose_workspace = nullptr;

  /// Sets all of it to parts of the memory at `base`, or to null with it; `pages_per_base`: of the
  /// target's running states, or 0. Returns bytes.
  size_t lay_out(std::byte* base, const RunnerConfig& config, const DrafterNeeds& needs,
                 int pages_per_base);
};

/// What the host tells steps, in pinned memory that all devices read.
class StepInputs {
 public:
  /// Two steps are in flight at most; the others are being read, or were given up.
  static constexpr int kRing = 4;

  StepInputs(const RunnerConfig& config, const DrafterNeeds& needs, int pages_per_base);
  const StepInputArrays& operator[](int entry) const { return entries_[as_index(entry)]; }

  const size_t max_page_updates;

 private:
  std::vector<StepInputArrays> entries_;  // [ring]
  Buffer memory_;
};

/// The memory of a device's arrays, and of what its steps leave for the host.
class DeviceBuffers : public DeviceArrays {
 public:
  /// Of a slot's lists of sampling parameters, at first: most requests' fit.
  static constexpr size_t kListBytes = 4096;

  DeviceBuffers(const RunnerConfig& config, const DrafterNeeds& needs, int pages_per_base,
                void* stream);
  /// Bytes on the device.
  static size_t device_bytes(const RunnerConfig& config, const DrafterNeeds& needs,
                             int pages_per_base);

  StepOutcomeArrays outcome;
  /// All of the arrays on the device.
  Buffer& memory() { return scratch_; }
  /// Copies the proposals of a step's input to the device.
  void upload_proposals(const StepInputArrays& host, void* stream) const;

 private:
  size_t proposal_bytes_ = 0;
  Buffer scratch_, outcomes_;
};

}  // namespace openspec
