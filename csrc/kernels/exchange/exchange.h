#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"
#include "kernels/common/exec.h"

namespace openspec {

inline constexpr int kInboxSlots = 3;
// Of few rows every rank takes all sums of a round and norms all rows. Of more (`have_owners`) the
// sums of a row go to one rank alone, its *owner*, who norms it and sends the result to all.
inline constexpr int kMinRowsToAll = 32;                         // however wide
inline constexpr int kMaxRowsToAll = 256;                        // however narrow
inline constexpr int kMinRoundRows = 512, kMaxRoundRows = 2048;  // see most_round_rows
inline constexpr size_t kMaxInboxBytes = size_t{256} << 20;

/// Which rank owns a row. Of every `period` rows each rank has one, and the last rank those that
/// are left.
struct RowOwners {
  int period = 0;  // 0: rows have no owners
  int last = 0;    // rank

  OPENSPEC_HD constexpr bool exist() const { return period > 0; }
  OPENSPEC_HD constexpr int rank_of(int row) const {
    const int turn = row % period;
    return turn < last ? turn : last;
  }
  /// Which of its owner's rows a row is, and back.
  OPENSPEC_HD constexpr int place_of(int row) const {
    const int turn = row % period;
    const int more = turn < last ? 0 : turn - last;
    return row / period * rows_a_period(rank_of(row)) + more;
  }
  OPENSPEC_HD constexpr int row_of(int rank, int place) const {
    const int count = rows_a_period(rank);
    return place / count * period + rank + place % count;
  }
  /// Rows of a rank among the first `num_rows`.
  OPENSPEC_HD constexpr int rows_of(int rank, int num_rows) const {
    const int count = rows_a_period(rank), rest = num_rows % period - rank;
    const int more = rest < 0 ? 0 : rest < count ? rest : count;
    return num_rows / period * count + more;
  }

