#include "runtime/drafting/copy_source.h"

#include "core/copied_drafts.h"

namespace openspec {

CopyLookup copy_lookup_of(const RunnerConfig& config) {
  CopyLookupParams params;
  params.max_drafts = config.max_copied_drafts;
  params.min_match_len = kMinMatchLen;
  params.max_match_len = kMaxMatchLen;
  return {params, config.max_copied_drafts > 0 ? config.max_num_seqs : 0, config.device};
}

CopySource::CopySource(const RunnerConfig& config, const SequenceTable& table,
                       const ExecContext& exec)
    : max_drafts_(config.max_copied_drafts),
      table_(table),
      exec_(exec),
      lookup_(copy_lookup_of(config)),
      answers_(config) {
  lookup_.allocate();
  if (answers_.exists()) answers_.clear(exec_);
}

void CopySource::offer(std::span<const ProposeRequest> wanted, std::span<Draft> drafts) {
  const auto most = static_cast<size_t>(max_drafts_);
  seq_.clear();
  num_wanted_.clear();
  for (const ProposeRequest& request : wanted) {
    seq_.push_back(request.slot);
    num_wanted_.push_back(request.num_wanted);
  }
  num_drafts_.assign(wanted.size(), 0);
  drafts_.assign(wanted.size() * most, -1);
  lookup_.look_up(exec_, table_.view(), seq_.data(), num_wanted_.data(),
                  static_cast<int>(wanted.size()), drafts_.data(), num_drafts_.data());
  if (answers_.exists()) {
    owners_.clear();
    for (const ProposeRequest& request : wanted) owners_.push_back(table_.owner(request.slot));
    answers_.recall(exec_, table_.view(),
                    {.seq = seq_.data(),
                     .owners = owners_.data(),
                     .num_wanted = num_wanted_.data(),
                     .num_seqs = static_cast<int>(wanted.size()),
                     .max_drafts = max_drafts_,
                     .drafts = drafts_.data(),
                     .num_drafts = num_drafts_.data(),
                     .match_len = lookup_.match_len()});
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    drafts[i].append(drafts_.data(), nullptr, nullptr, i * most, num_drafts_[i]);
  }
}

}  // namespace openspec
