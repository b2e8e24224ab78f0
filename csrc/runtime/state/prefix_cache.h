#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/page_events.h"
#include "core/page_pool.h"
#include "core/prefix_hash.h"
#include "runtime/state/sequence_table.h"
#include "runtime/state/served_pages.h"
#include "runtime/state/slot_bases.h"
#include "runtime/state/slot_records.h"

namespace openspec {

/// What sequences share: a new one takes the pages that are there, a step offers those that it
/// filled. Of a target with a running state a prefix can be taken where it has a snapshot too.
class PrefixCache {
 public:
  PrefixCache(const SequenceLimits& limits, SequenceTable& table, PagePool& pool,
              SlotRecords& records, SlotBases& bases)
      : limits_(limits),
        hasher_(limits.cache_key),
        table_(table),
        pool_(pool),
        records_(records),
        bases_(bases) {
    pool_.on_forgotten([this](const PageHash& page, bool is_silent) { forget(page, is_silent); });
  }

  /// Where the hashes of a prompt begin; `salt` separates prompts that must not share pages.
  PageHash root(std::span<const uint8_t> salt) const { return hasher_.root(salt); }
  /// A sequence that was added under such a root.
  void set_salt(int slot, std::span<const uint8_t> salt);
  /// Where a chunk of the slot's prompt should end, so that the prefix up to there has a snapshot;
  /// 0: nowhere.
  int wanted_end(int slot) const { return records_.exist() ? records_.wanted(slot) : 0; }
  /// Gives a new sequence the longest prefix that is there.
  void attach(int slot);
  /// Of how many tokens such a sequence would have its KV.
  int num_cached(std::span<const int32_t> tokens, std::span<const uint8_t> salt) const {
    return num_computed(find(root(salt), tokens).size());
  }
  /// Offers the full pages among the first `num_ready` tokens; the slot's records may be written up
  /// to `end`. `enter` is called before each.
  void publish(int slot, int num_ready, int end, const std::function<void()>& enter);
  void reset();

  /// From here on, what becomes of reusable pages is recorded; call before the first sequence. Of a
  /// target with a running state only those count that a snapshot is at the end of, or behind.
  void record_events();
  /// Since the last call.
  std::vector<PageEvent> take_events();
  /// Of every reusable page; where events are recorded, of those that count, as events have them.
  std::vector<PageHash> published_hashes() const;
  /// Tokens that sequences found, since the start; for tests.
  int64_t num_found() const { return num_found_; }

 private:
  /// The full pages that a sequence can begin with; `num_matched` takes how many hold its tokens,
  /// with a snapshot or without.
  std::vector<PageHash> find(PageHash hash, std::span<const int32_t> tokens,
                             int* num_matched = nullptr) const;
  /// A sequence's records go on from a base that is there.
  void attach_base(int slot, const BaseName& base);
  /// Makes one of the slot's first `length` tokens if the slot still has what it takes.
  void make_snapshot(int slot, const PageHash& prefix, int length, int end);
  /// Of the slot's base, which is published from then on, for a snapshot of a prefix.
  BaseName name_base(int slot, const PageHash& prefix);
  /// Under which name page `index` of a base is published.
  PageHash base_page(const BaseName& base, int index) const {
    if (index == 0) return base.key;
    const int32_t word = -index;  // no token
    return hasher_.extend(base.key, {&word, 1});
  }
  /// A page makes room for others. A base's pages do in order, so that with the first one the base
  /// is lost.
  void forget(const PageHash& page, bool is_silent);
  /// Whether events tell of a page.
  bool counts(const PageHash& page) const { return !records_.exist() || served_.has(page); }
  /// Events tell of a page that is there.
  void tell_stored(int slot, size_t page);
  /// What snapshots that went were the last to need: their bases' pages are free, and events tell
  /// of pages that count no more.
  void release_lost();
  /// A drafter needs the features of the token before the first new one, so that one runs again;
  /// what it writes to its shared page are the bits that are there.
  int num_computed(size_t num_pages) const {
    const int num_cached = static_cast<int>(num_pages) * limits_.page_size;
    return num_cached - (num_cached > 0 && limits_.num_rows_behind > 0 ? 1 : 0);
  }

  SequenceLimits limits_;
  PrefixHasher hasher_;
  SequenceTable& table_;
  PagePool& pool_;
  SlotRecords& records_;
  SlotBases& bases_;
  int64_t num_found_ = 0;
  int32_t num_bases_ = 0;                 // that were named
  std::unique_ptr<PageEventLog> events_;  // if somebody follows the prefix cache
  std::vector<std::string> salts_;        // by slot, then
  ServedPages served_;                    // then
};

}  // namespace openspec
