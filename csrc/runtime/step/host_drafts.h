#pragma once

#include <cstdint>
#include <vector>

#include "runtime/drafting/copy_source.h"
#include "runtime/drafting/drafter_source.h"
#include "runtime/drafting/grammar_source.h"
#include "runtime/step/draft_planner.h"
#include "runtime/step/host_teacher.h"
#include "runtime/step/step_backend.h"

namespace openspec {

/// What the host's step does with drafts before there are rows: its sources offer, the planner
/// grants.
class HostDrafts {
 public:
  HostDrafts(const StepContext& context, DraftPlanner& planner, HostTeacher& teacher,
             const ExecContext& exec, ThreadPool& threads);

  /// Fills lease.offers. Grammars come first, whose offers cost nothing, then copies, which cost
  /// next to nothing, then the drafter where it pays beside these; it has learned from all rows by
  /// then. `host_seconds`: see DraftPlanner.
  void offer(StepLease& lease, double host_seconds);
  /// Fills lease.spans.
  void grant(StepLease& lease, double host_seconds);

  /// Drafts by whose probabilities the choice is made, by span.
  DrawnDrafts drawn(const StepLease& lease);
  DraftSource& drafter() { return drafter_; }
  AnswerMemory& answers() { return copies_.answers(); }

 private:
  bool drafter_works(StepLease& lease, double host_seconds);
  /// Takes out what the slot's grammar refuses, and all where that cannot be told in this step.
  /// Returns how many it refuses.
  int prune(int slot, Draft& draft);
  /// What a source offers for a span of the lease.
  struct Offer {
    size_t span, request;  // the request's number among those of the source
    Draft draft;
    int num_refused = 0;  // by its grammar
  };
  /// Asks a source for at most so many drafts of each span, and takes out what cannot have rows and
  /// what grammars cannot let pass, for no row is to be spent on it.
  std::vector<Offer> ask(DraftSource& source, int max_drafts, const StepLease& lease);
  void add_copies(StepLease& lease);
  /// Where a copy is worth more, it stays.
  void add_drafters(StepLease& lease);

  const StepContext& context_;
  DraftPlanner& planner_;
  HostTeacher& teacher_;
  DrafterSource drafter_;
  CopySource copies_;
  GrammarSource grammars_;
  std::vector<int32_t> drawn_tokens_, drawn_counts_, drawn_rows_;
};

}  // namespace openspec
