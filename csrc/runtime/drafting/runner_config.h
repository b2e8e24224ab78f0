#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/prefix_hash.h"
#include "kernels/common/exec.h"
#include "model/heads/head_spec.h"
#include "model/parts/forward_limits.h"
#include "model/targets/target_spec.h"

namespace openspec {

struct DrafterNeeds;

/// What makes of a draft an accepted one.
enum class Acceptance : uint8_t {
  kMatch,      // it equals the target's own choice
  kRejection,  // rejection sampling: it becomes the choice as often as its probabilities say
};

using DrafterOption = std::variant<bool, int64_t, double, std::string>;

/// Sizes and choices of an engine. Drafters are built from it, too.
struct RunnerConfig {
  TargetSpec target;
  Device device = Device::kCpu;
  DType dtype = DType::kF32;  // activations and KV
  int page_size = 16;         // tokens
  int max_num_seqs = 1;
  int max_model_len = 1;
  int max_num_batched_tokens = 1;  // rows of a step
  int max_num_logits_rows = 64;    // rows of logits at a time
  int num_threads = 1;
  int tensor_parallel_size = 1;  // ranks that share the target
  // On CUDA: the device of each, the first ones if empty, and how long one waits for the others.
  std::vector<int> devices;
  double exchange_deadline_s = 10.0;
  int max_draft_tokens = 0;  // drafts of a sequence and step
  // Those that a grammar alone makes, where there is no drafter; with one, they share its room.
  int max_grammar_drafts = 0;
  // Those that are copied from the text's own past, in place of a drafter's where they are worth
  // more; 0: none.
  int max_copied_drafts = 0;
  size_t draft_memory_bytes = 0;  // of recent answers that are copied from, too
  int draft_depth = 0;            // of max_draft_tokens, one after another; 0: all, as in a chain
  std::string method = "none";
  std::map<std::string, DrafterOption> method_options;  // what users set of the method
  std::optional<HeadSpec> head;                         // of methods that have one
  bool has_spare_head = false;  // whether there is room for another such head's weights
  Acceptance acceptance = Acceptance::kMatch;
  bool adaptive = true;
  bool enable_prefix_caching = true;
  PrefixHasher::Key cache_key{};

  void validate() const;
  /// Rows after the known tokens that a sequence's step may have.
  int draft_room() const { return step_rows() > 1 ? step_rows() - 1 : max_grammar_drafts; }
  /// Rows of a decoding sequence's step, but where a grammar alone drafts.
  int step_rows() const { return 1 + std::max(max_draft_tokens, max_copied_drafts); }
  /// Drafts one after another: fewer than max_draft_tokens for trees.
  int num_depths() const { return draft_depth > 0 ? draft_depth : max_draft_tokens; }
  /// Steps under way at a time: with one step launched ahead, two.
  int num_steps() const { return device == Device::kCuda ? 2 : 1; }
  ForwardLimits limits() const;
  /// Entries that a sequence may need pages for beyond its known tokens.
  int num_lookahead(const DrafterNeeds& needs) const;

  /// The value of a method's option, or `fallback`; throws ArgumentError on another type or a value
  /// outside [low, high].
  int integer(const std::string& name, int fallback, int low, int high) const;
  bool flag(const std::string& name, bool fallback) const;
  /// Throws ArgumentError if there is none.
  const HeadSpec& the_head() const;

 private:
  /// Rows that reserved steps may lay beyond what is committed.
  int num_step_lookahead() const;
};

}  // namespace openspec
