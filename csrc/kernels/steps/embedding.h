#pragma once

#include "kernels/common/exec.h"

namespace openspec {

/// out[r] = table[token[r]].
struct EmbeddingParams {
  const int32_t* token = nullptr;  // [num_rows], each in [0, vocab_size)
  const void* table = nullptr;     // [vocab_size, width] bf16
  void* out = nullptr;             // [num_rows, width] dtype
  int num_rows = 0;
  int width = 0;
  DType dtype = DType::kF32;
};

void embedding_cpu(const ExecContext& exec, const EmbeddingParams& params);
int embedding_cuda(const EmbeddingParams& params, void* stream);

}  // namespace openspec
