#ifdef OPENSPEC_CUDA

// What DeviceStep tells of a step to a sequence that wants to know.

#include <algorithm>

#include "runtime/device/device_step.h"

namespace openspec {

SpanDetail DeviceStep::detail_of(const SpanResult& result, size_t entry) const {
  const StepOutcomeArrays& out = arrays_.outcome;
  const size_t first = entry * index(drafts_per_seq());
  SpanDetail detail;
  Draft& draft = detail.draft;
  for (size_t i = first; i < first + index(result.num_draft_tokens); ++i) {
    draft.tokens.push_back(out.drafts[i]);
    draft.parents.push_back(out.parents[i]);
    if (out.outcomes[entry].has_scores != 0) draft.scores.push_back(out.scores[i]);
  }
  detail.accepted = drafts_of_run(draft, result.token_ids);
  return detail;
}

std::optional<double> DeviceStep::draft_seconds(const StepLease& lease) const {
  if (!lease.has_proposed) return 0.0;
  // A step is one graph: its parts are told apart only by steps without a drafter.
  const std::optional<double> expected =
      expected_draft_seconds(static_cast<int>(lease.requests.size()), lease.num_rows);
  return expected ? std::optional(std::min(*expected, lease.seconds)) : std::nullopt;
}

std::vector<float> DeviceStep::last_logits() {
  std::vector<float> values(index(num_last_logits_) * index(context_.config.target.vocab_size));
  device::copy_to_host(values.data(), arrays_.logits, values.size() * sizeof(float),
                       stream_.handle());
  synchronize();
  return values;
}

std::vector<float> DeviceStep::last_features() {
  std::vector<uint16_t> bits(index(num_last_rows_) * capture_layers_.size() *
                             index(context_.config.target.hidden_size));
  device::copy_to_host(bits.data(), captured_.data(), bits.size() * sizeof(uint16_t),
                       stream_.handle());
  synchronize();
  std::vector<float> values(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) {
    values[i] = std::bit_cast<float>(uint32_t{bits[i]} << 16);
  }
  return values;
}

std::vector<Draft> DeviceStep::last_drafts() {
  const auto most = index(drafts_per_seq());
  const auto seqs = index(num_last_spans_);
  const auto download = [&]<typename T>(const T* from, size_t count) {
    std::vector<T> values(count);
    device::copy_to_host(values.data(), from, count * sizeof(T), stream_.handle());
    synchronize();
    return values;
  };
  const auto tokens = download(arrays_.drafts, seqs * most);
  const auto counts = download(arrays_.num_drafts, seqs);
  const auto parents = download(arrays_.parents, seqs * most);
  const auto scores = download(arrays_.scores, seqs * most);
  const bool has_trees = context_.drafter.needs().makes_trees;
  const bool has_scores = has_trees || compares_chains(num_last_spans_);
  std::vector<Draft> drafts(seqs);
  for (size_t i = 0; i < seqs; ++i) {
    for (size_t k = i * most; k < i * most + index(counts[i]); ++k) {
      drafts[i].append(tokens[k]);
      if (has_trees) drafts[i].parents.back() = parents[k];
      if (has_scores) drafts[i].scores.push_back(scores[k]);
    }
  }
  return drafts;
}

}  // namespace openspec

#endif
