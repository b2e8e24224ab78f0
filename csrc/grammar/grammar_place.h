#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "grammar/grammar_work.h"

namespace openspec {

/// A sequence's place in its grammar, as steps have it: the state, or where it is while its next
/// mask is made beside the steps. Then the sequence sits steps out. Which steps a sequence sits out
/// depends on times; its text does not.
///
/// Not thread-safe; the places of different sequences are independent.
class GrammarPlace {
 public:
  /// `tally` is shared by the sequences of a request.
  GrammarPlace(std::shared_ptr<const CompiledGrammar> grammar, std::shared_ptr<GrammarTally> tally,
               GrammarWork& work)
      : grammar_(std::move(grammar)), tally_(std::move(tally)), work_(work) {}
  ~GrammarPlace() { leave_job(); }
  GrammarPlace(const GrammarPlace&) = delete;
  GrammarPlace& operator=(const GrammarPlace&) = delete;

  /// Calls use(state) with the state after `output`, for work in the step that is worth
  /// `num_masks`. False: there is no time for it in this step, or it broke off; what `use` had done
  /// until then is right.
  template <typename Use>
  bool use(std::span<const int32_t> output, size_t num_masks, const Use& use) {
    if (!may_use()) return false;
    const size_t num_known = state_ == nullptr ? 0 : std::min(state_->num_tokens(), output.size());
    return measure(output.size() - num_known, num_masks, [&] {
      if (state_ == nullptr) state_ = std::make_unique<GrammarState>(grammar_);
      state_->sync(output);
      use(*state_);
    });
  }

  /// The mask of the token after `output`, if it was made beside the steps; an empty one: the
  /// answer has ended.
  std::optional<std::span<const int32_t>> made(std::span<const int32_t> output);
  /// Has the mask of the token after `output` made beside the steps.
  void make(std::span<const int32_t> output);
  /// Does so where the step that comes would have to.
  void make_if_slow(std::span<const int32_t> output);
  /// Whether steps have nothing to do for the sequence, until its mask is made.
  bool is_away() const { return job_ != nullptr && !job_->is_done; }
  /// Whether its next mask is made beside the steps.
  bool is_slow() const { return is_slow_ || is_away(); }

  /// Ends the sequence: the step that it is in says why.
  void fail(GrammarFailure failure) { failure_ = std::move(failure); }
  const GrammarFailure& failure() const { return failure_; }

 private:
  bool may_use();
  bool measure(size_t num_tokens, size_t num_masks, const std::function<void()>& call);
  void take_back();
  void leave_job();

  std::shared_ptr<const CompiledGrammar> grammar_;
  std::shared_ptr<GrammarTally> tally_;
  GrammarWork& work_;
  std::unique_ptr<GrammarState> state_;  // null: to be made
  std::shared_ptr<MaskJob> job_;         // under way
  std::shared_ptr<MaskJob> made_;        // the last one that ended
  bool is_slow_ = false;                 // the last work was, or broke off
  double last_seconds_ = 0.0;            // of that work
  GrammarFailure failure_;
};

}  // namespace openspec
