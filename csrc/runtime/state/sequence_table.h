#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/draft_budget.h"
#include "core/draft_merge.h"
#include "core/page_pool.h"
#include "core/prefix_hash.h"
#include "grammar/grammar_place.h"
#include "kernels/choose/sampling_params.h"
#include "kernels/common/rows.h"
#include "kernels/drafts/table_rows.h"
#include "model/weights/buffer.h"

namespace openspec {

/// What a sequence asks for: what `choose` reads, with the lists that it points to.
struct SequenceParams : SamplingParams {
  struct Lists {
    std::vector<int32_t> stop_ids, bias_ids, allowed_ids, bad_words;
    std::vector<float> bias_values;
  };
  int max_tokens = 16;  // output tokens
  Lists lists;
  // What the output must be; null: anything. Its vocabulary's end tokens are stop ids then.
  std::shared_ptr<const CompiledGrammar> grammar = nullptr;
  // Whose request it is: drafts come from answers to the same alone. Any bytes.
  std::string owner = {};
  std::shared_ptr<GrammarTally> grammar_tally = nullptr;  // of the request; null: its only sequence

  /// Calls visit(list, pointer to it in `params`) for each.
  template <typename Visit>
  void for_each_list(SamplingParams& params, const Visit& visit) const {
    visit(lists.stop_ids, params.stop_ids);
    visit(lists.bias_ids, params.bias_ids);
    visit(lists.bias_values, params.bias_values);
    visit(lists.allowed_ids, params.allowed_ids);
    visit(lists.bad_words, params.bad_words);
  }
};

/// The running sequences: one slot each, holding token history, committed length, page table row
/// and sampling parameters in flat arrays that ops read by slot.
///
/// A sequence's *known* tokens are prompt and output, the last chosen token included; *committed*
/// tokens are those whose KV is in its pages. In decode num_tokens == kv_len + 1 after every step.
///
/// Where steps are launched ahead of their results, this table holds what is known of the steps
/// that were committed; `in_flight` says what the launched ones may add.
class SequenceTable {
 public:
  /// `memory`: of what a device copies from.
  SequenceTable(int max_num_seqs, int max_model_len, int page_size, int num_lookahead,
                Memory memory = Memory::kHost);

  /// What leases that are not committed yet may add to a sequence.
  struct InFlight {
    int num_new_tokens = 0;  // known tokens to compute
    int num_rows = 0;        // with drafts
    int num_pages = 0;
  };

  int num_slots() const { return static_cast<int>(sequences_.size()); }
  int num_free_slots() const { return static_cast<int>(free_slots_.size()); }
  /// The slot that add() takes next; -1: none is free.
  int next_slot() const { return free_slots_.empty() ? -1 : free_slots_.back(); }

  /// Takes a slot for `tokens`, of which the first `prompt_len` are the prompt. Throws
  /// ArgumentError on an empty or too long sequence, EngineError if no slot is free.
  int add(std::span<const int32_t> tokens, int prompt_len, SequenceParams params,
          const PageHash& root);
  /// Gives the slot back; its pages must have been released.
  void remove(int slot);
  void check_slot(int slot) const;

