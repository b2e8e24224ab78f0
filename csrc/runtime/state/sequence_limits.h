#pragma once

#include "core/prefix_hash.h"
#include "kernels/common/exec.h"

namespace openspec {

/// What memory of running sequences is planned from.
struct SequenceLimits {
  Device device = Device::kCpu;
  int max_num_seqs = 1;
  int max_model_len = 1;
  int page_size = 1;               // tokens
  int max_num_batched_tokens = 1;  // rows of a step
  int draft_room = 0;              // rows of a sequence's step after the known tokens
  int num_steps = 1;               // under way at a time
  int num_lookahead = 0;           // entries that a sequence may need pages for beyond its tokens
  int num_draft_entries = 0;       // see DrafterNeeds
  int num_rows_behind = 0;         // rows whose KV a step may write after those that it lays: the
                                   // drafter's entry of the token that the step chooses
  bool enable_prefix_caching = true;
  int snapshot_interval = 8192;  // tokens of a prompt, see SnapshotOf::kPrompt
  PrefixHasher::Key cache_key{};
};

}  // namespace openspec