 private:
  OPENSPEC_HD constexpr int rows_a_period(int rank) const {
    return rank == last ? period - last : 1;
  }
};

/// Of an inbox, multiples of 4: of a slot, and of the sums of owned rows.
struct InboxFloats {
  int64_t slot = 0, owned = 0;
};

/// The ranks of a model on CUDA, as one of them sees them: where sums for each are sent, and where
/// its own arrive. A *round* is one product whose sums are exchanged: every rank sends its splits'
/// sums to the inboxes (LinearParams::exchange), then each takes what came into its own
/// (RmsNormParams::exchange). All ranks run the same rounds, with the same numbers of rows; which
/// round it is stands on the device, so that a recorded graph replays unchanged.
///
/// An inbox has kInboxSlots slots, used by turns, each [num_splits of the whole, rows, num_outputs]
/// fp32. A word of all ones is empty: it is a NaN that no sender stores, so every word says by
/// itself whether it is there. Who takes a word empties its place.
///
/// Behind the slots lie the sums of rows that a rank owns (RoundForm). They are too many to be
/// asked for word by word, and to be emptied: ranks meet (`meet_cuda`) when all have sent them, and
/// again when all results are there.
///
/// Why no rank overwrites what another has not taken: let A send round r + 3 into the slot in
/// which B got round r. A's kernel of that waits for A's norm of round r + 2 to be complete, which
/// saw words of all splits, so of B, or met B after its norm. B sent those when its norm of round
/// r + 1, hence its norm of round r, was complete: then all of round r was taken, and its places
/// were emptied in B's own memory, where A's words arrive later. (Two slots would do by this; with
/// the third a whole round lies between emptying a place and filling it.) Sums of owned rows have
/// one place: when a round of them has ended on A, A has met B after B's norm, which took all.
struct Exchange {
  int num_ranks = 0;                  // 1, 2, 4 or 8
  int rank = 0;                       // whose view this is
  std::byte* memory[kMaxRanks] = {};  // of each rank: exchange_bytes(floats)
  InboxFloats floats;
  uint32_t* fault = nullptr;  // where the host may read it: see kExchangeIsLate
  uint64_t deadline_ns = kExchangeDeadlineNs;
};

/// What a kernel writes to `fault` and to the rank's ExchangeState when something has not come in
/// time. It then ends with wrong results, as every later one does at once. `clear_exchange_cuda` on
/// all ranks begins anew.
inline constexpr uint32_t kExchangeIsLate = 1;
/// What the host writes to the states when a rank cannot do its part: those who wait for it end as
/// well.
inline constexpr uint32_t kExchangeIsOff = 2;

inline constexpr int kShareBlocks = 64;  // of share_columns_cuda, and fewer of share_rows_cuda

/// In a rank's memory behind the slots of its inbox; all zero at first.
struct ExchangeState {
  // The round's number, by two owners. `sending` is written by the op that takes a round, when no
  // sender runs; `taking` by the op that sends it, when nobody takes.
  uint64_t sending = 0, taking = 0;
  // Of the step under way: its first round, and how long was waited for other ranks so far.
  uint64_t first_round = 0, wait_ns = 0;
  // Here, since who waits looks at it again and again: in host memory, hundreds of warps that look
  // are late for what they wait for, and others for them.
  uint64_t fault = 0;
  // Of meet_cuda: how often the ranks have met, and 1 + the last time to which a rank has come.
  uint64_t num_met = 0, has_come[kMaxRanks] = {};
  // Of share_columns_cuda and share_rows_cuda: how many there were, how many blocks of this one are
  // done, and 1 + the last one for which a rank's block is ready to be sent to, and has sent.
  uint64_t num_shared = 0, num_blocks_done = 0;
  uint64_t is_ready[kMaxRanks][kShareBlocks] = {}, has_sent[kMaxRanks][kShareBlocks] = {};
};

/// Bytes of a rank's memory, which begins at a multiple of 16.
constexpr size_t exchange_bytes(const InboxFloats& floats) {
  return static_cast<size_t>(kInboxSlots * floats.slot + floats.owned) * sizeof(float) +
         sizeof(ExchangeState);
}
inline ExchangeState* state_of(const Exchange& exchange, int rank) {
  const size_t end = exchange_bytes(exchange.floats);
  return reinterpret_cast<ExchangeState*>(exchange.memory[rank] + end - sizeof(ExchangeState));
}

/// Splits that products of so many outputs mostly have. Who owns a row follows from this, not from
/// the product at hand: a row that one product leaves with its owner is there for the next.
constexpr int usual_splits(int width) { return width >= 5120 ? 8 : 4; }

/// Whether rows of a round have owners. An owner gets its rows' sums alone, 1 / num_ranks of them,
/// but results take a second way: worth it where the sums are more than 6 MiB.
constexpr bool have_owners(int num_rows, int width) {
  constexpr int64_t kMaxSumsToAll = int64_t{3} << 19;
  if (num_rows <= kMinRowsToAll || num_rows > kMaxRowsToAll) return num_rows > kMaxRowsToAll;
  return int64_t{usual_splits(width)} * num_rows * width > kMaxSumsToAll;
}

/// What a round of `num_splits` splits is like, the same on every rank.
struct RoundForm {
  RowOwners owners;
  /// The first sum that is sent: those before it are in it, added by the first rank.
  int first_sum = 0;
  int inbox_rows = 0;  // of a sum in a slot

