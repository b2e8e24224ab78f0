#pragma once

#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "core/page_pool.h"
#include "runtime/state/lease.h"
#include "runtime/state/prefix_cache.h"
#include "runtime/state/sequence_table.h"
#include "runtime/state/slot_bases.h"
#include "runtime/state/slot_records.h"

namespace openspec {

/// Thrown by Sequences::reserve when the pool cannot cover the step; nothing was taken.
class OutOfPages : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The running sequences and all that they hold, pages and records; the transactions on them, one a
/// step, each a lease. Leases are begun and committed in order. If one is given up, so are all
/// after it and before it that were begun, newest first.
class Sequences {
 public:
  Sequences(const SequenceLimits& limits, const RecordPlan& records, const BasePlan& bases,
            int num_pages, SlotRecords::Copy copy);
  /// Removes what is left.
  ~Sequences();

  SequenceTable& table() { return table_; }
  const SequenceTable& table() const { return table_; }
  PagePool& pool() { return pool_; }
  const PagePool& pool() const { return pool_; }
  PrefixCache& prefixes() { return prefixes_; }
  const PrefixCache& prefixes() const { return prefixes_; }
  RecordView records() { return records_.view(); }
  RecordView tails() { return records_.tails(); }
  const SlotBases& bases() const { return bases_; }

  /// Takes a slot, see SequenceTable::add, for a sequence without pages and state.
  int add(std::span<const int32_t> tokens, int prompt_len, SequenceParams params,
          std::span<const uint8_t> cache_salt);
  void remove(int slot);

  /// Pages that `num_rows` more rows would take from the pool, with those of a base to fold into.
  int num_pages_needed(int slot, int num_rows) const;
  /// Throws EngineError unless all is consistent; `keeps_more` as for commit.
  void check_integrity(bool keeps_more) const;

  /// Takes pages for the step's worst case. Throws ArgumentError on a request that cannot be, and
  /// OutOfPages.
  std::unique_ptr<StepLease> reserve(std::span<const SpanRequest> requests);
  /// Whether the sequence of a span has its slot still.
  bool is_current(const StepLease& lease, size_t span) const {
    return table_.is_held_by(lease.requests[span].slot, lease.serials[span]);
  }
  /// Before the step is launched: saves what it may overwrite and its sequences may go back to.
  void begin(StepLease& lease);
  /// The sequences of a lease that is given up stand where they stood before it.
  void abandon(StepLease& lease);
  /// A span's results become the sequence's, its full pages reusable. With `keeps_more` all of its
  /// pages stay with the sequence: a step that is under way may write them.
  void commit(StepLease& lease, size_t span, bool keeps_more,
              const std::function<void()>& enter_publish);

 private:
  /// A span of a lease that was given up: what its slot goes back to, before the next step.
  struct GivenUp {
    int slot = 0;
    uint64_t serial = 0;
    int place = 0, length = 0;
  };
  /// Whether the rows of a span may overwrite records that it begins with: all but a decode step's.
  bool overwrites_records(const StepLease& lease, size_t span) const;
  /// The span's folded base takes the place of the one before it.
  void commit_base(StepLease& lease, size_t span);

  SequenceLimits limits_;
  PagePool pool_;
  SequenceTable table_;
  SlotRecords records_;
  SlotBases bases_;
  PrefixCache prefixes_;
  std::vector<GivenUp> given_up_;
  int num_begun_ = 0;  // leases
};

}  // namespace openspec