  std::span<const int32_t> tokens(int slot) const;
  std::vector<int32_t> copy_tokens(int slot) const {
    return {tokens(slot).begin(), tokens(slot).end()};
  }
  std::span<int32_t> page_row(int slot);
  std::span<const PageId> pages(int slot) const;
  int num_tokens(int slot) const { return num_tokens_[index(slot)]; }
  int kv_len(int slot) const { return kv_len_[index(slot)]; }
  int prompt_len(int slot) const { return prompt_len_[index(slot)]; }
  int num_pages(int slot) const { return num_pages_[index(slot)]; }
  const SequenceParams& params(int slot) const { return sequences_[index(slot)].params; }
  /// Where the output stands in the sequence's grammar; null: it has none.
  GrammarPlace* grammar(int slot) const { return sequences_[index(slot)].grammar.get(); }
  GrammarWork& grammar_work() const { return *grammar_work_; }
  bool is_in_use(int slot) const { return sequences_[index(slot)].in_use; }
  /// Tells one occupant of a slot from the next.
  uint64_t serial(int slot) const { return sequences_[index(slot)].serial; }
  /// Whether the sequence of that serial has the slot still.
  bool is_held_by(int slot, uint64_t serial) const {
    return is_in_use(slot) && this->serial(slot) == serial;
  }
  InFlight& in_flight(int slot) { return sequences_[index(slot)].in_flight; }
  const InFlight& in_flight(int slot) const { return sequences_[index(slot)].in_flight; }
  /// Prompt and output, at most.
  int max_num_tokens(int slot) const;
  /// Of a source's drafts.
  SourceEstimate& estimate(int slot, DraftSourceId source) {
    return sequences_[index(slot)].estimates[source];
  }
  const SourceEstimate& estimate(int slot, DraftSourceId source) const {
    return sequences_[index(slot)].estimates[source];
  }
  /// Of copies by their match; SourceEstimate has them all together.
  CopyEstimate& copy_estimate(int slot) { return sequences_[index(slot)].copies; }
  const CopyEstimate& copy_estimate(int slot) const { return sequences_[index(slot)].copies; }
  /// Of the sequence's owner, under a secret key.
  uint64_t& owner(int slot) { return sequences_[index(slot)].owner; }
  uint64_t owner(int slot) const { return sequences_[index(slot)].owner; }
  /// Hashes of the sequence's full pages, chained; grows as pages fill.
  std::vector<PageHash>& page_hashes(int slot) { return sequences_[index(slot)].page_hashes; }
  const std::vector<PageHash>& page_hashes(int slot) const {
    return sequences_[index(slot)].page_hashes;
  }
  const PageHash& root(int slot) const { return sequences_[index(slot)].root; }

  /// Pages that hold `num_tokens` tokens.
  int pages_for(int num_tokens) const { return (num_tokens + page_size_ - 1) / page_size_; }

  /// Appends chosen tokens and sets the committed length and number of pages.
  void commit(int slot, std::span<const int32_t> chosen, int kv_len, int num_pages);

  // Flat views for ops.
  PageTableView page_table() const { return {page_table_.as<int32_t>(), max_pages_per_seq_}; }
  const int32_t* kv_len_data() const { return kv_len_.data(); }
  const int32_t* prompt_len_data() const { return prompt_len_.data(); }
  const SamplingParams* sampling_data() const { return sampling_.data(); }
  TableView view() const {
    return {.tokens = tokens_.as<int32_t>(),
            .tokens_stride = tokens_stride_,
            .num_tokens = num_tokens_.data(),
            .sampling = sampling_data(),
            .pages = page_table(),
            .max_num_seqs = num_slots()};
  }

  std::vector<int> slots_in_use() const;
  static size_t table_bytes(int max_num_seqs, int max_model_len, int page_size, int num_lookahead);
  static int pages_per_sequence(int max_model_len, int page_size, int num_lookahead);

 private:
  struct Sequence {
    bool in_use = false;
    uint64_t serial = 0;
    SequenceParams params;
    std::unique_ptr<GrammarPlace> grammar;
    BySource<SourceEstimate> estimates;
    CopyEstimate copies;
    uint64_t owner = 0;
    InFlight in_flight;
    PageHash root;
    std::vector<PageHash> page_hashes;
  };

  static size_t index(int slot) { return static_cast<size_t>(slot); }

  int max_model_len_, page_size_, max_pages_per_seq_;
  int64_t tokens_stride_;
  std::unique_ptr<GrammarWork> grammar_work_ = std::make_unique<GrammarWork>();
  std::vector<Sequence> sequences_;  // whose places in grammars use the work
  std::vector<int> free_slots_;      // used as a stack
  uint64_t num_added_ = 0;
  Buffer tokens_;      // [max_num_seqs, tokens_stride] int32
  Buffer page_table_;  // [max_num_seqs, max_pages_per_seq] int32
  std::vector<int32_t> num_tokens_, kv_len_, prompt_len_, num_pages_;  // [max_num_seqs]
  std::vector<SamplingParams> sampling_;                               // [max_num_seqs]
};

}  // namespace openspec