  OPENSPEC_HD constexpr int num_sums(int num_splits) const { return num_splits - first_sum; }
};
constexpr RoundForm round_form(int num_ranks, int num_splits, int num_rows, int width) {
  // One block then multiplies all splits of the first rank, which pays where tiles of rows and
  // outputs alone are enough for all multiprocessors.
  constexpr int64_t kMaxOutputsApart = int64_t{9} << 16;
  const int n = num_ranks;
  if (!have_owners(num_rows, width)) return {{}, 0, num_rows};
  RoundForm form = {{n, n - 1}, 0, 0};
  if (int64_t{num_rows} * width > kMaxOutputsApart) {
    if (num_splits > n) form.first_sum = num_splits / n - 1;
    // Of two ranks the first one gets half of the sums of each of its rows, the other one sum.
    if (n == 2) form.owners.period = usual_splits(width) / 2 + 1;
  }
  for (int rank = 0; rank < n; ++rank) {
    const int rows = form.owners.rows_of(rank, num_rows);
    form.inbox_rows = rows > form.inbox_rows ? rows : form.inbox_rows;
  }
  return form;
}

/// For every round of up to `max_rows` rows and `max_splits` splits.
constexpr InboxFloats inbox_floats(int num_ranks, int max_splits, int max_rows, int width) {
  InboxFloats most;
  for (int num_rows = 1; num_rows <= max_rows; ++num_rows) {
    const RoundForm form = round_form(num_ranks, max_splits, num_rows, width);
    const int64_t floats = int64_t{form.num_sums(max_splits)} * form.inbox_rows * width;
    int64_t& most_of_form = form.owners.exist() ? most.owned : most.slot;
    most_of_form = floats > most_of_form ? floats : most_of_form;
  }
  return most;
}

/// Rows of a round, at most, whatever its splits up to `max_splits`: as many as its inboxes hold,
/// since products of few rows leave multiprocessors without work.
constexpr int most_round_rows(int num_ranks, int max_splits, int width) {
  int most = kMaxRoundRows;
  while (most > kMinRoundRows && exchange_bytes(inbox_floats(num_ranks, max_splits, most, width)) >
                                     kMaxInboxBytes + sizeof(ExchangeState)) {
    most /= 2;
  }
  return most;
}

/// Whether the view is whole and a round of these sums fits a slot.
constexpr bool is_legal_round(const Exchange& exchange, int num_splits, int num_rows, int width) {
  const int n = exchange.num_ranks;
  if ((n != 1 && n != 2 && n != 4 && n != 8) || exchange.rank < 0 || exchange.rank >= n ||
      exchange.fault == nullptr || exchange.floats.slot % 4 != 0 ||
      exchange.floats.owned % 4 != 0 || num_rows > kMaxRoundRows) {
    return false;
  }
  const RoundForm form = round_form(n, num_splits, num_rows, width);
  return int64_t{form.num_sums(num_splits)} * form.inbox_rows * width <=
         (form.owners.exist() ? exchange.floats.owned : exchange.floats.slot);
}

/// Empties the rank's own memory. Before any rank's first round, and after a fault.
int clear_exchange_cuda(const Exchange& exchange, void* stream);

/// The ranks meet: what any of them wrote to another's memory before this op is there after it. All
/// ranks run it, in the same order. With `lets_next_begin` blocks of the next kernel may wait
/// beside it; many of them would keep other ranks of the same device from coming.
int meet_cuda(const Exchange& exchange, bool lets_next_begin, void* stream);

/// Rows of shared columns from which each is *dealt*: it is whole on one rank alone, which works
/// for all and shares what comes of it. Fewer cost less than sharing that.
inline constexpr int kMinDealtRows = 8;
static_assert(kMinDealtRows >= kMaxRanks, "each rank has a row");
constexpr bool are_dealt(int num_rows) { return num_rows >= kMinDealtRows; }

struct RowRange {
  int first = 0, count = 0;
};
/// The rows that a rank is dealt.
OPENSPEC_HD constexpr RowRange dealt_rows(int num_ranks, int rank, int num_rows) {
  const int first = num_rows * rank / num_ranks;
  return {first, num_rows * (rank + 1) / num_ranks - first};
}
/// Which rank is dealt a row.
OPENSPEC_HD constexpr int rank_of_dealt(int num_ranks, int row, int num_rows) {
  return (num_ranks * (row + 1) - 1) / num_rows;
}
/// How many rows a rank works on at a time, at most, where up to `max_rows` are shared.
constexpr int most_own_rows(int num_ranks, int max_rows) {
  const int few = max_rows < kMinDealtRows ? max_rows : kMinDealtRows - 1;
  const int dealt = dealt_rows(num_ranks, num_ranks - 1, max_rows).count;
  return few > dealt ? few : dealt;
}

/// Gives every rank the columns of all, or only those of the rows that it is dealt: rank r has some
/// columns of a buffer that each rank has in the same shape, and they are copied to the same places
/// of the others'. All ranks run it, in the same order. A buffer is written when its rank has come
/// to this op, and whole when the op ends.
struct ShareColumnsParams {
  const Exchange* exchange = nullptr;
  void* rows[kMaxRanks] = {};  // of each rank: [num_rows, row_bytes]
  int num_rows = 0;
  bool deals_rows = false;
  // Multiples of 16: of a row, and of the rank's own columns.
  int64_t row_bytes = 0, first_byte = 0, num_bytes = 0;
};
int share_columns_cuda(const ShareColumnsParams& params, void* stream);

/// Gives every rank the rows that the others are dealt, of buffers that each rank has in the same
/// shape. All ranks run it after share_columns_cuda has dealt rows. It asks nobody whether he is
/// ready: whoever had come to that op is done with what the buffers held before.
struct ShareRowsParams {
  static constexpr int kMaxBuffers = 4;
  struct Rows {
    void* words[kMaxRanks] = {};  // of each rank: [num_rows, row_words] of four bytes
    int row_words = 0;            // 0: there is no such buffer
  };

  const Exchange* exchange = nullptr;
  Rows buffers[kMaxBuffers] = {};
  int num_rows = 0;
};
int share_rows_cuda(const ShareRowsParams& params, void* stream);

}  // namespace openspec
