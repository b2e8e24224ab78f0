#pragma once

/// Steps 1 and 2 of `choose` (choose.h) on the copy of a row: bias, masks, penalties.

#include <cstdint>

#include "kernels/choose/team.cuh"

namespace openspec::choosing {

/// Each CTA edits the ids of its own share only, so that CTA barriers are enough.
class RowEditor {
 public:
  __device__ RowEditor(const ChooseParams& params, int sample, const RowPlan& plan,
                       const RowWorkspace& workspace, const RowSource& source)
      : params_(params),
        plan_(plan),
        sampling_(params.sampling[plan.slot]),
        source_(source),
        raw_(row_logits(params, sample)),
        mask_(row_mask_of(params, sample)),
        logits_(workspace.edited),
        counts_(workspace.counts) {}

  __device__ void run() {
    const bool is_penalised = has_penalties(sampling_);
    // The first kernel left -inf where the mask says so, and everywhere where only some tokens are
    // allowed.
    for_each_id(sampling_.allowed_ids, sampling_.num_allowed, [&](int, int32_t id) {
      if (mask_ == nullptr || is_allowed_by(mask_, id)) logits_[id] = raw_[id];
    });
    for_each_id(sampling_.bias_ids, sampling_.num_bias, [&](int, int32_t id) { counts_[id] = 0; });
    if (is_penalised) visit_history([&](int32_t id, bool) { counts_[id] = 0; });
    __syncthreads();
    if (sampling_.num_bias > 0) add_bias();
    if (masks_stop_ids(sampling_, plan_.position, params_.prompt_len[plan_.slot])) {
      for_each_id(sampling_.stop_ids, sampling_.num_stop_ids,
                  [&](int, int32_t id) { logits_[id] = minus_infinity(); });
      __syncthreads();
    }
    if (sampling_.num_bad_words > 0) {
      for (int i = static_cast<int>(threadIdx.x); i < sampling_.num_bad_words; i += kThreads) {
        const int32_t id = id_of_bad_word(params_, plan_.row, plan_.slot, i);
        if (is_own(id)) logits_[id] = minus_infinity();
      }
      __syncthreads();
    }
    if (is_penalised) penalise();
    __syncthreads();
  }

 private:
  __device__ bool is_own(int32_t id) const {
    return id >= 0 && id < params_.vocab_size && source_.owns(id);
  }
  template <typename Visit>
  __device__ void for_each_id(const int32_t* ids, int count, const Visit& visit) const {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      if (is_own(ids[i])) visit(i, ids[i]);
    }
  }

  /// An id's values are added in the order given, as rounding demands: ids that come more than once
  /// are left to the thread of their first place.
  __device__ void add_bias() {
    const int32_t* ids = sampling_.bias_ids;
    const float* values = sampling_.bias_values;
    for_each_id(ids, sampling_.num_bias, [&](int, int32_t id) { atomicAdd(&counts_[id], 1); });
    __syncthreads();
    for_each_id(ids, sampling_.num_bias, [&](int i, int32_t id) {
      if (__ldcg(&counts_[id]) == 1) {
        logits_[id] += values[i];
        return;
      }
      for (int j = 0; j < i; ++j) {
        if (ids[j] == id) return;
      }
      float logit = logits_[id];
      for (int j = i; j < sampling_.num_bias; ++j) {
        if (ids[j] == id) logit += values[j];
      }
      logits_[id] = logit;
    });
    __syncthreads();
    for_each_id(ids, sampling_.num_bias, [&](int, int32_t id) { counts_[id] = 0; });
    __syncthreads();
  }

  /// Calls visit(id, is_output) for every token before the one to choose: the history up to this
  /// row, then the drafts it follows.
  template <typename Visit>
  __device__ void visit_history(const Visit& visit) const {
    const int32_t* tokens = params_.tokens + plan_.slot * params_.tokens_stride;
    const int num_known = params_.num_tokens[plan_.slot];
    const int prompt_len = params_.prompt_len[plan_.slot];
    const int end = min(num_known, plan_.position + 1);
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < end; i += kThreads) {
      const int32_t id = tokens[i];
      if (is_own(id)) visit(id, i >= prompt_len);
    }
    if (warp_index() != 0) return;
    // A lane holds one of the 32 rows up to `row`; the path from parent to parent is followed among
    // the lanes, and goes on in earlier rows where it leaves them.
    const int32_t* positions = params_.rows.row_position;
    for (int row = plan_.row; row >= 0;) {
      const int first = row - (kWarp - 1);
      const int mine = first + lane_index();
      const int position = mine >= 0 ? positions[mine] : 0;
      const int parent = mine >= 0 ? params_.rows.row_parent[mine] : -1;
      bool is_draft = false;
      while (row >= 0 && row >= first && row < first + kWarp) {
        if (__shfl_sync(kAllLanes, position, row - first) < num_known) {
          row = -1;
          break;
        }
        is_draft = is_draft || row == mine;
        row = __shfl_sync(kAllLanes, parent, row - first);
      }
      if (!is_draft) continue;
      const int32_t id = params_.rows.row_token[mine];
      if (is_own(id)) visit(id, true);
    }
  }

  __device__ void penalise() {
    constexpr int32_t kInPrompt = 1 << 30;
    visit_history([&](int32_t id, bool is_output) {
      if (is_output) {
        atomicAdd(&counts_[id], 1);
      } else {
        atomicOr(&counts_[id], kInPrompt);
      }
    });
    __syncthreads();
    visit_history([&](int32_t id, bool) {
      const int32_t count = atomicExch(&counts_[id], 0);
      if (count == 0) return;  // another occurrence has been faster
      logits_[id] = penalised(sampling_, logits_[id], count & ~kInPrompt);
    });
  }

  const ChooseParams& params_;
  const RowPlan& plan_;
  const SamplingParams& sampling_;
  const RowSource& source_;
  const float* const raw_;
  const int32_t* const mask_;  // or null
  float* const logits_;
  int32_t* const counts_;
};

}  // namespace openspec::choosing
