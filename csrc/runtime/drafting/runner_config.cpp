#include "runtime/drafting/runner_config.h"

#include <algorithm>

#include "core/check.h"
#include "kernels/drafts/draft_memory.h"
#include "model/targets/target.h"
#include "runtime/drafting/drafter.h"

namespace openspec {

void RunnerConfig::validate() const {
  const TargetKind& kind = target_kind(target.kind);
  const int num_ranks = tensor_parallel_size;
  OPENSPEC_CHECK_ARG(num_ranks == 1 || num_ranks == 2 || num_ranks == 4 || num_ranks == 8,
                     "tensor_parallel_size must be 1, 2, 4 or 8, got ", num_ranks);
  OPENSPEC_CHECK_ARG(num_ranks == 1 || kind.inbox_floats != nullptr, "targets of the kind ",
                     target.kind, " run on one device: leave tensor_parallel_size at 1");
  for (int rank = 0; rank < num_ranks; ++rank) {
    kind.state_needs({.spec = target, .dtype = dtype, .device = device, .rank = {rank, num_ranks}});
  }
  const auto positive = [](const char* name, int value) {
    OPENSPEC_CHECK_ARG(value > 0, name, " must be positive, got ", value);
  };
  positive("page_size", page_size);
  positive("max_num_seqs", max_num_seqs);
  positive("max_model_len", max_model_len);
  positive("max_num_batched_tokens", max_num_batched_tokens);
  positive("max_num_logits_rows", max_num_logits_rows);
  OPENSPEC_CHECK_ARG(device != Device::kCuda || page_size % 8 == 0,
                     "on CUDA page_size must be a multiple of 8, got ", page_size);
  OPENSPEC_CHECK_ARG(!has_spare_head || num_ranks == 1,
                     "draft heads take each other's place on one device, not on ", num_ranks);
  OPENSPEC_CHECK_ARG(max_draft_tokens >= 0, "max_draft_tokens must not be negative");
  OPENSPEC_CHECK_ARG(max_grammar_drafts >= 0, "max_grammar_drafts must not be negative");
  OPENSPEC_CHECK_ARG(max_copied_drafts >= 0, "max_copied_drafts must not be negative");
  OPENSPEC_CHECK_ARG(max_copied_drafts == 0 || acceptance == Acceptance::kMatch,
                     "copied drafts have no probabilities, which acceptance by rejection needs");
  constexpr size_t kLeast = 4096 * DraftMemory::kTokenBytes;
  OPENSPEC_CHECK_ARG(
      draft_memory_bytes == 0 || (max_copied_drafts > 0 && draft_memory_bytes >= kLeast &&
                                  draft_memory_bytes / DraftMemory::kTokenBytes < (1u << 30)),
      "a memory of answers has from ", kLeast, " bytes to 24 GiB, and copied drafts");
  OPENSPEC_CHECK_ARG(draft_depth >= 0 && draft_depth <= max_draft_tokens,
                     "draft_depth must be in [0, max_draft_tokens], got ", draft_depth);
}

ForwardLimits RunnerConfig::limits() const {
  return {.max_rows = max_num_batched_tokens,
          .max_spans = max_num_seqs,
          .max_logits_rows = max_num_logits_rows,
          // The target's context plus the rows that a step may lay beyond it.
          .max_tokens = max_model_len + num_step_lookahead(),
          .max_step_rows = step_rows()};
}

int RunnerConfig::num_step_lookahead() const {
  return num_steps() * (1 + draft_room()) + 1;  // a drafter's last entry
}

int RunnerConfig::num_lookahead(const DrafterNeeds& needs) const {
  return std::max(num_step_lookahead(), needs.num_draft_entries);
}

int RunnerConfig::integer(const std::string& name, int fallback, int low, int high) const {
  const auto found = method_options.find(name);
  if (found == method_options.end()) return fallback;
  const auto* value = std::get_if<int64_t>(&found->second);
  OPENSPEC_CHECK_ARG(value != nullptr, name, " must be an integer");
  OPENSPEC_CHECK_ARG(*value >= low && *value <= high, name, " must be in [", low, ", ", high,
                     "], got ", *value);
  return static_cast<int>(*value);
}

bool RunnerConfig::flag(const std::string& name, bool fallback) const {
  const auto found = method_options.find(name);
  if (found == method_options.end()) return fallback;
  const auto* value = std::get_if<bool>(&found->second);
  OPENSPEC_CHECK_ARG(value != nullptr, name, " must be true or false");
  return *value;
}

const HeadSpec& RunnerConfig::the_head() const {
  OPENSPEC_CHECK_ARG(head.has_value(), "this method needs a draft head");
  return *head;
}

}  // namespace openspec
