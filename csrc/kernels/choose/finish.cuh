#pragma once

/// The second kernel of `choose`: what the first could not decide on its one pass over the row.

#include <cstdint>

#include "kernels/choose/edit.cuh"
#include "kernels/choose/filter.cuh"
#include "kernels/choose/rejection.cuh"

namespace openspec::choosing {

/// `kHasDrafts`: step 4 too; without it a row costs as much as if there were no such step.
template <bool kHasDrafts>
class RowFinisher {
 public:
  __device__ RowFinisher(const ChooseParams& params, int sample, const RowPlan& plan,
                         const RowWorkspace& workspace, Shared& shared)
      : params_(params),
        sample_(sample),
        plan_(plan),
        workspace_(workspace),
        sampling_(params.sampling[plan.slot]),
        raw_(row_logits(params, sample)),
        shared_(shared),
        filter_(sampling_, workspace, shared),
        cluster_(filter_.cluster()) {}

  __device__ void run() {
    const View raw = view_of(raw_, 1.0f);
    if (plan_.has(RowPlan::kIsScored)) {
      const int32_t id = params_.score_token[sample_];
      write_chosen(id);
      if (plan_.has(RowPlan::kIsReported))
        report_all(raw, id, max(0, sampling_.num_prompt_logprobs));
      return;
    }
    View view = raw;
    if (plan_.has(RowPlan::kIsDrawn)) view.scale = 1.0f / sampling_.temperature;
    const bool is_filtered = plan_.has(RowPlan::kIsFiltered);
    uint64_t best = 0;
    if (plan_.has(RowPlan::kIsEdited)) {
      view.values = workspace_.edited;
      RowEditor(params_, sample_, plan_, workspace_, source_of(view)).run();
      best = within_mask(walk_edited(view));
    } else if (!is_filtered) {
      best = best_of_groups(workspace_.best);
    }
    DraftRow draft;
    if constexpr (kHasDrafts) {
      if (plan_.has(RowPlan::kHasDraft)) draft = read_draft(params_, plan_, cluster_);
    }
    if (is_filtered) {
      filter(view, draft);
      return;
    }
    if constexpr (kHasDrafts) {
      if (draft.is_known()) {
        if (!plan_.has(RowPlan::kIsEdited)) filter_.load_largest();
        RowSource row = source_of(view);
        best = choose_by_rejection(row, Filters{view, filter_.maximum_of(view), 0.0f, 0, 0}, draft,
                                   sampling_, plan_.position + 1, best);
      }
    }
    write_chosen(id_of(best));
    if (!plan_.has(RowPlan::kIsReported)) return;
    report_all(sampling_.raw_logprobs ? raw : view, id_of(best), sampling_.num_logprobs);
  }

  /// The choice of a row that the first kernel has decided; for one warp.
  __device__ static uint64_t best_of_groups(const uint64_t* keys) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kGroups; i += kWarp) best = max_key(best, keys[i + lane_index()]);
    return warp_max(best);
  }

 private:
  __device__ View view_of(const float* values, float scale) const {
    return {values, params_.vocab_size, scale};
  }
  __device__ RowSource source_of(const View& view) { return filter_.source_of(view); }
  __device__ void write_chosen(int32_t id) const {
    if (cluster_.is_first_thread()) {
      params_.chosen[sample_] = token_of_column(params_.token_of, id);
    }
  }

  /// Each warp walks over groups of its CTA's share as the first kernel does; returns the best
  /// candidate of the row (of argmax, where the row is to be filtered). Leaves the groups' largest
  /// logits in shared memory.
  __device__ uint64_t walk_edited(const View& view) {
    const bool is_drawn = plan_.has(RowPlan::kIsDrawn) && !plan_.has(RowPlan::kIsFiltered);
    const GroupWalk walk{view, is_drawn ? &sampling_ : nullptr, plan_.position + 1, nullptr, false};
    const int share = kGroups / cluster_.size();
    const int lane = lane_index();
    uint64_t best = 0;
#pragma unroll 1
    for (int i = warp_index(); i < share; i += kWarps) {
      const int group = cluster_.rank() * share + i;
      Batch batch;
      batch.load(view.values, view.size, group, lane);
      const GroupBest result = walk.run(batch, group, lane);
      best = max_key(best, result.best);
      if (lane < cluster_.size()) on_rank(shared_.largest, lane)[group] = result.largest;
    }
    return cluster_.max(best);
  }

  /// The candidate itself, or the lowest token of the row's mask where that leaves no logit.
  __device__ uint64_t within_mask(uint64_t best) const {
    const int32_t* mask = row_mask_of(params_, sample_);
    if (mask == nullptr || is_allowed_by(mask, id_of(best))) return best;
    // Not candidate_key, which is 0 for -inf.
    return static_cast<uint64_t>(order_key(minus_infinity())) << 32 |
           ~static_cast<uint32_t>(lowest_allowed_by(mask));
  }

  __device__ void filter(const View& view, const DraftRow& draft);
  template <typename Source>
  __device__ uint64_t draw(Source& source, const Filters& filters, const DraftRow& draft) const;

  __device__ int num_best_to_report(int wanted) const {
    return params_.logprobs == nullptr ? 0 : min(wanted, kMaxLogprobs);
  }
  __device__ void report_all(const View& view, int32_t id, int num_wanted);
  template <typename Source>
  __device__ void report_kept(Source& source, const Filters& filters, uint64_t best);

  struct Report {
    int32_t id;
    float logit;
    uint64_t num_ahead;  // tokens that rank before it
    float maximum;
    uint64_t total;  // of the weights
    int num_best;
    int num_found;  // of these, in shared_.best; -inf and what was dropped follow
    bool nan_comes_last;
  };
  __device__ void write(const Report& report, const View& view) const;

  const ChooseParams& params_;
  const int sample_;
  const RowPlan& plan_;
  const RowWorkspace& workspace_;
  const SamplingParams& sampling_;
  const float* const raw_;
  Shared& shared_;
  RowFilter filter_;
  Cluster& cluster_;
};

