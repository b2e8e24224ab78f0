#pragma once

/// Step 3's filters (choose.h), for whoever draws from what they leave: the choice and the best
/// drafts.

#include <cstdint>

#include "kernels/choose/team.cuh"

namespace openspec::choosing {

/// Step 3's filters: which logits of a row may be drawn.
struct Filters {
  View view;
  float maximum;  // of the row, as the sampler reads it
  float min_p;
  uint32_t kth;           // order_key of the k-th largest logit; 0: keeps all
  uint32_t least_weight;  // bits of the smallest weight that top_p keeps

  __device__ __forceinline__ float weight(float value) const {
    return sm::exp_f32(view.at(value) - maximum);
  }
  __device__ __forceinline__ bool passes_top_k(float value) const {
    return order_key(value) >= kth;
  }
  __device__ __forceinline__ bool passes_min_p(float weight) const { return !(weight < min_p); }
  __device__ __forceinline__ bool keeps(float value) const {
    if (!passes_top_k(value)) return false;
    const float w = weight(value);
    return passes_min_p(w) && sm::bits_of(w) >= least_weight;
  }
  /// top_k and min_p alone: what top_p takes its share of.
  __device__ __forceinline__ Measure mass(float value) const {
    if (!passes_top_k(value)) return {0, 0};
    const float w = weight(value);
    return {sm::bits_of(w), passes_min_p(w) ? sm::fixed_mass(w) : 0};
  }
};

/// Weights are at most 1: 30 bits.
constexpr int kWeightBits = 30;

/// Finds what passes the filters of one row. Every thread of the row's CTAs makes the same calls.
class RowFilter {
 public:
  __device__ RowFilter(const SamplingParams& sampling, const RowWorkspace& workspace,
                       Shared& shared)
      : sampling_(sampling), workspace_(workspace), shared_(shared), cluster_(shared) {}

  __device__ Cluster& cluster() { return cluster_; }
  __device__ RowSource source_of(const View& view) {
    return RowSource(cluster_, view.values, view.size);
  }

  /// The groups' largest logits, as the first kernel found them.
  __device__ void load_largest() {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kGroups; i += kThreads) {
      shared_.largest[i] = workspace_.largest[i];
    }
    __syncthreads();
  }
  /// Largest logit as the sampler reads it. From the largest stored one, as the product with the
  /// scale may overflow.
  __device__ float maximum_of(const View& view) const {
    uint32_t largest = 0;
    for (int i = lane_index(); i < kGroups; i += kWarp) largest = max(largest, shared_.largest[i]);
    largest = __reduce_max_sync(kAllLanes, largest);
    return view.at(value_of_order(largest));
  }

  /// Narrows the row down to a list that holds whatever passes the filters, for one CTA alone.
  /// Where too much passes, the same is done with passes over the row, by all. Calls
  /// use(source, filters); `shared.largest` is in place.
  template <typename Use>
  __device__ void narrow(const View& view, const Use& use);

 private:
  /// Bits of the smallest weight that top_p keeps, or of a lower bound. The mass wanted is taken of
  /// the first source asked, which holds all that passes top_k and min_p.
  template <typename Source>
  __device__ uint32_t select_weight(Source& source, const Filters& filters, uint64_t& wanted_mass,
                                    bool first_digit_only) const {
    const auto measure = [&](float value) { return filters.mass(value); };
    const auto wanted = [&](uint64_t total) {
      if (wanted_mass == 0) wanted_mass = max_key(1, sm::top_p_mass(sampling_.top_p, total));
      return wanted_mass;
    };
    return select_from_top(source, shared_, kWeightBits, first_digit_only, measure, wanted);
  }
  /// What is left to find once the source holds all that passes.
  template <typename Source>
  __device__ void complete(Source& source, Filters& filters, uint64_t& wanted_mass) const {
    if (has_top_k(sampling_, filters.view.size)) {
      filters.kth = select_kth(source, shared_, sampling_.top_k, [](float value) { return value; });
    }
    if (sampling_.top_p < 1.0f) {
      filters.least_weight = select_weight(source, filters, wanted_mass, false);
    }
  }

  const SamplingParams& sampling_;
  const RowWorkspace& workspace_;
  Shared& shared_;
  Cluster cluster_;
};

template <typename Use>
__device__ void RowFilter::narrow(const View& view, const Use& use) {
  RowSource row = source_of(view);
  Filters filters{view, maximum_of(view), sampling_.min_p, 0, 0};
  uint64_t wanted_mass = 0;
  clear_list(shared_);
  if (has_top_k(sampling_, view.size)) {
    float bound;
    if (sampling_.top_k <= kGroups / 2) {
      bound = bound_of_kth_largest(shared_, sampling_.top_k);
    } else {
      const auto as_stored = [](float value) { return value; };
      bound = value_of_order(select_kth(row, shared_, sampling_.top_k, as_stored));
    }
    // -inf is never drawn, so it stays off the list.
    row.for_each([&](int32_t id, float value) {
      if (value >= bound && value > minus_infinity()) add_to_list(shared_, id, value);
    });
  } else {
    uint32_t least_weight = 0;
    if (sampling_.top_p < 1.0f) least_weight = select_weight(row, filters, wanted_mass, true);
    row.for_each([&](int32_t id, float value) {
      const float weight = filters.weight(value);
      if (sm::bits_of(weight) >= least_weight && filters.passes_min_p(weight) &&
          value > minus_infinity()) {
        add_to_list(shared_, id, value);
      }
    });
  }
  const int num_listed = gather_list(shared_, cluster_);
  if (num_listed > kListCapacity) {
    complete(row, filters, wanted_mass);
    use(row, filters);
  } else if (cluster_.rank() == 0) {
    ListSource list(shared_, num_listed);
    complete(list, filters, wanted_mass);
    use(list, filters);
  }
}

}  // namespace openspec::choosing
