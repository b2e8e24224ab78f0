#pragma once

#include <cstdint>
#include <span>

#include "kernels/drafts/kept_rows.h"
#include "runtime/drafting/drafter.h"

namespace openspec {

/// Rows that waited while a drafter was left out, for it to learn from, and room to gather them; on
/// the device that runs the step.
struct KeptLearning {
  KeptRows kept;
  TableView table;
  const int32_t* kv_len = nullptr;  // [max_num_seqs]
  int num_steps = 0;                // each with a row of a sequence at most
  int max_rows = 0;                 // of the room, at least num_steps
  // Room: see TakeKeptRowsParams, and [max_rows, kept.width_bytes].
  int32_t *span_begin = nullptr, *span_kv_len = nullptr, *num_computed = nullptr, *source = nullptr;
  void* features = nullptr;

  /// The drafter learns from what waits for the slots.
  void learn(const ExecContext& exec, Drafter& drafter, std::span<const int32_t> slots) const;
};

}  // namespace openspec
