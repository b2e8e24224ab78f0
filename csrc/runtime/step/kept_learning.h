#pragma once

#include "kernels/drafts/kept_rows.h"
#include "runtime/drafting/drafter.h"

namespace openspec {

/// Rows that waited while a drafter was left out, for it to learn from, and room to gather them; on
/// the device that runs the step.
struct KeptLearning {
  /// Of all slots that wait; room for `max_rows` rows.
  TakeKeptRowsParams rows;
  TableView table;
  int num_steps = 0;         // each with a row of a sequence at most
  int max_rows = 0;          // of the room, at least num_steps
  void* features = nullptr;  // room, [max_rows, kept.width_bytes]

  /// The drafter learns from what waits for the slots.
  void learn(const ExecContext& exec, Drafter& drafter) const;
};

}  // namespace openspec
