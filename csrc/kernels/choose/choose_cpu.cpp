#include "kernels/choose/choose.h"
#include "kernels/choose/layout.h"
#include "kernels/choose/rejection_cpu.h"
#include "kernels/choose/sampling_rules.h"
#include "kernels/choose/vocab_cpu.h"
#include "kernels/common/simd_cpu.h"
#include "kernels/common/stripes_cpu.h"
#include "kernels/isa_cpu.h"

namespace openspec::OPENSPEC_ISA {

namespace {

// One thread's arrays over the vocabulary.
struct Arrays {
  float* edited;      // logits after bias, masks and penalties
  float* weights;     // e^(logit - maximum)
  float* work;        // for selections
  float* kept;        // logits of the candidates that passed the filters
  int32_t* kept_ids;  // their ids
  int32_t* counts;    // occurrences in the history; zero between rows

  Arrays(float* at, int64_t vocab_size) {
    const int64_t step = choose_array_floats(vocab_size);
    edited = at;
    weights = at + step;
    work = at + 2 * step;
    kept = at + 3 * step;
    kept_ids = reinterpret_cast<int32_t*>(at + 4 * step);
    counts = reinterpret_cast<int32_t*>(at + 5 * step);
  }
};

class RowChooser {
 public:
  RowChooser(const ChooseParams& params, int64_t sample, Arrays arrays)
      : params_(params),
        sample_(sample),
        arrays_(arrays),
        row_(params.sample_row[sample]),
        slot_(params.rows.span_seq[params.rows.row_span[row_]]),
        position_(params.rows.row_position[row_]),
        sampling_(params.sampling[slot_]),
        mask_(row_mask_of(params, sample)),
        raw_{params.logits + sample * params.vocab_size, params.vocab_size} {}

  void run() {
    const bool may_score = params_.score_token != nullptr && !params_.is_draft;
    const int32_t scored = may_score ? params_.score_token[sample_] : -1;
    if (scored >= 0) {
      params_.chosen[sample_] = scored;
      report_all(raw_, scored, max_of(0, sampling_.num_prompt_logprobs));
      return;
    }
    if (is_held(params_, sample_)) {
      params_.chosen[sample_] = kNoChoice;
      return;
    }
    Logits logits = raw_;
    if (has_edits()) {
      edit();
      logits.values = arrays_.edited;
    }
    bool is_filtered = false;
    int32_t chosen;
    if (sampling_.temperature < kMinTemperature) {
      chosen = argmax(logits);
    } else {
      logits.scale = 1.0f / sampling_.temperature;
      is_filtered = !params_.has_own_noise && has_filters(sampling_, params_.vocab_size);
      if (is_filtered) filter(logits);
      chosen = params_.token_of == nullptr ? draw_one<false>(logits, is_filtered)
                                           : draw_one<true>(logits, is_filtered);
      if (!params_.is_draft && mask_ == nullptr) {
        const DrawnDraft draft = draft_behind(params_, params_.rows.row_span[row_], position_,
                                              params_.num_tokens[slot_]);
        if (draft.logits != nullptr) chosen = reject_or_take(draft, logits, is_filtered, chosen);
      }
    }
    if (mask_ != nullptr && !is_allowed_by(mask_, chosen)) chosen = lowest_allowed_by(mask_);
    params_.chosen[sample_] = params_.token_of == nullptr ? chosen : params_.token_of[chosen];
    if (params_.is_draft || sampling_.num_logprobs < 0) return;
    if (sampling_.raw_logprobs) {
      report_all(raw_, chosen, sampling_.num_logprobs);
    } else if (is_filtered) {
      report_kept(chosen);
    } else {
      report_all(logits, chosen, sampling_.num_logprobs);
    }
  }

 private:
  int64_t vocab_size() const { return params_.vocab_size; }
  bool is_token(int32_t id) const { return id >= 0 && id < params_.vocab_size; }

  bool masks_stops() const {
    return masks_stop_ids(sampling_, position_, params_.prompt_len[slot_]);
  }
  bool has_edits() const {
    if (params_.is_draft) return false;
    return mask_ != nullptr || sampling_.num_bias > 0 || sampling_.num_allowed > 0 ||
           sampling_.num_bad_words > 0 || masks_stops() || has_penalties(sampling_);
  }

