#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/draft_budget.h"
#include "core/page_pool.h"
#include "core/prefix_hash.h"
#include "kernels/choose.h"
#include "kernels/rows.h"

namespace openspec {

/// What a sequence asks for, by value. See SamplingParams in kernels/choose.h for the meaning.
struct SequenceParams {
  float temperature = 0.0f, top_p = 1.0f, min_p = 0.0f;
  float presence_penalty = 0.0f, frequency_penalty = 0.0f, repetition_penalty = 1.0f;
  int top_k = 0, min_tokens = 0;
  int max_tokens = 16;  // output tokens
  uint64_t seed = 0;
  std::vector<int32_t> stop_ids, bias_ids, allowed_ids;
  std::vector<float> bias_values;
  int num_logprobs = -1;
  bool raw_logprobs = true;
  int num_prompt_logprobs = -1;
  int num_speculative_tokens = 0;  // drafts per step at most
};

/// The running sequences: one slot each, holding token history, committed length, page table row
/// and sampling parameters in flat arrays that ops read by slot.
///
/// A sequence's *known* tokens are prompt and output, the last chosen token included; *committed*
/// tokens are those whose KV is in its pages. In decode num_tokens == kv_len + 1 after every step.
class SequenceTable {
 public:
  SequenceTable(int max_num_seqs, int max_model_len, int page_size, int num_lookahead);

  int num_free_slots() const { return static_cast<int>(free_slots_.size()); }
  int max_model_len() const { return max_model_len_; }
  int page_size() const { return page_size_; }

  /// Takes a slot for `tokens`, of which the first `prompt_len` are the prompt. Throws
  /// ArgumentError on an empty or too long sequence, EngineError if no slot is free.
  int add(std::span<const int32_t> tokens, int prompt_len, SequenceParams params,
          const PageHash& root);
  /// Gives the slot back; its pages must have been released.
  void remove(int slot);
  void check_slot(int slot) const;

  std::span<const int32_t> tokens(int slot) const;
  std::span<int32_t> page_row(int slot);
  std::span<const PageId> pages(int slot) const;
  int num_tokens(int slot) const { return num_tokens_[index(slot)]; }
  int kv_len(int slot) const { return kv_len_[index(slot)]; }
  int prompt_len(int slot) const { return prompt_len_[index(slot)]; }
  int num_pages(int slot) const { return num_pages_[index(slot)]; }
  const SequenceParams& params(int slot) const { return sequences_[index(slot)].params; }
  AcceptanceEstimate& acceptance(int slot) { return sequences_[index(slot)].acceptance; }
  /// Hashes of the sequence's full pages, chained; grows as pages fill.
  std::vector<PageHash>& page_hashes(int slot) { return sequences_[index(slot)].page_hashes; }
  const PageHash& root(int slot) const { return sequences_[index(slot)].root; }

  /// Pages that hold `num_tokens` tokens.
  int pages_for(int num_tokens) const { return (num_tokens + page_size_ - 1) / page_size_; }

  /// Appends chosen tokens and sets the committed length and number of pages.
  void commit(int slot, std::span<const int32_t> chosen, int kv_len, int num_pages);

  // Flat views for ops.
  PageTableView page_table() const { return {page_table_.data(), max_pages_per_seq_}; }
  const int32_t* token_data() const { return tokens_.data(); }
  int64_t tokens_stride() const { return tokens_stride_; }
  const int32_t* num_tokens_data() const { return num_tokens_.data(); }
  const int32_t* prompt_len_data() const { return prompt_len_.data(); }
  const SamplingParams* sampling_data() const { return sampling_.data(); }

  std::vector<int> slots_in_use() const;
  static size_t table_bytes(int max_num_seqs, int max_model_len, int page_size, int num_lookahead);

 private:
  struct Sequence {
    bool in_use = false;
    SequenceParams params;
    AcceptanceEstimate acceptance;
    PageHash root;
    std::vector<PageHash> page_hashes;
  };

  static size_t index(int slot) { return static_cast<size_t>(slot); }

  int max_model_len_, page_size_, max_pages_per_seq_;
  int64_t tokens_stride_;
  std::vector<Sequence> sequences_;
  std::vector<int> free_slots_;      // used as a stack
  std::vector<int32_t> tokens_;      // [max_num_seqs, tokens_stride]
  std::vector<int32_t> page_table_;  // [max_num_seqs, max_pages_per_seq]
  std::vector<int32_t> num_tokens_, kv_len_, prompt_len_, num_pages_;  // [max_num_seqs]
  std::vector<SamplingParams> sampling_;                               // [max_num_seqs]
};

}  // namespace openspec
