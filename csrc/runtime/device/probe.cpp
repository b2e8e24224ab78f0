#ifdef OPENSPEC_CUDA

#include "runtime/device/probe.h"

#include <bit>

namespace openspec {

void DeviceProbe::note_collected(int num_spans, int num_rows, int num_samples) {
  const int block = context_.config.max_num_logits_rows;
  num_spans_ = num_spans;
  num_rows_ = num_rows;
  num_logits_ = num_samples == 0 ? 0 : (num_samples - 1) % block + 1;
}

template <typename T>
std::vector<T> DeviceProbe::download(const void* from, size_t count) const {
  std::vector<T> values(count);
  device::copy_to_host(values.data(), from, count * sizeof(T), stream_);
  device::synchronize(stream_);
  return values;
}

std::vector<float> DeviceProbe::logits() const {
  return download<float>(arrays_.logits,
                         as_index(num_logits_) * as_index(context_.config.target.vocab_size));
}

std::vector<float> DeviceProbe::features(int num_captures) const {
  const auto bits = download<uint16_t>(
      stages_.captured().data(),
      as_index(num_rows_) * as_index(num_captures) * as_index(context_.config.target.hidden_size));
  std::vector<float> values(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) {
    values[i] = std::bit_cast<float>(uint32_t{bits[i]} << 16);
  }
  return values;
}

std::vector<Draft> DeviceProbe::drafts() const {
  const size_t most = arrays_.drafts_per_seq, seqs = as_index(num_spans_);
  const auto tokens = download<int32_t>(arrays_.drafts, seqs * most);
  const auto counts = download<int32_t>(arrays_.num_drafts, seqs);
  const auto parents = download<int32_t>(arrays_.parents, seqs * most);
  const auto scores = download<float>(arrays_.scores, seqs * most);
  const bool has_trees = context_.drafter.needs().makes_trees;
  const bool has_scores = has_trees || stages_.compares_chains(num_spans_);
  std::vector<Draft> drafts(seqs);
  for (size_t i = 0; i < seqs; ++i) {
    for (size_t k = i * most; k < i * most + as_index(counts[i]); ++k) {
      drafts[i].append(tokens[k]);
      if (has_trees) drafts[i].parents.back() = parents[k];
      if (has_scores) drafts[i].scores.push_back(scores[k]);
    }
  }
  return drafts;
}

}  // namespace openspec

#endif