  void edit();
  void penalise();
  template <typename Visit>
  void visit_history(const Visit& visit) const;
  void filter(const Logits& logits);
  template <bool kHasTable>
  int32_t draw_one(const Logits& logits, bool is_filtered) const {
    const uint64_t seed = sampling_.seed ^ (params_.has_own_noise ? sm::kDraftNoise : 0);
    const Noise noise = {seed, position_ + 1, params_.token_of};
    return is_filtered ? draw_from<kHasTable>(arrays_.kept_ids, arrays_.kept, num_kept_, noise)
                       : draw<kHasTable>(logits, noise);
  }
  void keep_from(const float* weights, float threshold);
  int32_t reject_or_take(const DrawnDraft& draft, const Logits& logits, bool is_filtered,
                         int32_t drawn);

  // The log-probability of a logit, given the row's maximum and the sum of its weights.
  static float log_probability(float logit, float maximum, float log_total) {
    return logit > kMinusInfinity ? (logit - maximum) - log_total : kMinusInfinity;
  }
  void report_all(const Logits& logits, int32_t id, int num_best);
  void report_kept(int32_t id);
  void write_report(int32_t id, float logit, const Best& best, int num_best, float maximum,
                    uint64_t total, int rank);

  const ChooseParams& params_;
  const int64_t sample_;
  const Arrays arrays_;
  const int row_;
  const int slot_;
  const int position_;
  const SamplingParams& sampling_;
  const int32_t* mask_;  // null: none
  const Logits raw_;
  int64_t num_kept_ = 0;
  float maximum_ = 0.0f;  // of the filtered row, before filtering
};

void RowChooser::edit() {
  float* logits = arrays_.edited;
  if (sampling_.num_allowed > 0) {
    for (int64_t i = 0; i < vocab_size(); ++i) logits[i] = kMinusInfinity;
    for (int i = 0; i < sampling_.num_allowed; ++i) {
      const int32_t id = sampling_.allowed_ids[i];
      if (is_token(id)) logits[id] = raw_.values[id];
    }
  } else {
    std::memcpy(logits, raw_.values, vocab_size() * sizeof(float));
  }
  if (mask_ != nullptr) {
    for (int64_t first = 0; first < vocab_size(); first += 32) {
      const auto word = static_cast<uint32_t>(mask_[first / 32]);
      if (word == ~0u) continue;
      const int64_t end = min_of(vocab_size(), first + 32);
      for (int64_t id = first; id < end; ++id) {
        if ((word >> (id - first) & 1) == 0) logits[id] = kMinusInfinity;
      }
    }
  }
  for (int i = 0; i < sampling_.num_bias; ++i) {
    const int32_t id = sampling_.bias_ids[i];
    if (is_token(id)) logits[id] += sampling_.bias_values[i];
  }
  if (masks_stops()) {
    for (int i = 0; i < sampling_.num_stop_ids; ++i) {
      if (is_token(sampling_.stop_ids[i])) logits[sampling_.stop_ids[i]] = kMinusInfinity;
    }
  }
  for (int i = 0; i < sampling_.num_bad_words; ++i) {
    const int32_t id = id_of_bad_word(params_, row_, slot_, i);
    if (is_token(id)) logits[id] = kMinusInfinity;
  }
  if (has_penalties(sampling_)) penalise();
}

// Calls visit(id, is_output) for every token before the one to choose: the history up to this row,
// then the drafts it follows.
template <typename Visit>
void RowChooser::visit_history(const Visit& visit) const {
  const int32_t* tokens = params_.tokens + slot_ * params_.tokens_stride;
  const int num_known = params_.num_tokens[slot_];
  const int prompt_len = params_.prompt_len[slot_];
  const int end = min_of(num_known, position_ + 1);
  for (int i = 0; i < end; ++i) {
    if (is_token(tokens[i])) visit(tokens[i], i >= prompt_len);
  }
  for (int row = row_; row >= 0 && params_.rows.row_position[row] >= num_known;
       row = params_.rows.row_parent[row]) {
    if (is_token(params_.rows.row_token[row])) visit(params_.rows.row_token[row], true);
  }
}

void RowChooser::penalise() {
  constexpr int32_t kInPrompt = 1 << 30;
  visit_history([&](int32_t id, bool is_output) {
    arrays_.counts[id] = is_output ? arrays_.counts[id] + 1 : arrays_.counts[id] | kInPrompt;
  });
  visit_history([&](int32_t id, bool) {
    if (arrays_.counts[id] == 0) return;  // done at an earlier occurrence
    const int32_t num_out = arrays_.counts[id] & ~kInPrompt;
    arrays_.counts[id] = 0;
    arrays_.edited[id] = penalised(sampling_, arrays_.edited[id], num_out);
  });
}

// Fills the list of candidates. min_p and top_p compare weights e^(logit - maximum), top_k the
// logits before the temperature.
void RowChooser::filter(const Logits& logits) {
  maximum_ = max_logit(logits);
  float* weights = arrays_.weights;  // with top_k: of the candidates, else of the vocabulary
  uint64_t total = 0;
  if (has_top_k(sampling_, vocab_size())) {
    const int64_t k = sampling_.top_k;
    const float bound = bound_of_kth_largest(logits.values, vocab_size(), k, arrays_.work);
    num_kept_ = collect(logits.values, vocab_size(), bound, arrays_.kept_ids);
    for (int64_t i = 0; i < num_kept_; ++i) arrays_.work[i] = logits.values[arrays_.kept_ids[i]];
    const float kth = num_kept_ > k ? kth_largest(arrays_.work, num_kept_, k) : bound;
    int64_t count = 0;
    for (int64_t i = 0; i < num_kept_; ++i) {
      const int32_t id = arrays_.kept_ids[i];
      const float logit = logits.at(id);
      const float weight = sm::exp_f32(logit - maximum_);
      if (logits.values[id] < kth || weight < sampling_.min_p) continue;
      arrays_.kept_ids[count] = id;
      arrays_.kept[count] = logit;
      weights[count++] = weight;
      total += sm::fixed_mass(weight);
    }
    num_kept_ = count;
  } else {
    total = exponentiate(logits, maximum_, weights);
    if (sampling_.min_p > 0.0f) total = mass_from(weights, vocab_size(), sampling_.min_p);
    float threshold = sampling_.min_p;
    if (sampling_.top_p < 1.0f) {
      // Only tokens within a factor of the best matter: widen it until it holds enough mass.
      const uint64_t wanted = sm::top_p_mass(sampling_.top_p, total);
      float cut = 0.0625f;
      while (cut > 1e-12f && mass_from(weights, vocab_size(), cut) < wanted) cut *= 0.0625f;
      threshold = max_of(threshold, cut > 1e-12f ? cut : 0.0f);
    }
    num_kept_ = collect(weights, vocab_size(), threshold, arrays_.kept_ids);
    for (int64_t i = 0; i < num_kept_; ++i) {
      arrays_.kept[i] = logits.at(arrays_.kept_ids[i]);
      weights[i] = weights[arrays_.kept_ids[i]];
    }
  }
  if (sampling_.top_p >= 1.0f) return;
  const uint64_t wanted = max_of<uint64_t>(1, sm::top_p_mass(sampling_.top_p, total));
  std::memcpy(arrays_.work, weights, num_kept_ * sizeof(float));
  const auto mass = [](float weight) { return sm::fixed_mass(weight); };
  keep_from(weights, select_from_top(arrays_.work, num_kept_, wanted, mass));
}

void RowChooser::keep_from(const float* weights, float threshold) {
  int64_t count = 0;
  for (int64_t i = 0; i < num_kept_; ++i) {
    if (weights[i] < threshold) continue;
    arrays_.kept_ids[count] = arrays_.kept_ids[i];
    arrays_.kept[count++] = arrays_.kept[i];
  }
  num_kept_ = count;
}

// Step 4, where step 3 would have chosen `drawn`. The distribution drawn from becomes a list.
int32_t RowChooser::reject_or_take(const DrawnDraft& draft, const Logits& logits, bool is_filtered,
                                   int32_t drawn) {
  if (!is_filtered) {
    maximum_ = max_logit(logits);
    num_kept_ = vocab_size();
    for (int64_t i = 0; i < num_kept_; ++i) {
      arrays_.kept_ids[i] = static_cast<int32_t>(i);
      arrays_.kept[i] = logits.at(i);
    }
  }
  uint64_t total = 0;
  for (int64_t i = 0; i < num_kept_; ++i) {
    arrays_.weights[i] = sm::exp_f32(arrays_.kept[i] - maximum_);
    total += sm::fixed_mass(arrays_.weights[i]);
  }
  return choose_by_rejection(params_, draft, sampling_, position_ + 1,
                             {arrays_.kept_ids, arrays_.weights, num_kept_, total}, drawn,
                             arrays_.work);
}

// Log-probabilities over the whole row.
void RowChooser::report_all(const Logits& logits, int32_t id, int num_best) {
  num_best = min_of(num_best, kMaxLogprobs);
  const float maximum = max_logit(logits);
  const uint64_t total = exponentiate(logits, maximum, nullptr);
  const float logit = logits.at(id);
  int rank = 1;
  for (int64_t i = 0; i < logits.size; ++i) {
    const float other = logits.at(i);
    rank += other > logit || (other == logit && i < id) ? 1 : 0;
  }
  Best best(num_best);
  if (num_best > 0) {
    const int64_t k = min_of<int64_t>(num_best, logits.size);
    const float bound = bound_of_kth_largest(logits.values, logits.size, k, arrays_.work);
    const int64_t count = collect(logits.values, logits.size, bound, arrays_.kept_ids);
    for (int64_t i = 0; i < count; ++i)
      best.add(arrays_.kept_ids[i], logits.at(arrays_.kept_ids[i]));
    best.fill(logits.size);
  }
  write_report(id, logit, best, num_best, maximum, total, rank);
}

// Log-probabilities among the candidates that passed the filters.
void RowChooser::report_kept(int32_t id) {
  const int num_best = min_of(sampling_.num_logprobs, kMaxLogprobs);
  Best best(max_of(1, num_best));
  uint64_t total = 0;
  float logit = kMinusInfinity;
  for (int64_t i = 0; i < num_kept_; ++i) {
    total += sm::fixed_mass(sm::exp_f32(arrays_.kept[i] - maximum_));
    if (arrays_.kept_ids[i] == id) logit = arrays_.kept[i];
    if (num_best > 0) best.add(arrays_.kept_ids[i], arrays_.kept[i]);
  }
  int rank = 1;
  for (int64_t i = 0; i < num_kept_; ++i) {
    const float other = arrays_.kept[i];
    const bool is_equal = other == logit && other > kMinusInfinity;
    rank += other > logit || (is_equal && arrays_.kept_ids[i] < id) ? 1 : 0;
  }
  best.fill(vocab_size());
  write_report(id, logit, best, num_best, maximum_, total, rank);
}

void RowChooser::write_report(int32_t id, float logit, const Best& best, int num_best,
                              float maximum, uint64_t total, int rank) {
  if (params_.ranks != nullptr) params_.ranks[sample_] = rank;
  if (params_.logprobs == nullptr) return;
  const float log_total = total == 0 ? 0.0f : sm::log_f32(sm::mass_to_float(total));
  int32_t* ids = params_.logprob_ids + sample_ * (1 + kMaxLogprobs);
  float* values = params_.logprobs + sample_ * (1 + kMaxLogprobs);
  ids[0] = id;
  values[0] = log_probability(logit, maximum, log_total);
  for (int i = 0; i < num_best; ++i) {
    ids[1 + i] = best.id(i);
    values[1 + i] = log_probability(best.value(i), maximum, log_total);
  }
}

// Whether any sequence of the step has penalties, so that the counts must start at zero.
bool counts_tokens(const ChooseParams& params) {
  if (params.is_draft) return false;
  for (int i = 0; i < params.num_samples; ++i) {
    if (params.sample_row[i] < 0) continue;
    const int span = params.rows.row_span[params.sample_row[i]];
    if (has_penalties(params.sampling[params.rows.span_seq[span]])) return true;
  }
  return false;
}

// The i-th sample, or -1 for padding.
int64_t sample_at(const ChooseParams& params, int64_t i) {
  const int64_t sample = params.samples == nullptr ? i : params.samples[i];
  return sample >= 0 && params.sample_row[sample] >= 0 ? sample : -1;
}

// Logits to go through, counting those that need noise or exponentials several times.
int64_t work_of(const ChooseParams& params) {
  int64_t work = 0;
  for (int i = 0; i < params.num_samples; ++i) {
    const int64_t sample = sample_at(params, i);
    if (sample < 0) continue;
    const int span = params.rows.row_span[params.sample_row[sample]];
    const SamplingParams& sampling = params.sampling[params.rows.span_seq[span]];
    const bool is_reported = sampling.num_logprobs >= 0 && !params.is_draft;
    const bool is_plain = sampling.temperature < kMinTemperature && !is_reported;
    work += int64_t{params.vocab_size} * (is_plain ? 1 : 16);
  }
  return work;
}

}  // namespace

void choose(const ExecContext& exec, const ChooseParams& params) {
  if (params.num_samples == 0) return;
  constexpr int64_t kMinParallelWork = 65536;  // some 5 microseconds
  const int64_t max_stripes = work_of(params) < kMinParallelWork ? 1 : params.num_samples;
  const bool has_counts = counts_tokens(params);
  for_each_stripe(exec, max_stripes, [&](int64_t stripe, const auto& claim) {
    float* scratch = reinterpret_cast<float*>(align_workspace(params.workspace)) +
                     stripe * choose_stripe_floats(params.vocab_size);
    const Arrays arrays(scratch, params.vocab_size);
    if (has_counts) std::memset(arrays.counts, 0, params.vocab_size * sizeof(int32_t));
    for (int64_t i = claim(); i < params.num_samples; i = claim()) {
      const int64_t sample = sample_at(params, i);
      if (sample >= 0) RowChooser(params, sample, arrays).run();
    }
  });
}

}  // namespace openspec::OPENSPEC_ISA
