#pragma once

/// Sending words to the inboxes of ranks, taking them out of the own one, and waiting for signs.

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/exchange/exchange.h"

namespace openspec::cuda {

inline constexpr uint32_t kEmptyWord = 0xffffffffu;

/// The own inbox and its state, as a kernel is told.
struct Inbox {
  float* words = nullptr;  // slot 0
  ExchangeState* state = nullptr;
  InboxFloats floats;
  uint32_t* fault = nullptr;
  uint64_t deadline_ns = 0;
};

/// And those of the other ranks, in the order in which they are sent to: each rank begins with the
/// next one, so that not all send to the same.
struct Outbox {
  Inbox own;
  int rank = 0, num_others = 0;
  float* others[kMaxRanks - 1] = {};
  RoundForm form = {};

  /// Whether this rank sends the sum of its splits in place of theirs.
  __host__ __device__ bool adds_splits() const { return form.first_sum > 0 && rank == 0; }
  /// Row of a sum in the inbox where the sums of a row go.
  __host__ __device__ int inbox_row(int row) const {
    return form.owners.exist() ? form.owners.place_of(row) : row;
  }
};

inline float* inbox_words(const Exchange& exchange, int rank) {
  return reinterpret_cast<float*>(exchange.memory[rank]);
}
inline Inbox own_inbox(const Exchange& exchange) {
  return {inbox_words(exchange, exchange.rank), state_of(exchange, exchange.rank), exchange.floats,
          exchange.fault, exchange.deadline_ns};
}
inline Outbox outbox_of(const Exchange& exchange, int num_splits, int num_rows, int width) {
  Outbox outbox = {own_inbox(exchange), exchange.rank, exchange.num_ranks - 1};
  for (int i = 0; i < outbox.num_others; ++i) {
    outbox.others[i] = inbox_words(exchange, (exchange.rank + 1 + i) % exchange.num_ranks);
  }
  outbox.form = round_form(exchange.num_ranks, num_splits, num_rows, width);
  return outbox;
}

#ifdef __CUDACC__

/// Floats before the slot of a round.
__device__ __forceinline__ int64_t slot_begin(const Inbox& inbox, uint64_t round) {
  return static_cast<int64_t>(round % kInboxSlots) * inbox.floats.slot;
}
/// And before the sums of owned rows.
__host__ __device__ inline int64_t owned_begin(const Inbox& inbox) {
  return kInboxSlots * inbox.floats.slot;
}

/// Begins to send a round, after the wait for the kernel before: floats before its sums. Every
/// thread that sends calls it, and thread 0 of block 0.
__device__ __forceinline__ int64_t begin_sending(const Outbox& outbox) {
  const uint64_t round = outbox.own.state->sending;
  if (blockIdx.x == 0 && threadIdx.x == 0) outbox.own.state->taking = round;
  return outbox.form.owners.exist() ? owned_begin(outbox.own) : slot_begin(outbox.own, round);
}

/// As begin_sending, for the op that takes the round: its number.
__device__ __forceinline__ uint64_t begin_taking(const Inbox& inbox) {
  const uint64_t round = inbox.state->taking;
  if (blockIdx.x == 0 && threadIdx.x == 0) inbox.state->sending = round + 1;
  return round;
}

/// A sum as it is sent: never empty.
__device__ __forceinline__ uint32_t word_of(float sum) {
  return min(__float_as_uint(sum), kEmptyWord - 1);  // which is a NaN, too
}
__device__ __forceinline__ void store_word(float* at, uint32_t word) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}
__device__ __forceinline__ void store_word(float* at, const uint4& words) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

/// Sends a word, or four, to every rank, to the place that `own` is in the own inbox.
template <typename Word>
__device__ __forceinline__ void send_to_all(const Outbox& outbox, float* own, const Word& word) {
  const int64_t at = own - outbox.own.words;
#pragma unroll
  for (int i = 0; i < kMaxRanks - 1; ++i) {
    if (i < outbox.num_others) store_word(outbox.others[i] + at, word);
  }
  store_word(own, word);
}

/// Sends a row's to the owner of the row alone, where it has one.
template <typename Word>
__device__ __forceinline__ void send(const Outbox& outbox, int row, float* own, const Word& word) {
  if (!outbox.form.owners.exist()) {
    send_to_all(outbox, own, word);
    return;
  }
  const int64_t at = own - outbox.own.words;
  // From this rank to the owner.
  const int steps = (outbox.form.owners.rank_of(row) - outbox.rank) & outbox.num_others;
  float* words = outbox.own.words;
#pragma unroll
  for (int i = 0; i < kMaxRanks - 1; ++i) {
    if (i + 1 == steps) words = outbox.others[i];
  }
  store_word(words + at, word);
}

__device__ __forceinline__ bool is_whole(const uint4& words) {
  return max(max(words.x, words.y), max(words.z, words.w)) != kEmptyWord;
}
/// Loads four words of the own inbox, as they are now, where they are not whole. There is no
/// branch, so that all of a thread's are under way together.
__device__ __forceinline__ void load_missing(const float* at, uint4& words) {
  const int is_missing = !is_whole(words);
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
      : "l"(at), "r"(is_missing)
      : "memory");
}
__device__ __forceinline__ void empty_words(float* at) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(at), "r"(kEmptyWord)
               : "memory");
}

/// Tells another rank that all is there which the block wrote before its last __syncthreads().
__device__ __forceinline__ void give_sign(uint64_t* at, uint64_t value) {
  asm volatile(
      "fence.acq_rel.sys;\n\t"
      "st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at),
      "l"(value)
      : "memory");
}
__device__ __forceinline__ uint64_t load_sign(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

/// Whether a wait that began at `since` (0: now) is to be given up: its time is over, or that of
/// another wait was. Sets the fault.
__device__ __forceinline__ bool is_too_late(const Inbox& inbox, uint64_t& since) {
  volatile uint64_t* fault = &inbox.state->fault;
  if (*fault != 0) return true;
  const uint64_t now = nanoseconds();
  if (since == 0) since = now;
  if (now - since < inbox.deadline_ns) return false;
  *fault = kExchangeIsLate;
  *inbox.fault = kExchangeIsLate;
  return true;
}

/// Calls `is_done` until it says so, or the exchange has failed. `is_counted`: of one thread of a
/// kernel, whose wait stands for all. It reads the time only where it has to wait, and leaves what
/// it adds behind.
template <typename IsDone>
__device__ __forceinline__ void wait_until(const Inbox& inbox, bool is_counted,
                                           const IsDone& is_done) {
  constexpr int kTriesPerLook = 64;
  uint64_t since = 0;
#pragma unroll 1
  for (int tries = 1; !is_done(); ++tries) {
    if (tries == 1 && is_counted) since = nanoseconds();
    if (tries % kTriesPerLook == 0 && is_too_late(inbox, since)) break;
  }
  if (is_counted && since != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&inbox.state->wait_ns),
              static_cast<unsigned long long>(nanoseconds() - since));
  }
}

/// What was counted since it was last called, by one thread while nobody sends or takes.
__device__ __forceinline__ ExchangeCounts take_counts(ExchangeState& state) {
  const uint64_t round = state.sending;
  const ExchangeCounts counts = {round - state.first_round, state.wait_ns};
  state.first_round = round;
  state.wait_ns = 0;
  return counts;
}

#endif  // __CUDACC__

}  // namespace openspec::cuda
