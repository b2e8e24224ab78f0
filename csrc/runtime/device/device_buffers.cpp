#include "runtime/device/device_buffers.h"

#include <cstring>

#include "kernels/choose/choose.h"
#include "kernels/exchange/exchange.h"
#include "runtime/state/sequence_table.h"

namespace openspec {

namespace {

/// Deals a block of memory out in parts that begin at multiples of 256 bytes.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  /// Parts of `count` elements each.
  template <typename... T>
  void take(size_t count, T*&... parts) {
    (take_one(count, parts), ...);
  }
  size_t bytes() const { return bytes_; }

 private:
  template <typename T>
  void take_one(size_t count, T*& part) {
    part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (count * sizeof(T) + 255) / 256 * 256;
  }

  std::byte* base_;
  size_t bytes_ = 0;
};

/// Of every sequence: its part of the step's rows, and the entries after these.
size_t most_page_updates(const RunnerConfig& config, const DrafterNeeds& needs) {
  const int pages_behind = config.num_lookahead(needs) / config.page_size + 2;
  return as_index(config.max_num_batched_tokens / config.page_size +
                  config.max_num_seqs * pages_behind);
}

void take_input(Carver& carver, StepInputArrays& input, const RunnerConfig& config,
                const DrafterNeeds& needs, int pages_per_base) {
  const size_t seqs = as_index(config.max_num_seqs);
  carver.take(1, input.header);
  carver.take(seqs, input.spans);
  carver.take(seqs, input.slot_updates);
  carver.take(most_page_updates(config, needs), input.page_updates);
  carver.take(seqs * as_index(pages_per_base), input.base_targets);
  carver.take(seqs, input.num_lead);
  carver.take(seqs * most_drafts(config), input.lead);
  carver.take(seqs, input.kept_slots);
  carver.take(seqs, input.num_drafts);
  carver.take(seqs * most_drafts(config), input.drafts, input.parents);
}

size_t take_inputs(std::byte* base, std::vector<StepInputArrays>& entries,
                   const RunnerConfig& config, const DrafterNeeds& needs, int pages_per_base) {
  Carver carver(base);
  for (StepInputArrays& input : entries) take_input(carver, input, config, needs, pages_per_base);
  return carver.bytes();
}

size_t take_outcomes(std::byte* base, StepOutcomeArrays& outcome, const RunnerConfig& config) {
  Carver carver(base);
  const size_t entries = StepInputs::kRing * as_index(config.max_num_seqs);
  const size_t samples = StepInputs::kRing * as_index(config.max_num_batched_tokens);
  carver.take(entries, outcome.outcomes);
  carver.take(entries * (1 + most_drafts(config)), outcome.tokens, outcome.samples);
  carver.take(entries * most_drafts(config), outcome.drafts, outcome.parents, outcome.scores);
  carver.take(samples * (1 + kMaxLogprobs), outcome.logprob_ids);
  carver.take(samples * (1 + kMaxLogprobs), outcome.logprobs);
  carver.take(samples, outcome.ranks);
  carver.take(StepInputs::kRing, outcome.exchange);
  carver.take(StepInputs::kRing, outcome.experts);
  return carver.bytes();
}

}  // namespace

size_t DeviceArrays::lay_out(std::byte* base, const RunnerConfig& config, const DrafterNeeds& needs,
                             int pages_per_base) {
  Carver carver(base);
  const size_t seqs = as_index(config.max_num_seqs), rows = as_index(config.max_num_batched_tokens);
  table.tokens_stride = config.max_model_len;
  table.max_pages_per_seq = SequenceTable::pages_per_sequence(
      config.max_model_len, config.page_size, config.num_lookahead(needs));
  carver.take(seqs * as_index(config.max_model_len), table.tokens);
  carver.take(seqs, table.num_tokens, table.kv_len, table.prompt_len, table.max_num_tokens,
              table.is_active, seq, num_wanted, num_drafts, span_kv_len, span_seq, num_offered,
              num_granted, num_computed, first_choice, table.kept_begin);
  carver.take(seqs + 1, span_begin, sample_begin);
  carver.take(seqs * as_index(table.max_pages_per_seq), table.pages);
  carver.take(seqs, table.sampling);
  table.pages_per_base = pages_per_base;
  if (pages_per_base > 0) {
    carver.take(seqs, table.num_folded, folded_read, folded_write);
    carver.take(seqs * as_index(pages_per_base), table.base_pages, table.base_targets);
  }
  take_input(carver, input, config, needs, /*pages_per_base=*/0);
  carver.take(seqs * most_drafts(config), drafts, parents, scores);
  if (config.max_copied_drafts > 0) {
    const size_t most = as_index(config.max_draft_tokens);
    carver.take(seqs, owners);
    carver.take(seqs, num_copied, is_copied, copy_class, num_drafter_wanted, num_drafter_drafts);
    carver.take(seqs * as_index(config.max_copied_drafts), copied);
    carver.take(seqs * most, drafter_drafts, drafter_parents, drafter_scores);
  }
  carver.take(rows, row_token, row_position, row_span, row_parent, committed_row, sample_row,
              score_token, chosen, ranks, row_kv_slot);
  carver.take(rows * (1 + kMaxLogprobs), logprob_ids, logprobs);
  carver.take(as_index(config.max_num_logits_rows) * as_index(config.target.vocab_size), logits);
#ifdef OPENSPEC_CUDA
  const int chosen_rows = most_own_rows(config.tensor_parallel_size, config.max_num_logits_rows);
  carver.take(choose_workspace_bytes_cuda(chosen_rows, config.target.vocab_size) / sizeof(float),
              choose_workspace);
#endif
  return carver.bytes();
}

size_t DeviceBuffers::device_bytes(const RunnerConfig& config, const DrafterNeeds& needs,
                                   int pages_per_base) {
  return DeviceArrays().lay_out(nullptr, config, needs, pages_per_base) +
         as_index(config.max_num_seqs) * kListBytes;
}

StepInputs::StepInputs(const RunnerConfig& config, const DrafterNeeds& needs, int pages_per_base)
    : max_page_updates(most_page_updates(config, needs)),
      entries_(kRing),
      memory_(take_inputs(nullptr, entries_, config, needs, pages_per_base), Memory::kPinned) {
  take_inputs(memory_.at(0), entries_, config, needs, pages_per_base);
  std::memset(memory_.data(), 0, memory_.bytes());  // steps without sequences are launched first
}

DeviceBuffers::DeviceBuffers(const RunnerConfig& config, const DrafterNeeds& needs,
                             int pages_per_base, void* stream)
    : scratch_(lay_out(nullptr, config, needs, pages_per_base), Memory::kDevice),
      outcomes_(take_outcomes(nullptr, outcome, config), Memory::kPinned) {
  lay_out(scratch_.at(0), config, needs, pages_per_base);
  take_outcomes(outcomes_.at(0), outcome, config);
  device::fill_zero(scratch_.data(), scratch_.bytes(), stream);
  const int32_t* end = input.parents + as_index(config.max_num_seqs) * most_drafts(config);
  proposal_bytes_ = static_cast<size_t>(end - input.num_drafts) * sizeof(int32_t);
}

void DeviceBuffers::upload_proposals(const StepInputArrays& host, void* stream) const {
  device::copy_to_device(input.num_drafts, host.num_drafts, proposal_bytes_, stream);
}

}  // namespace openspec
