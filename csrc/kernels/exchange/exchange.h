#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace openspec {

inline constexpr int kMaxRanks = 8;
inline constexpr int kInboxSlots = 3;
/// Up to so many rows every rank takes all sums of a round and norms all rows. Beyond, the sums of
/// row r go to rank r % num_ranks alone, its *owner*, who norms it and sends the result to all.
inline constexpr int kMaxRowsToAll = 256;
inline constexpr int kMaxRowsToOwners = 512;  // of a round

/// The ranks of a model on CUDA, as one of them sees them: where sums for each are sent, and where
/// its own arrive. A *round* is one product whose sums are exchanged: every rank sends its splits'
/// sums to the inboxes (LinearParams::exchange), then each takes what came into its own
/// (RmsNormParams::exchange). All ranks run the same rounds, with the same numbers of rows; which
/// round it is stands on the device, so that a recorded graph replays unchanged.
///
/// An inbox has kInboxSlots slots, used by turns, each [num_splits of the whole, rows, num_outputs]
/// fp32; where rows have owners, of those that it owns. A word of all ones is empty: it is a NaN
/// that no sender stores, so every word says by itself whether it is there. Who takes a word
/// empties its place.
///
/// Why no rank overwrites what another has not taken: let A send round r + 3 into the slot in
/// which B got round r. A's kernel of that waits for A's norm of round r + 2 to be complete, which
/// saw words of all splits, so of B. B sent those when its norm of round r + 1, hence its norm of
/// round r, was complete: then all of round r was taken, and its places were emptied in B's own
/// memory, where A's words arrive later. (Two slots would do by this; with the third a whole round
/// lies between emptying a place and filling it.) A round whose rows have owners has at least one
/// row for each, and its norm is complete when it has seen the results of all.
struct Exchange {
  int num_ranks = 0;                      // 1, 2, 4 or 8
  int rank = 0;                           // whose view this is
  std::byte* memory[kMaxRanks] = {};      // of each rank: exchange_bytes(slot_floats)
  int64_t slot_floats = 0;                // a multiple of 4
  uint32_t* fault = nullptr;              // in device memory or pinned: see kExchangeIsLate
  uint64_t deadline_ns = 10'000'000'000;  // that a kernel waits at most
};

/// What a kernel writes to `fault` when something has not come in time. It then ends with wrong
/// results, as every later one does at once. `clear_exchange_cuda` on all ranks begins anew.
inline constexpr uint32_t kExchangeIsLate = 1;
/// What the host writes there when a rank cannot do its part: those who wait for it end as well.
inline constexpr uint32_t kExchangeIsOff = 2;

inline constexpr int kShareBlocks = 64;  // of share_columns_cuda

/// In a rank's memory behind the slots of its inbox; all zero at first.
struct ExchangeState {
  // The round's number, by two owners. `sending` is written by the op that takes a round, when no
  // sender runs; `taking` by the op that sends it, when nobody takes.
  uint64_t sending = 0, taking = 0;
  uint64_t owned_rows[kMaxRowsToOwners] = {};  // 1 + the last round in which a row's result came
  // Of share_columns_cuda: how many there were, how many blocks of this one are done, and 1 + the
  // last one for which a rank's block is ready to be sent to, and has sent.
  uint64_t num_shared = 0, num_blocks_done = 0;
  uint64_t is_ready[kMaxRanks][kShareBlocks] = {}, has_sent[kMaxRanks][kShareBlocks] = {};
};

/// Bytes of a rank's memory, which begins at a multiple of 16.
constexpr size_t exchange_bytes(int64_t slot_floats) {
  return static_cast<size_t>(kInboxSlots * slot_floats) * sizeof(float) + sizeof(ExchangeState);
}

constexpr bool have_owners(int num_rows) { return num_rows > kMaxRowsToAll; }

/// Rows whose sums come into one inbox: of owners, as many as any has.
constexpr int inbox_rows(int num_rows, int num_ranks) {
  return have_owners(num_rows) ? (num_rows + num_ranks - 1) / num_ranks : num_rows;
}

/// Whether the view is whole and a round of these sums fits a slot.
constexpr bool is_legal_round(const Exchange& exchange, int num_splits, int num_rows, int width) {
  const int n = exchange.num_ranks;
  return (n == 1 || n == 2 || n == 4 || n == 8) && exchange.rank >= 0 && exchange.rank < n &&
         exchange.fault != nullptr && exchange.slot_floats % 4 == 0 &&
         num_rows <= kMaxRowsToOwners &&
         int64_t{num_splits} * inbox_rows(num_rows, n) * width <= exchange.slot_floats;
}

/// Empties the rank's own memory. Before any rank's first round, and after a fault.
int clear_exchange_cuda(const Exchange& exchange, void* stream);

/// Gives every rank the columns of all: rank r has some columns of a buffer that each rank has in
/// the same shape, and they are copied to the same places of all others'. All ranks run it, in the
/// same order. A buffer is written when its rank has come to this op, and whole when the op ends.
struct ShareColumnsParams {
  const Exchange* exchange = nullptr;
  void* rows[kMaxRanks] = {};  // of each rank: [num_rows, row_bytes]
  int num_rows = 0;
  // Multiples of 16: of a row, and of the rank's own columns.
  int64_t row_bytes = 0, first_byte = 0, num_bytes = 0;
};
int share_columns_cuda(const ShareColumnsParams& params, void* stream);

}  // namespace openspec
