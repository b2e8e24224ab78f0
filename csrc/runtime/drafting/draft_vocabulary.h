#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/exec.h"
#include "model/targets/shared_tensors.h"
#include "model/weights/buffer.h"
#include "model/weights/weights.h"

namespace openspec {

/// The tokens that a head drafts which has no LM head of its own: a part of the target's, and a
/// copy of their rows of its head. They are the tokens that sequences have got most often since the
/// start, and of those with as many the lowest ids, which a tokenizer's training found first. A
/// token outside is never drafted; the text does not depend on it.
class DraftVocabulary {
 public:
  /// `size` tokens, a multiple of 16 below `vocab_size`; those in `kept` stay among them.
  DraftVocabulary(Device device, int size, int vocab_size, int hidden_size,
                  const std::vector<int>& kept);
  /// Of memory on the device.
  static size_t bytes(Device device, int size, int vocab_size, int hidden_size);

  /// The head whose rows are taken, of one device. Throws ArgumentError if they cannot be.
  void attach(const LogitsHead& target);
  /// Counts tokens that sequences got. True where so many are new that the tokens should be chosen
  /// anew: early, then every time that twice as many are known, and at last at even distances.
  bool count(std::span<const int32_t> token_ids);
  /// Chooses the tokens and copies their rows: between steps, in the order of what is launched.
  void choose(const ExecContext& exec);

  /// Both keep their places.
  const LogitsHead& head() const { return head_; }
  Weights::TokenMap tokens() const { return {token_of_, column_of_}; }

 private:
  static PackedLinear shape_of(Device device, int size, int hidden_size);

  Device device_;
  int size_;
  std::vector<uint8_t> is_kept_;      // [vocab_size]
  std::vector<int64_t> num_written_;  // [vocab_size]
  int64_t num_counted_ = 0, next_choice_;
  std::vector<int32_t> ids_, columns_;  // on the host: all tokens, the first `size` chosen; columns
  Buffer memory_;
  int32_t *token_of_ = nullptr, *column_of_ = nullptr;
  PackedLinear whole_;  // the target's
  LogitsHead head_;
};

}  // namespace openspec
