#include "grammar/grammar_place.h"

#include <algorithm>
#include <exception>

#include "grammar/work_meter.h"

namespace openspec {

bool GrammarPlace::may_use() {
  take_back();
  return failure_.message.empty() && job_ == nullptr && !is_slow_ && work_.step_left() > 0.0;
}

bool GrammarPlace::measure(size_t num_tokens, size_t num_masks, const std::function<void()>& call) {
  const WorkMeter meter(work_.step_left());
  bool has_ended = false;
  try {
    call();
    has_ended = true;
  } catch (const WorkStopped&) {
  } catch (const std::exception& error) {
    failure_.message = error.what();
  }
  if (!has_ended) state_.reset();
  last_seconds_ = meter.seconds();
  work_.spend_step(last_seconds_);
  const GrammarTimes& times = work_.times;
  const double free = times.free(num_tokens, num_masks, grammar_->vocabulary().size());
  tally_->add(std::max(0.0, last_seconds_ - free));
  is_slow_ = !has_ended || last_seconds_ > times.ordinary(num_tokens, num_masks);
  return has_ended;
}

std::optional<std::span<const int32_t>> GrammarPlace::made(std::span<const int32_t> output) {
  take_back();
  if (job_ != nullptr || made_ == nullptr || !failure_.message.empty()) return std::nullopt;
  if (!std::ranges::equal(made_->output, output)) return std::nullopt;
  return made_->mask;
}

void GrammarPlace::make(std::span<const int32_t> output) {
  if (made(output) || job_ != nullptr || !failure_.message.empty()) return;
  job_ = std::make_shared<MaskJob>();
  job_->grammar = grammar_;
  job_->tally = tally_;
  job_->output.assign(output.begin(), output.end());
  job_->state = std::move(state_);
  job_->seconds = last_seconds_;
  work_.submit(job_);
}

void GrammarPlace::make_if_slow(std::span<const int32_t> output) {
  take_back();
  if (is_slow_) make(output);
}

void GrammarPlace::take_back() {
  if (job_ == nullptr || !job_->is_done) return;
  made_ = std::move(job_);
  state_ = std::move(made_->state);
  is_slow_ = made_->is_slow;
  last_seconds_ = made_->seconds;
  failure_ = std::move(made_->failure);
}

void GrammarPlace::leave_job() {
  if (job_ != nullptr) job_->is_unwanted = true;
}

}  // namespace openspec
