#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/row_layout.h"
#include "core/thread_pool.h"
#include "grammar/grammar_place.h"
#include "model/weights/buffer.h"
#include "runtime/state/sequence_table.h"

namespace openspec {

/// Masks of a step's samples, by the grammars of its sequences; see ChooseParams::row_masks.
///
/// A mask is never empty. Where the grammar, or it and the other parameters, leave nothing, a row
/// has no choice (kHeldMask); so has one whose mask there was no time for. A sequence without a
/// choice at its last known token sits the step out, and fails if that will not change.
class RowMasks {
 public:
  /// The masks lie in memory of that kind.
  RowMasks(int vocab_size, Memory memory) : num_words_((vocab_size + 31) / 32), memory_(memory) {}

  /// Forgets all masks; the step has so many samples.
  void begin(size_t num_samples);
  /// Asks for masks of a sequence's choices after its known tokens: sample `first` belongs to the
  /// last known token and first + 1 + i to draft i.
  void add(int slot, std::vector<int32_t> known, Draft draft, size_t first);
  /// Fills what was asked for, as far as the step has time; states become those of the known
  /// tokens. Sequences are shared among the threads, for their states are independent.
  void fill(const SequenceTable& table, ThreadPool& threads);

  bool empty() const { return num_masks_ == 0; }
  const int32_t* masks() const { return words_.as<int32_t>(); }
  int num_masks() const { return num_masks_; }  // room for them: some may be left out
  size_t num_words() const { return static_cast<size_t>(num_words_); }  // of each
  /// By sample.
  const std::vector<int32_t>& sample_mask() const { return sample_mask_; }

 private:
  struct Part {
    int slot;
    std::vector<int32_t> known;
    Draft draft;
    size_t first;    // sample
    int first_mask;  // one for each sample, reached or not
  };
  void fill(const SequenceTable& table, const Part& part);
  /// Fills index[row] for each row of a part: its mask among `masks`, -1 or kHeldMask.
  static void fill_rows(GrammarPlace& place, std::span<const int32_t> output, const Draft& draft,
                        MaskRows& masks, std::span<int32_t> index);

  int num_words_;
  Memory memory_;
  int num_masks_ = 0;
  std::vector<Part> parts_;
  Buffer words_;
  std::vector<int32_t> sample_mask_;
};

}  // namespace openspec
