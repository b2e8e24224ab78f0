#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/exec.h"

namespace openspec {

/// The records of sequences' running states (StateNeeds), on the device that runs the step: for
/// each slot a ring, in which the record of a position lies at its remainder.
///
/// Row r of a span stands at position span_kv_len + r - span_begin there, as its KV does: in a tree
/// that is not its depth. It reads the record of its row_parent, or of position span_kv_len - 1 if
/// it has none; before position 0 all is zero. A span of more rows than the ring has places writes
/// the records of its last rows only.
struct RecordView {
  std::byte* data = nullptr;  // [max_num_seqs, ring_size, record_bytes]; null: there is no state
  int ring_size = 0;
  size_t record_bytes = 0;

  OPENSPEC_HD std::byte* at(int slot, int position) const {
    const int64_t place = int64_t{slot} * ring_size + position % ring_size;
    return data + static_cast<size_t>(place) * record_bytes;
  }
};

}  // namespace openspec
