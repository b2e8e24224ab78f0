#include "runtime/state/sequence_table.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace openspec {

int SequenceTable::pages_per_sequence(int max_model_len, int page_size, int num_lookahead) {
  return (max_model_len + num_lookahead + page_size - 1) / page_size;
}

SequenceTable::SequenceTable(int max_num_seqs, int max_model_len, int page_size, int num_lookahead,
                             Memory memory)
    : max_model_len_(max_model_len),
      page_size_(page_size),
      max_pages_per_seq_(pages_per_sequence(max_model_len, page_size, num_lookahead)),
      tokens_stride_(max_model_len) {
  const auto seqs = static_cast<size_t>(max_num_seqs);
  sequences_.resize(seqs);
  tokens_ = Buffer(seqs * static_cast<size_t>(tokens_stride_) * sizeof(int32_t), memory);
  page_table_ = Buffer(seqs * static_cast<size_t>(max_pages_per_seq_) * sizeof(int32_t), memory);
  for (auto* array : {&num_tokens_, &kv_len_, &prompt_len_, &num_pages_}) array->resize(seqs);
  sampling_.resize(seqs);
  for (int slot = max_num_seqs - 1; slot >= 0; --slot) free_slots_.push_back(slot);
}

size_t SequenceTable::table_bytes(int max_num_seqs, int max_model_len, int page_size,
                                  int num_lookahead) {
  return static_cast<size_t>(max_num_seqs) *
         (sizeof(int32_t) *
              (static_cast<size_t>(max_model_len) +
               static_cast<size_t>(pages_per_sequence(max_model_len, page_size, num_lookahead))) +
          sizeof(Sequence) + sizeof(SamplingParams) + 4 * sizeof(int32_t));
}

int SequenceTable::add(std::span<const int32_t> tokens, int prompt_len, SequenceParams params,
                       const PageHash& root) {
  const int count = static_cast<int>(tokens.size());
  OPENSPEC_CHECK_ARG(prompt_len >= 1 && prompt_len <= count, "prompt_len ", prompt_len, " of ",
                     count, " tokens");
  OPENSPEC_CHECK_ARG(count < max_model_len_, count, " tokens leave no room in a context of ",
                     max_model_len_);
  OPENSPEC_CHECK(!free_slots_.empty(), "no free slot in the sequence table");
  std::unique_ptr<GrammarPlace> grammar;
  if (params.grammar != nullptr) {
    OPENSPEC_CHECK_ARG(params.min_tokens == 0, "min_tokens beside a grammar");
    if (params.grammar_tally == nullptr) params.grammar_tally = std::make_shared<GrammarTally>();
    grammar = std::make_unique<GrammarPlace>(params.grammar, params.grammar_tally, *grammar_work_);
    for (const int32_t id : params.grammar->vocabulary().stop_ids()) {
      std::vector<int32_t>& ids = params.lists.stop_ids;
      if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    }
  }
  const int slot = free_slots_.back();
  free_slots_.pop_back();
  Sequence& sequence = sequences_[index(slot)];
  sequence.in_use = true;
  sequence.serial = ++num_added_;
  sequence.in_flight = {};
  sequence.estimates = BySource<SourceEstimate>();
  sequence.grammar = std::move(grammar);
  sequence.params = std::move(params);
  sequence.root = root;
  sequence.page_hashes.clear();
  std::copy(tokens.begin(), tokens.end(), tokens_.as<int32_t>() + slot * tokens_stride_);
  num_tokens_[index(slot)] = count;
  prompt_len_[index(slot)] = prompt_len;
  kv_len_[index(slot)] = 0;
  num_pages_[index(slot)] = 0;

  const SequenceParams& p = sequence.params;
  SamplingParams& sampling = sampling_[index(slot)] = p;
  sampling.num_stop_ids = static_cast<int32_t>(p.lists.stop_ids.size());
  sampling.num_bias = static_cast<int32_t>(p.lists.bias_ids.size());
  sampling.num_allowed = static_cast<int32_t>(p.lists.allowed_ids.size());
  p.for_each_list(sampling, [](const auto& list, auto& pointer) { pointer = list.data(); });
  return slot;
}

int SequenceTable::max_num_tokens(int slot) const {
  return std::min<int64_t>(int64_t{prompt_len(slot)} + params(slot).max_tokens, max_model_len_);
}

void SequenceTable::remove(int slot) {
  check_slot(slot);
  num_tokens_[index(slot)] = kv_len_[index(slot)] = num_pages_[index(slot)] = 0;
  sequences_[index(slot)].in_use = false;
  sequences_[index(slot)].grammar.reset();
  sequences_[index(slot)].params.grammar.reset();
  free_slots_.push_back(slot);
}

void SequenceTable::check_slot(int slot) const {
  OPENSPEC_CHECK_ARG(slot >= 0 && index(slot) < sequences_.size() && sequences_[index(slot)].in_use,
                     "slot ", slot, " holds no sequence");
}

std::span<const int32_t> SequenceTable::tokens(int slot) const {
  return {tokens_.as<int32_t>() + slot * tokens_stride_, static_cast<size_t>(num_tokens(slot))};
}

std::span<int32_t> SequenceTable::page_row(int slot) {
  return {page_table_.as<int32_t>() + int64_t{slot} * max_pages_per_seq_,
          static_cast<size_t>(max_pages_per_seq_)};
}

std::span<const PageId> SequenceTable::pages(int slot) const {
  return {page_table_.as<int32_t>() + int64_t{slot} * max_pages_per_seq_,
          static_cast<size_t>(num_pages(slot))};
}

void SequenceTable::commit(int slot, std::span<const int32_t> chosen, int kv_len, int num_pages) {
  std::copy(chosen.begin(), chosen.end(),
            tokens_.as<int32_t>() + slot * tokens_stride_ + num_tokens(slot));
  num_tokens_[index(slot)] += static_cast<int32_t>(chosen.size());
  kv_len_[index(slot)] = kv_len;
  num_pages_[index(slot)] = num_pages;
}

std::vector<int> SequenceTable::slots_in_use() const {
  std::vector<int> slots;
  for (size_t slot = 0; slot < sequences_.size(); ++slot) {
    if (sequences_[slot].in_use) slots.push_back(static_cast<int>(slot));
  }
  return slots;
}

}  // namespace openspec
