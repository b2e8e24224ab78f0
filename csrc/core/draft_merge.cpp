#include "core/draft_merge.h"

#include <algorithm>
#include <utility>

namespace openspec {

void MergedDraft::add(DraftSourceId source, Draft offered, int num_refused) {
  this->num_refused[source] = num_refused;
  const int num_lead = draft.size();
  for (int i = 0; i < num_lead; ++i) {
    if (draft.parents[static_cast<size_t>(i)] != i - 1) return;  // nothing follows all of a tree
  }
  int count = offered.size();
  const auto room = static_cast<size_t>(std::max(num_lead, count));
  offered.tokens.resize(room);
  offered.parents.resize(room);
  const bool has_scores = !offered.scores.empty();
  if (has_scores) offered.scores.resize(room);
  count = put_first(draft.tokens.data(), num_lead, offered.tokens.data(), offered.parents.data(),
                    has_scores ? offered.scores.data() : nullptr, count);
  offered.truncate(count);
  draft = std::move(offered);
  num_offered[source] += count - num_lead;
}

void MergedDraft::drop_copied() {
  draft.truncate(draft.size() - num_offered[kCopiedDrafts]);
  num_offered[kCopiedDrafts] = num_refused[kCopiedDrafts] = 0;
}

CopyJudgement judge_copy(const CopiedDraft& copied, std::span<const int32_t> run) {
  if (copied.match_len == 0) return {};
  const auto most = std::min(copied.tokens.size(), run.size());
  const auto wrong = std::mismatch(run.begin(), run.begin() + static_cast<std::ptrdiff_t>(most),
                                   copied.tokens.begin());
  const auto num_right = static_cast<int>(wrong.first - run.begin());
  return {copied.copy_class(), std::min(num_right + 1, static_cast<int>(most)), num_right};
}

BySource<DraftCounts> MergedDraft::deal(const DraftCounts& all) const {
  BySource<DraftCounts> counts;
  DraftCounts left = all;
  for (size_t source = 0; source < counts.size(); ++source) {
    // Those before the last source are a chain: a place is a depth.
    const bool is_last = source + 1 == counts.size();
    for (int DraftCounts::* count :
         {&DraftCounts::num_offered, &DraftCounts::num_drafts, &DraftCounts::num_accepted,
          &DraftCounts::num_judged, &DraftCounts::num_right}) {
      const int share = is_last ? left.*count : std::min(left.*count, num_offered[source]);
      left.*count -= share;
      counts[source].*count = share;
    }
    counts[source].num_drafts += num_refused[source];
  }
  return counts;
}

}  // namespace openspec
