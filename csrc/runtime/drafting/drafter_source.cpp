#include "runtime/drafting/drafter_source.h"

namespace openspec {

void DrafterSource::offer(std::span<const ProposeRequest> wanted, std::span<Draft> drafts) {
  if (drafter_.works_on_arrays()) {
    offer_arrays(wanted, drafts);
  } else {
    drafter_.propose_on_host(table_, wanted, drafts);
  }
}

void DrafterSource::offer_arrays(std::span<const ProposeRequest> wanted, std::span<Draft> drafts) {
  const auto most = static_cast<size_t>(config_.max_draft_tokens);
  seq_.clear();
  num_wanted_.clear();
  for (const ProposeRequest& request : wanted) {
    seq_.push_back(request.slot);
    num_wanted_.push_back(request.num_wanted);
  }
  num_drafts_.assign(wanted.size(), 0);
  drafts_.assign(wanted.size() * most, -1);
  const bool has_trees = drafter_.needs().makes_trees;
  const bool has_scores = has_trees || drafter_.needs().has_scores;
  parents_.resize(has_trees ? wanted.size() * most : 0);
  scores_.resize(has_scores ? wanted.size() * most : 0);
  int32_t* parents = has_trees ? parents_.data() : nullptr;
  float* scores = has_scores ? scores_.data() : nullptr;
  drafter_.propose(exec_, table_.view(),
                   {.seq = seq_.data(),
                    .num_wanted = num_wanted_.data(),
                    .num_seqs = static_cast<int>(wanted.size()),
                    .max_drafts = config_.max_draft_tokens,
                    .max_rows = config_.max_num_batched_tokens,
                    .drafts = drafts_.data(),
                    .num_drafts = num_drafts_.data(),
                    .parents = parents,
                    .scores = scores});
  for (size_t i = 0; i < wanted.size(); ++i) {
    drafts[i].append(drafts_.data(), parents, scores, i * most, num_drafts_[i]);
  }
}

}  // namespace openspec
