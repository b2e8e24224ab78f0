#pragma once

#include <cstdint>

#include "kernels/common/records.h"
#include "kernels/delta_net/delta_states.h"

namespace openspec {

/// Where sequences keep running states: their records, and the bases that these go on from
/// (StateNeeds).
struct RunningStates {
  RecordView records = {};
  RecordView tails = {};  // beside the records
  DeltaStates bases = {};
  // [num_spans] Blocks that a base holds before the pass and after it.
  const int32_t* folded_read = nullptr;
  const int32_t* folded_write = nullptr;
};

}  // namespace openspec
