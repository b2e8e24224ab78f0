#ifdef OPENSPEC_CUDA

#include "runtime/device/probe.h"

namespace openspec {

void DeviceProbe::note_collected(int num_spans, int num_rows, int num_samples) {
  const int block = config().max_num_logits_rows;
  num_spans_ = num_spans;
  num_rows_ = num_rows;
  num_logits_ = num_samples == 0 ? 0 : (num_samples - 1) % block + 1;
}

template <typename T>
std::vector<T> DeviceProbe::download(const T* from, size_t count) const {
  return copy_from(Device::kCuda, from, count, rank_->stream());
}

std::vector<float> DeviceProbe::logits() const {
  return download(rank_->arrays().logits,
                  as_index(num_logits_) * as_index(config().target.vocab_size));
}

std::vector<float> DeviceProbe::features(int num_captures) const {
  const auto bits = download(
      rank_->stages().captured().as<uint16_t>(),
      as_index(num_rows_) * as_index(num_captures) * as_index(config().target.hidden_size));
  return to_floats(bits.data(), DType::kBF16, bits.size());
}

std::vector<Draft> DeviceProbe::drafts() const {
  const size_t most = most_drafts(config()), seqs = as_index(num_spans_);
  const auto tokens = download(rank_->arrays().drafts, seqs * most);
  const auto counts = download(rank_->arrays().num_drafts, seqs);
  const auto parents = download(rank_->arrays().parents, seqs * most);
  const auto scores = download(rank_->arrays().scores, seqs * most);
  const bool has_trees = rank_->context().drafter.needs().makes_trees;
  const bool has_scores = has_trees || rank_->stages().compares_chains(num_spans_);
  std::vector<Draft> drafts(seqs);
  for (size_t i = 0; i < seqs; ++i) {
    drafts[i].append(tokens.data(), has_trees ? parents.data() : nullptr,
                     has_scores ? scores.data() : nullptr, i * most, counts[i]);
  }
  return drafts;
}

}  // namespace openspec

#endif
