#include "grammar/grammar_work.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <sstream>
#include <utility>

#include "grammar/work_meter.h"

namespace openspec {

bool MaskJob::run(const GrammarTimes& times, double most) {
  const size_t num_known = state == nullptr ? 0 : std::min(state->num_tokens(), output.size());
  const size_t num_new = output.size() - num_known;
  const double free = times.free(num_new, 1, grammar->vocabulary().size());
  const double left = free + std::max(0.0, times.request - tally->seconds());
  const WorkMeter meter(std::min(most, left), &is_unwanted);
  bool is_stopped = false;
  try {
    if (state == nullptr) state = std::make_unique<GrammarState>(grammar);
    state->sync(output);
    mask.resize(static_cast<size_t>(grammar->vocabulary().num_mask_words()));
    if (!state->fill(mask)) mask.clear();
  } catch (const WorkStopped&) {
    is_stopped = true;
  } catch (const std::exception& error) {
    failure.message = error.what();
  }
  seconds = meter.seconds();
  tally->add(std::max(0.0, seconds - free));
  is_slow = seconds > times.ordinary(num_new, 1);
  if (!is_stopped) return true;
  state.reset();
  if (most < left) return false;
  std::ostringstream message;
  message << "the grammar of this request takes longer than " << times.request
          << " s of processor time: make it less ambiguous";
  failure = {message.str(), /*is_request=*/true};
  return true;
}

GrammarWork::~GrammarWork() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
    for (const auto& job : running_) {
      if (job != nullptr) job->is_unwanted = true;
    }
  }
  has_come_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void GrammarWork::begin_step() {
  const std::lock_guard lock(step_mutex_);
  step_spent_.clear();
}

double GrammarWork::step_left() const {
  const std::lock_guard lock(step_mutex_);
  const auto found = step_spent_.find(std::this_thread::get_id());
  return times.step - (found == step_spent_.end() ? 0.0 : found->second);
}

void GrammarWork::spend_step(double seconds) {
  const std::lock_guard lock(step_mutex_);
  step_spent_[std::this_thread::get_id()] += seconds;
}

void GrammarWork::submit(std::shared_ptr<MaskJob> job) {
  // What took long will take long again.
  const bool is_long = job->seconds > times.first_try;
  const auto lane = static_cast<size_t>(is_long ? Lane::kLong : Lane::kFirst);
  {
    const std::lock_guard lock(mutex_);
    waiting_[lane].push_back(std::move(job));
    for (const Lane one : {Lane::kFirst, Lane::kLong}) {
      std::thread& thread = threads_[static_cast<size_t>(one)];
      if (!thread.joinable()) thread = std::thread([this, one] { work(one); });
    }
  }
  has_come_.notify_all();
}

void GrammarWork::await(double seconds) {
  std::unique_lock lock(mutex_);
  has_ended_.wait_for(lock, std::chrono::duration<double>(seconds),
                      [&] { return num_ended_ != num_seen_; });
  num_seen_ = num_ended_;
}

void GrammarWork::work(Lane lane) {
  const double most =
      lane == Lane::kFirst ? times.first_try : std::numeric_limits<double>::infinity();
  while (const std::shared_ptr<MaskJob> job = take(lane)) {
    const bool is_over = job->is_unwanted || job->run(times, most) || job->is_unwanted;
    const std::lock_guard lock(mutex_);
    running_[static_cast<size_t>(lane)] = nullptr;
    if (!is_over) {
      waiting_[static_cast<size_t>(Lane::kLong)].push_back(job);
      has_come_.notify_all();
      continue;
    }
    job->is_done = true;
    ++num_ended_;
    has_ended_.notify_all();
  }
}

std::shared_ptr<MaskJob> GrammarWork::take(Lane lane) {
  std::deque<std::shared_ptr<MaskJob>>& waiting = waiting_[static_cast<size_t>(lane)];
  std::unique_lock lock(mutex_);
  has_come_.wait(lock, [&] { return is_closing_ || !waiting.empty(); });
  if (is_closing_) return nullptr;
  auto next = waiting.begin();
  if (lane == Lane::kLong) {
    next = std::min_element(waiting.begin(), waiting.end(),
                            [](const auto& a, const auto& b) { return a->seconds < b->seconds; });
  }
  std::shared_ptr<MaskJob> job = std::move(*next);
  waiting.erase(next);
  running_[static_cast<size_t>(lane)] = job;
  return job;
}

}  // namespace openspec