template <bool kHasDrafts>
__device__ void RowFinisher<kHasDrafts>::filter(const View& view, const DraftRow& draft) {
  if (!plan_.has(RowPlan::kIsEdited)) filter_.load_largest();
  const bool reports_raw = plan_.has(RowPlan::kIsReported) && sampling_.raw_logprobs;
  const bool reports_kept = plan_.has(RowPlan::kIsReported) && !sampling_.raw_logprobs;
  uint64_t best = 0;
  filter_.narrow(view, [&](auto& source, const Filters& filters) {
    best = within_mask(draw(source, filters, draft));
    if (reports_kept) report_kept(source, filters, best);
  });
  write_chosen(id_of(best));
  if (!reports_raw) return;
  best = cluster_.exchange(best)[0];
  report_all(view_of(raw_, 1.0f), id_of(best), sampling_.num_logprobs);
}

/// The candidate key of the token chosen among what passes the filters.
template <bool kHasDrafts>
template <typename Source>
__device__ uint64_t RowFinisher<kHasDrafts>::draw(Source& source, const Filters& filters,
                                                  const DraftRow& draft) const {
  const uint64_t seed = sampling_.seed;
  const int32_t position = plan_.position + 1;
  uint64_t best = 0;
  source.for_each([&](int32_t id, float value) {
    if (!filters.keeps(value)) return;
    const int32_t token = token_of_column(params_.token_of, id);
    const float score = filters.view.at(value) + sm::gumbel(seed, position, token);
    best = max_key(best, candidate_key(score, id));
  });
  best = source.max(best);
  if constexpr (kHasDrafts) {
    if (draft.is_known()) {
      best = choose_by_rejection(source, filters, draft, sampling_, position, best);
    }
  }
  return best;
}

/// Log-probabilities over the whole row.
template <bool kHasDrafts>
__device__ void RowFinisher<kHasDrafts>::report_all(const View& view, int32_t id, int num_wanted) {
  RowSource row = source_of(view);
  if (view.values == raw_) filter_.load_largest();
  Report report{};
  report.id = id;
  report.maximum = filter_.maximum_of(view);
  report.num_best = num_best_to_report(num_wanted);
  report.nan_comes_last = true;
  // A CTA may have edited this logit that is not the one reading it: past the L1 cache.
  const bool is_token = id >= 0 && id < view.size;
  report.logit = is_token ? view.at(__ldcg(view.values + id)) : minus_infinity();
  float bound = -minus_infinity();
  if (report.num_best > 0) bound = view.at(bound_of_kth_largest(shared_, report.num_best));
  const auto key_of = [&](int32_t other_id, float value) {
    const float other = view.at(value);
    return other >= bound ? candidate_key(other, other_id) : 0;
  };
  clear_list(shared_);
  row.for_each([&](int32_t other_id, float value) {
    const float other = view.at(value);
    report.total += sm::fixed_mass(sm::exp_f32(other - report.maximum));
    const bool is_ahead = other > report.logit || (other == report.logit && other_id < id);
    report.num_ahead += is_ahead ? 1 : 0;
    if (other >= bound && other > minus_infinity()) add_to_list(shared_, other_id, value);
  });
  report.total = cluster_.sum(report.total);
  report.num_ahead = cluster_.sum(report.num_ahead);
  if (report.num_best > 0) {
    const int num_listed = gather_list(shared_, cluster_);
    if (num_listed > kListCapacity) {
      report.num_found = best_of(row, shared_, report.num_best, key_of);
    } else if (cluster_.rank() == 0) {
      ListSource list(shared_, num_listed);
      report.num_found = best_of(list, shared_, report.num_best, key_of);
    }
  }
  write(report, view);
}

