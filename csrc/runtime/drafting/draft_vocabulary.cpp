#include "runtime/drafting/draft_vocabulary.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/check.h"
#include "kernels/ops.h"

namespace openspec {

namespace {

constexpr int64_t kFirstChoice = 1024;       // counted tokens
constexpr int64_t kMostBetween = 64 * 1024;  // from one choice to the next

size_t packed_bytes(const PackedLinear& shape) {
  return format_bytes(shape.format, shape.num_packed(), shape.num_inputs);
}

}  // namespace

PackedLinear DraftVocabulary::shape_of(Device device, int size, int hidden_size) {
  const bool is_cuda = device == Device::kCuda;
  return {.num_outputs = size,
          .num_inputs = hidden_size,
          .layout = is_cuda ? LinearLayout::kTiles : linear_layout_cpu(hidden_size)};
}

size_t DraftVocabulary::bytes(Device device, int size, int vocab_size, int hidden_size) {
  return area_bytes(packed_bytes(shape_of(device, size, hidden_size))) +
         static_cast<size_t>(size + vocab_size) * sizeof(int32_t);
}

DraftVocabulary::DraftVocabulary(Device device, int size, int vocab_size, int hidden_size,
                                 const std::vector<int>& kept)
    : device_(device),
      size_(size),
      is_kept_(static_cast<size_t>(vocab_size)),
      num_written_(is_kept_.size()),
      next_choice_(kFirstChoice),
      ids_(is_kept_.size()),
      columns_(is_kept_.size()) {
  OPENSPEC_CHECK_ARG(size > 0 && size < vocab_size && size % kLinearUnit == 0,
                     "draft_vocab_size must be a multiple of ", kLinearUnit, " below ", vocab_size,
                     ", the target's vocabulary, got ", size);
  OPENSPEC_CHECK_ARG(kept.size() <= static_cast<size_t>(size), "draft_vocab_size ", size,
                     " has no room for the tokenizer's ", kept.size(),
                     " added tokens: raise it, or 0 for all tokens");
  for (const int token : kept) {
    OPENSPEC_CHECK_ARG(token >= 0 && token < vocab_size, "kept token ", token,
                       " is outside the vocabulary of ", vocab_size);
    is_kept_[static_cast<size_t>(token)] = 1;
  }
  memory_ = Buffer(bytes(device, size, vocab_size, hidden_size), memory_of(device));
  PackedLinear& own = head_.shards.emplace_back(shape_of(device, size, hidden_size));
  own.data = memory_.data();
  token_of_ = reinterpret_cast<int32_t*>(memory_.at(area_bytes(packed_bytes(own))));
  column_of_ = token_of_ + size;
}

void DraftVocabulary::attach(const LogitsHead& target) {
  whole_ = target.shards.front();
  const PackedLinear& own = head_.shards.front();
  OPENSPEC_CHECK_ARG(target.shards.size() == 1 && target.exchange == nullptr &&
                         whole_.format == MatrixFormat::kBF16 && whole_.layout == own.layout,
                     "a part of the vocabulary is drafted beside an LM head in bfloat16 on one "
                     "device: set draft_vocab_size to 0, for all tokens");
}

bool DraftVocabulary::count(std::span<const int32_t> token_ids) {
  for (const int32_t token : token_ids) ++num_written_[static_cast<size_t>(token)];
  num_counted_ += static_cast<int64_t>(token_ids.size());
  return num_counted_ >= next_choice_;
}

void DraftVocabulary::choose(const ExecContext& exec) {
  if (num_counted_ >= next_choice_)
    next_choice_ = num_counted_ + std::min(num_counted_, kMostBetween);
  std::iota(ids_.begin(), ids_.end(), 0);
  const auto chosen = ids_.begin() + size_;
  std::nth_element(ids_.begin(), chosen, ids_.end(), [this](int32_t a, int32_t b) {
    const auto left = static_cast<size_t>(a), right = static_cast<size_t>(b);
    if (is_kept_[left] != is_kept_[right]) return is_kept_[left] > is_kept_[right];
    if (num_written_[left] != num_written_[right]) return num_written_[left] > num_written_[right];
    return a < b;
  });
  std::sort(ids_.begin(), chosen);
  std::fill(columns_.begin(), columns_.end(), -1);
  for (int column = 0; column < size_; ++column) {
    columns_[static_cast<size_t>(ids_[static_cast<size_t>(column)])] = column;
  }
  const auto put = [&](int32_t* to, const std::vector<int32_t>& from, size_t count) {
    if (device_ == Device::kCuda) {
      device::copy_to_device(to, from.data(), count * sizeof(int32_t), exec.stream);
    } else {
      std::copy_n(from.begin(), count, to);
    }
  };
  put(token_of_, ids_, static_cast<size_t>(size_));
  put(column_of_, columns_, columns_.size());
  ops::linear_select(
      exec,
      {.from = whole_, .output = token_of_, .to = head_.shards.front(), .packed = memory_.data()});
}

}  // namespace openspec
