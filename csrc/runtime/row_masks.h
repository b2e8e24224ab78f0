#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/row_layout.h"
#include "grammar/grammar_state.h"
#include "runtime/sequence_table.h"

namespace openspec {

/// Masks of a step's samples, by the grammars of its sequences; see ChooseParams::row_masks.
///
/// A mask is never empty. Where a grammar and min_tokens leave nothing, the answer may end before
/// min_tokens; where it and allowed_token_ids or bad_words leave nothing, or the grammar itself
/// does, only the token that ends the answer is left, and the answer ends there.
class RowMasks {
 public:
  explicit RowMasks(int vocab_size) : num_words_((vocab_size + 31) / 32) {}

  /// Forgets all masks; the step has so many samples.
  void begin(size_t num_samples);
  /// Masks of a sequence's choices behind its known tokens, which its state is of: sample `first`
  /// belongs to the last known token and first + 1 + i to draft i.
  void add(const SequenceTable& table, int slot, std::span<const int32_t> known, const Draft& draft,
           size_t first);

  bool empty() const { return num_masks_ == 0; }
  const int32_t* masks() const { return words_.data(); }
  int num_masks() const { return num_masks_; }
  size_t num_words() const { return static_cast<size_t>(num_words_); }  // of each
  /// By sample.
  const std::vector<int32_t>& sample_mask() const { return sample_mask_; }

 private:
  static void end_if_empty(std::span<int32_t> mask, const SequenceParams& params);
  /// The rules above, for the choice behind `path`: known tokens and drafts.
  void restrict_mask(std::span<int32_t> mask, const SequenceParams& params,
                     std::span<const int32_t> path, int num_output);

  int num_words_;
  int num_masks_ = 0;
  std::vector<int32_t> words_, sample_mask_, rest_, path_;
};

}  // namespace openspec
