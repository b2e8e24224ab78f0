#pragma once

#include "kernels/common/exec.h"

namespace openspec {

/// Attention with an output gate: x[r, h] *= sigmoid(gate of row r and head h), element by element,
/// in fp32 with one rounding. Source: `Qwen3_5Attention` of transformers.
struct HeadGateParams {
  void* x = nullptr;  // [num_rows, num_heads * head_dim] dtype, in place
  // Row r begins at element r * row_stride: of each head head_dim others, then its gate
  // (RopeAppendParams::has_gates).
  const void* gates = nullptr;
  int64_t row_stride = 0;
  int num_rows = 0;
  int num_heads = 0;
  int head_dim = 0;  // a multiple of 32; row_stride is one of 8
  DType dtype = DType::kF32;
};

void head_gate_cpu(const ExecContext& exec, const HeadGateParams& params);
/// bf16, with the CPU's bits.
int head_gate_cuda(const HeadGateParams& params, void* stream);

}  // namespace openspec
