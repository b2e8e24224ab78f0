#pragma once

#include <cstdint>
#include <vector>

#include "kernels/drafts/kept_rows.h"
#include "runtime/step/step_backend.h"

namespace openspec {

/// What the drafter learns from on the CPU: features of a step's rows, and of rows that wait.
class HostTeacher {
 public:
  HostTeacher(const StepContext& context, const ExecContext& exec)
      : context_(context), exec_(exec) {}

  /// Takes the memory of the captured rows.
  void set_capture(int num_layers);
  /// [max_num_batched_tokens, num_layers * hidden_size], the step's.
  void* features() { return features_.data(); }
  const void* features() const { return features_.data(); }
  void add_sequence(int slot);

  /// Steps whose rows wait.
  int num_kept_steps() const { return num_kept_steps_; }
  /// The drafter learns from the step.
  void learn(const CommittedStep& step);
  /// The step's rows wait.
  void keep(const CommittedStep& step);
  /// The drafter learns from all rows that wait.
  void learn_kept();
  void forget_kept() { num_kept_steps_ = 0; }

 private:
  KeptRows kept_rows();

  const StepContext& context_;
  const ExecContext& exec_;
  std::vector<std::byte> features_;
  std::vector<std::byte> kept_;  // see KeptRows, as the next
  std::vector<int32_t> kept_begin_;
  int num_kept_steps_ = 0;
};

}  // namespace openspec
