#pragma once

#include <cstdint>

#include "kernels/exec.h"

namespace openspec {

/// What a linear does with its product before writing it.
enum class LinearEpilogue : uint8_t {
  kNone,    // out = x W^T
  kSwiGlu,  // W holds gate and up; out[:, j] = silu(gate_j) * up_j, out has num_outputs / 2 columns
};

/// A weight matrix repacked for streaming. On the CPU: panels of `kLinearPanel` output columns,
/// each panel [num_inputs][kLinearPanel], zero-padded to whole panels; a SwiGLU matrix alternates
/// gate and up panels. A bf16 line interleaves columns i and i + 16, so that a shift and a mask of
/// 32-bit lanes unpack it. Made once at load by linear_pack_cpu. `data` should be aligned to 64
/// bytes: a line is then one cache line.
struct PackedLinear {
  const void* data = nullptr;
  int num_outputs = 0;  // N, gate and up together for SwiGLU
  int num_inputs = 0;   // K
  DType dtype = DType::kBF16;
  LinearEpilogue epilogue = LinearEpilogue::kNone;
};

inline constexpr int kLinearPanel = 32;       // output columns
inline constexpr int kLinearInPlaceRows = 6;  // fp32 rows read where they are; more are copied

/// Bytes of the packed form of a [num_outputs, num_inputs] matrix.
size_t linear_packed_bytes_cpu(int num_outputs, int num_inputs, DType dtype,
                               LinearEpilogue epilogue);

/// Packs rows [first_output, first_output + num_rows) of the (fused) matrix from `rows`
/// ([num_rows, num_inputs] row-major, dtype `source_dtype`) into `packed`, so that fused matrices
/// (q|k|v, gate|up) are packed piece by piece without a copy of the whole. bf16 goes to bf16 or
/// f32; f32 goes to f32 only.
void linear_pack_cpu(const PackedLinear& shape, const void* rows, DType source_dtype,
                     int first_output, int num_rows, void* packed);

/// out[r, n] = sum_k x[r, k] * W[n, k], fp32 accumulation.
///
/// Row-invariant: every output element is one chain of fused multiply-adds over k = 0 .. K-1,
/// whatever the number of rows, the row's place among them and the number of threads.
struct LinearParams {
  PackedLinear weight;
  const void* x = nullptr;  // [num_rows, num_inputs] dtype
  void* out = nullptr;      // [num_rows, num_outputs (/ 2 for SwiGLU)] out_dtype
  int num_rows = 0;
  DType dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  float* workspace =
      nullptr;  // linear_workspace_bytes_cpu(num_rows, num_inputs, dtype) bytes, may be null if 0
};

size_t linear_workspace_bytes_cpu(int max_num_rows, int num_inputs, DType dtype);
void linear_cpu(const ExecContext& exec, const LinearParams& params);

}  // namespace openspec