/// Log-probabilities among what passed the filters.
template <bool kHasDrafts>
template <typename Source>
__device__ void RowFinisher<kHasDrafts>::report_kept(Source& source, const Filters& filters,
                                                     uint64_t best) {
  const View& view = filters.view;
  Report report{};
  report.id = id_of(best);
  report.maximum = filters.maximum;
  report.num_best = num_best_to_report(sampling_.num_logprobs);
  report.logit = best == 0 ? minus_infinity() : view.at(__ldcg(view.values + report.id));
  // With fewer than k logits above -inf, -inf itself is kept, but NaN is not.
  report.nan_comes_last = has_top_k(sampling_, view.size) && filters.kth == 0 &&
                          filters.passes_min_p(0.0f) && filters.least_weight == 0;
  source.for_each([&](int32_t other_id, float value) {
    if (!filters.keeps(value)) return;
    const float other = view.at(value);
    report.total += sm::fixed_mass(filters.weight(value));
    const bool is_equal = other == report.logit && other > minus_infinity();
    const bool is_ahead = other > report.logit || (is_equal && other_id < report.id);
    report.num_ahead += is_ahead ? 1 : 0;
  });
  report.total = source.sum(report.total);
  report.num_ahead = source.sum(report.num_ahead);
  report.num_found = best_of(source, shared_, report.num_best, [&](int32_t other_id, float value) {
    return filters.keeps(value) ? candidate_key(view.at(value), other_id) : 0;
  });
  write(report, view);
}

/// By one warp.
template <bool kHasDrafts>
__device__ void RowFinisher<kHasDrafts>::write(const Report& report, const View& view) const {
  if (cluster_.rank() != 0 || warp_index() != 0) return;
  const int lane = lane_index();
  if (params_.ranks != nullptr && lane == 0) {
    params_.ranks[sample_] = static_cast<int32_t>(report.num_ahead + 1);
  }
  if (params_.logprobs == nullptr) return;
  const float log_total = report.total == 0 ? 0.0f : sm::log_f32(sm::mass_to_float(report.total));
  const auto log_probability = [&](float logit) {
    return logit > minus_infinity() ? (logit - report.maximum) - log_total : minus_infinity();
  };
  int32_t* ids = params_.logprob_ids + static_cast<int64_t>(sample_) * (1 + kMaxLogprobs);
  float* values = params_.logprobs + static_cast<int64_t>(sample_) * (1 + kMaxLogprobs);
  if (lane == 0) {
    ids[0] = report.id;
    values[0] = log_probability(report.logit);
  }
  if (lane < report.num_found) {
    ids[1 + lane] = id_of(shared_.best[lane]);
    values[1 + lane] = log_probability(value_of(shared_.best[lane]));
  }
  // The lowest ids that are not there follow, at -inf.
  int num_listed = report.num_found;
  const auto list = [&](bool is_candidate, int32_t id) {
    const unsigned candidates = __ballot_sync(kAllLanes, is_candidate);
    const int at = num_listed + __popc(candidates & ((1u << lane) - 1));
    if (is_candidate && at < report.num_best) {
      ids[1 + at] = id;
      values[1 + at] = minus_infinity();
    }
    num_listed += __popc(candidates);
  };
  for (int pass = 0; pass < (report.nan_comes_last ? 2 : 1); ++pass) {
    for (int first = 0; first < view.size && num_listed < report.num_best; first += kWarp) {
      const int32_t id = first + lane;
      bool is_candidate = id < view.size;
      for (int i = 0; i < report.num_found; ++i) {
        is_candidate = is_candidate && id_of(shared_.best[i]) != id;
      }
      if (is_candidate && report.nan_comes_last) {
        const float value = __ldcg(view.values + id);
        is_candidate = (value != value) == (pass == 1);
      }
      list(is_candidate, id);
    }
  }
  while (num_listed < report.num_best) list(true, -1);
}

}  // namespace openspec::choosing
