#include "runtime/drafting/answer_memory.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/ops.h"

namespace openspec {

AnswerMemory::AnswerMemory(const RunnerConfig& config) {
  const size_t capacity = config.draft_memory_bytes / DraftMemory::kTokenBytes;
  if (capacity == 0) return;
  buffer_ = Buffer(capacity * DraftMemory::kTokenBytes, memory_of(config.device));
  memory_.capacity = static_cast<uint32_t>(capacity);
  memory_.owners = buffer_.as<uint64_t>();
  memory_.places = reinterpret_cast<uint32_t*>(memory_.owners + capacity);
  memory_.tokens = reinterpret_cast<int32_t*>(memory_.places + DraftMemory::kNumLengths * capacity);
}

void AnswerMemory::clear(const ExecContext& exec) {
  num_written_ = 0;
  if (exec.device == Device::kCuda) {
    device::fill_zero(buffer_.data(), buffer_.bytes(), exec.stream);
  } else {
    std::memset(buffer_.data(), 0, buffer_.bytes());
  }
}

void AnswerMemory::remember(const ExecContext& exec, uint64_t owner, const int32_t* tokens,
                            int num_tokens) {
  const int most = static_cast<int>(std::min(memory_.capacity - 1, uint32_t{1} << 30));
  const int count = std::min(num_tokens, most);
  // Shorter answers are found nowhere.
  if (count <= DraftMemory::length(DraftMemory::kNumLengths - 1)) return;
  const uint32_t num_more = static_cast<uint32_t>(count) + 1;
  if (num_written_ > std::numeric_limits<uint32_t>::max() - num_more) {
    clear(exec);
  }
  ops::remember(exec, {.memory = memory_,
                       .begin = num_written_,
                       .owner = owner,
                       .tokens = tokens + (num_tokens - count),
                       .num_tokens = count});
  num_written_ += num_more;
}

void AnswerMemory::recall(const ExecContext& exec, const TableView& table,
                          RecallParams params) const {
  params.memory = memory_;
  params.history = table.tokens;
  params.history_stride = table.tokens_stride;
  params.num_tokens = table.num_tokens;
  ops::recall(exec, params);
}

}  // namespace openspec
