#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "grammar/grammar_state.h"

namespace openspec {

/// What work on grammars may take, in seconds of processor time.
struct GrammarTimes {
  // What is ordinary for a mask, and for a token that a state is to follow: both take microseconds.
  double mask = 0.005, token = 0.0001;
  // Of a mask, by token of the vocabulary: near the end of a text whose length is bounded the masks
  // of a large one take more than is ordinary, and no request is to blame for that.
  double mask_per_id = 2e-7;
  double step = 0.05;       // of a step, on each of its threads
  double first_try = 0.02;  // of a mask beside the steps, before it makes way for others
  double request = 2.0;     // of all sequences of a request, beyond what they may take anyway

  double ordinary(size_t num_tokens, size_t num_masks) const {
    return token * static_cast<double>(num_tokens) + mask * static_cast<double>(num_masks);
  }
  /// What a request may take anyway.
  double free(size_t num_tokens, size_t num_masks, int vocab_size) const {
    const double most = std::max(mask, mask_per_id * vocab_size);
    return token * static_cast<double>(num_tokens) + most * static_cast<double>(num_masks);
  }
};

/// What the sequences of a request have taken together beyond what they may take anyway.
class GrammarTally {
 public:
  double seconds() const { return 1e-9 * static_cast<double>(nanoseconds_.load()); }
  void add(double seconds) { nanoseconds_ += static_cast<int64_t>(1e9 * seconds); }

 private:
  std::atomic<int64_t> nanoseconds_{0};
};

/// Why a sequence cannot go on.
struct GrammarFailure {
  std::string message;      // empty: it can
  bool is_request = false;  // the request asks for what cannot be; else something is broken
};

/// A mask to be made beside the steps, and what came of it.
struct MaskJob {
  std::shared_ptr<const CompiledGrammar> grammar;
  std::shared_ptr<GrammarTally> tally;
  std::vector<int32_t> output;          // known tokens that it follows
  std::unique_ptr<GrammarState> state;  // null: to be made; at the end that after `output`
  double seconds = 0.0;                 // of its last work, in the end of this one
  // Set at the end.
  std::vector<int32_t> mask;  // empty: the answer has ended
  bool is_slow = false;       // it took more than is ordinary
  GrammarFailure failure;
  std::atomic<bool> is_done{false};
  std::atomic<bool> is_unwanted{false};  // set by who has submitted it

  /// Does the work within `most` seconds, or what the request has left. False: it takes longer, and
  /// was stopped.
  bool run(const GrammarTimes& times, double most);
};

/// Where work on grammars is done: within a step as long as that has time, and beside the steps by
/// two threads of its own, started when they are needed. One of them tries what comes in order;
/// what takes longer than `first_try` goes to the other, the shortest first. So whoever has
/// ordinary masks does not wait for those who have not.
///
/// For one thread at a time, but for `step_left` and `spend_step`, which all threads of a step
/// call.
class GrammarWork {
 public:
  GrammarWork() = default;
  ~GrammarWork();
  GrammarWork(const GrammarWork&) = delete;
  GrammarWork& operator=(const GrammarWork&) = delete;

  /// Changed by tests alone, and of no use to threads that run.
  GrammarTimes times;

  void begin_step();
  /// Seconds that the step has left on the calling thread.
  double step_left() const;
  void spend_step(double seconds);

  void submit(std::shared_ptr<MaskJob> job);
  /// Returns when a job has ended since the last call, or after so many seconds.
  void await(double seconds);

 private:
  enum class Lane : uint8_t { kFirst, kLong };
  void work(Lane lane);
  std::shared_ptr<MaskJob> take(Lane lane);

  mutable std::mutex step_mutex_;
  std::unordered_map<std::thread::id, double> step_spent_;

  std::mutex mutex_;
  std::condition_variable has_come_, has_ended_;
  std::deque<std::shared_ptr<MaskJob>> waiting_[2];  // by lane
  std::shared_ptr<MaskJob> running_[2];
  std::thread threads_[2];
  bool is_closing_ = false;
  uint64_t num_ended_ = 0, num_seen_ = 0;
};

}  // namespace openspec
