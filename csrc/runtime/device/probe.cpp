#ifdef OPENSPEC_CUDA

#include "runtime/device/probe.h"

#include <algorithm>

#include "model/parts/sum_exchange.h"

namespace openspec {

void DeviceProbe::note_collected(int num_spans, int num_rows, int num_samples, int num_enqueued) {
  const auto in_last_block = [block = config().max_num_logits_rows](int count) {
    return count == 0 ? 0 : (count - 1) % block + 1;
  };
  num_spans_ = num_spans;
  num_rows_ = num_rows;
  num_logits_ = in_last_block(num_samples);
  num_shared_ = in_last_block(num_enqueued);
}

template <typename T>
std::vector<T> DeviceProbe::download(const T* from, size_t count) const {
  return copy_from(Device::kCuda, from, count, rank_->stream());
}

std::vector<float> DeviceProbe::logits() const {
  const size_t width = as_index(config().target.vocab_size);
  const auto rows_of = [&](const RankStep& rank, int begin, int end) {
    return copy_from(Device::kCuda, rank.arrays().logits + as_index(begin) * width,
                     as_index(end - begin) * width, rank.stream());
  };
  if (ranks_.size() == 1 || !are_dealt(num_shared_)) return rows_of(*rank_, 0, num_logits_);
  std::vector<float> all;
  for (int number = 0; number < ranks_.size(); ++number) {
    const RowRange own = ranks_[number].context().exchange->dealt(num_shared_);
    const int end = std::min(own.first + own.count, num_logits_);
    if (own.first >= end) break;
    const std::vector<float> rows = rows_of(ranks_[number], own.first, end);
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
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
