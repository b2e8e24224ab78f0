#include "kernels/choose/layout.h"
#include "kernels/choose/sampling_rules.h"
#include "kernels/choose/vocab_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/common/stripes_cpu.h"
#include "kernels/drafts/draft_tree.h"
#include "kernels/isa_cpu.h"

namespace openspec::OPENSPEC_ISA {

namespace {

static_assert(kMaxTopDrafts <= Best::kMost);

class RowDrafter {
 public:
  RowDrafter(const TopDraftsParams& params, int64_t sample, float* scratch)
      : params_(params),
        sample_(sample),
        row_(params.sample_row[sample]),
        sampling_(params.sampling[params.rows.span_seq[params.rows.row_span[row_]]]),
        logits_{params.logits + sample * params.vocab_size, params.vocab_size},
        values_(scratch),
        weights_(scratch + choose_array_floats(params.vocab_size)),
        work_(scratch + 2 * choose_array_floats(params.vocab_size)),
        ids_(reinterpret_cast<int32_t*>(scratch + 3 * choose_array_floats(params.vocab_size))) {}

  void run() {
    if (sampling_.temperature < kMinTemperature) {
      write_best(logits_);
      return;
    }
    logits_.scale = 1.0f / sampling_.temperature;
    add_noise();
    if (has_filters(sampling_, logits_.size) && !params_.ignores_filters) filter();
    write_best({values_, logits_.size});
  }

 private:
  void add_noise() {
    constexpr int64_t kBlock = 64;
    const int position = params_.rows.row_position[row_] + 1;
    for (int64_t base = 0; base < logits_.size; base += kBlock) {
      const int64_t count = min_of(kBlock, logits_.size - base);
      int32_t tokens[kBlock];
      for (int64_t i = 0; i < count; ++i) {
        tokens[i] = params_.token_of == nullptr ? static_cast<int32_t>(base + i)
                                                : params_.token_of[base + i];
      }
      for (int64_t i = 0; i < count; ++i) {
        values_[base + i] = logits_.at(base + i) + sm::gumbel(sampling_.seed, position, tokens[i]);
      }
    }
  }

  // What the filters drop becomes -inf. As for the choice min_p and top_p are thresholds on
  // e^(logit - maximum), top_k one on the logits.
  void filter() {
    exponentiate(logits_, max_logit(logits_), weights_);
    if (has_top_k(sampling_, logits_.size)) {
      const float kth = kth_largest_logit();
      for (int64_t i = 0; i < logits_.size; ++i) {
        if (logits_.values[i] < kth) weights_[i] = -1.0f;
      }
    }
    float threshold = sampling_.min_p;
    if (sampling_.top_p < 1.0f) {
      const uint64_t total = mass_from(weights_, logits_.size, threshold);
      const uint64_t wanted = max_of<uint64_t>(1, sm::top_p_mass(sampling_.top_p, total));
      std::memcpy(work_, weights_, logits_.size * sizeof(float));
      const auto mass = [](float weight) { return sm::fixed_mass(weight); };
      threshold = max_of(threshold, select_from_top(work_, logits_.size, wanted, mass));
    }
    for (int64_t i = 0; i < logits_.size; ++i) {
      values_[i] = weights_[i] >= threshold ? values_[i] : kMinusInfinity;
    }
  }

  float kth_largest_logit() {
    const int64_t k = sampling_.top_k;
    const float bound = bound_of_kth_largest(logits_.values, logits_.size, k, work_);
    const int64_t count = collect(logits_.values, logits_.size, bound, ids_);
    for (int64_t i = 0; i < count; ++i) work_[i] = logits_.values[ids_[i]];
    return count > k ? kth_largest(work_, count, k) : bound;
  }

  void write_best(const Logits& values) {
    const int top_k = params_.top_k;
    const float maximum = max_logit(values);
    const uint64_t total = exponentiate(values, maximum, nullptr);
    const float log_total = total == 0 ? 0.0f : sm::log_f32(sm::mass_to_float(total));
    const float bound = bound_of_kth_largest(values.values, values.size, top_k, work_);
    const int64_t count = collect(values.values, values.size, bound, ids_);
    Best best(top_k);
    for (int64_t i = 0; i < count; ++i) {
      const float value = values.at(ids_[i]);
      if (value > kMinusInfinity) best.add(ids_[i], value);
    }
    best.fill(values.size);
    int32_t* tokens = params_.tokens + sample_ * top_k;
    float* scores = params_.scores + sample_ * top_k;
    for (int i = 0; i < top_k; ++i) {
      tokens[i] = params_.token_of == nullptr ? best.id(i) : params_.token_of[best.id(i)];
      const float value = best.value(i);
      scores[i] =
          value > kMinusInfinity ? min_of(0.0f, (value - maximum) - log_total) : kMinusInfinity;
    }
  }

  const TopDraftsParams& params_;
  const int64_t sample_;
  const int row_;
  const SamplingParams& sampling_;
  Logits logits_;
  float* const values_;   // with noise
  float* const weights_;  // e^(logit - maximum)
  float* const work_;
  int32_t* const ids_;
};

}  // namespace

void top_drafts(const ExecContext& exec, const TopDraftsParams& params) {
  constexpr int64_t kMinParallelWork = 65536;  // some 5 microseconds
  const bool is_little = int64_t{params.num_samples} * params.vocab_size < kMinParallelWork;
  for_each_stripe(exec, is_little ? 1 : params.num_samples, [&](int64_t stripe, const auto& claim) {
    float* scratch = reinterpret_cast<float*>(align_workspace(params.workspace)) +
                     stripe * top_drafts_stripe_floats(params.vocab_size);
    for (int64_t i = claim(); i < params.num_samples; i = claim()) {
      if (params.sample_row[i] >= 0) RowDrafter(params, i, scratch).run();
    }
  });
}

}  // namespace openspec::OPENSPEC_ISA
