#pragma once

#include <cstdint>

#include "kernels/drafts/draft_memory.h"
#include "kernels/drafts/table_rows.h"
#include "model/weights/buffer.h"
#include "runtime/drafting/runner_config.h"

namespace openspec {

/// Recent answers of the engine, from which drafts are copied, too: what a device keeps of them.
/// Ranks are told the same in the same order, so they keep the same.
class AnswerMemory {
 public:
  /// Takes memory, if RunnerConfig::draft_memory_bytes says so, to be cleared before all else.
  explicit AnswerMemory(const RunnerConfig& config);

  bool exists() const { return memory_.capacity > 0; }
  /// `tokens` lie on the device, as all arrays here. Of a long answer the last tokens are kept.
  void remember(const ExecContext& exec, uint64_t owner, const int32_t* tokens, int num_tokens);
  /// See RecallParams; `seq`, `owners` and `num_wanted` are of `num_seqs` sequences.
  void recall(const ExecContext& exec, const TableView& table, RecallParams params) const;
  void clear(const ExecContext& exec);

 private:
  Buffer buffer_;
  DraftMemory memory_;
  uint32_t num_written_ = 0;  // tokens, ends of answers included
};

}  // namespace openspec
