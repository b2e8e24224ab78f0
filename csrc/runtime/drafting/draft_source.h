#pragma once

#include <span>

#include "core/draft_merge.h"
#include "core/row_layout.h"

namespace openspec {

/// A sequence that drafts are wanted for.
struct ProposeRequest {
  int slot = 0;
  int num_wanted = 0;
};

/// Who drafts on the host. A step asks its sources in the order of DraftSourceId and merges what
/// they offer; from there on the row budget and the results see offers, whoever made them.
class DraftSource {
 public:
  virtual ~DraftSource() = default;
  virtual DraftSourceId id() const = 0;
  /// Fills drafts[i], which come empty, with at most wanted[i].num_wanted guesses of what follows
  /// the sequence's known tokens.
  virtual void offer(std::span<const ProposeRequest> wanted, std::span<Draft> drafts) = 0;
};

}  // namespace openspec
