#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/exec.h"
#include "kernels/common/records.h"
#include "kernels/common/rows.h"
#include "kernels/delta_net/delta_states.h"

namespace openspec {

/// A layer's shape, and what it keeps of a sequence besides its state.
struct DeltaShape {
  int num_k_heads = 0;
  int num_v_heads = 0;  // a multiple of num_k_heads: value head j has key head j * num_k / num_v

  OPENSPEC_HD int k_width() const { return num_k_heads * kDeltaHeadDim; }
  OPENSPEC_HD int v_width() const { return num_v_heads * kDeltaHeadDim; }
  /// Channels of the convolution: q, k, v.
  OPENSPEC_HD int conv_width() const { return 2 * k_width() + v_width(); }

  /// Record of a position, in bytes from its begin: k [k_width] dtype, as the convolution left it;
  /// delta [v_width] dtype; of each value head the sum of g since the block began, and 1 / |k|.
  OPENSPEC_HD size_t delta_offset(DType dtype) const {
    return static_cast<size_t>(k_width()) * (dtype == DType::kF32 ? 4 : 2);
  }
  OPENSPEC_HD size_t sums_offset(DType dtype) const {
    return static_cast<size_t>(k_width() + v_width()) * (dtype == DType::kF32 ? 4 : 2);
  }
  /// A multiple of 16.
  OPENSPEC_HD size_t record_bytes(DType dtype) const {
    return (sums_offset(dtype) + static_cast<size_t>(num_v_heads) * 8 + 15) / 16 * 16;
  }
  /// What the convolution reads of a position: its row before it, [conv_width] dtype.
  OPENSPEC_HD size_t conv_row_bytes(DType dtype) const {
    return static_cast<size_t>(conv_width()) * (dtype == DType::kF32 ? 4 : 2);
  }
  /// Tiles of a layer's state: eight a value head, of 16 columns (values) and all 128 keys.
  OPENSPEC_HD int num_tiles() const { return num_v_heads * (kDeltaHeadDim / 16); }
};

/// Gated DeltaNet between its projections: a causal convolution of four taps over q | k | v, SiLU,
/// the gated delta rule in its window form, RMS norm of each head, gate. Chains only.
///
/// Convolution: taps oldest first, fp32 fused multiply-adds, SiLU, one rounding to `dtype`.
/// Gates, fp32: beta = sigmoid(b), g = -exp(a_log) * softplus(a + dt_bias).
/// Recurrence, of a value head: row t of block b reads
///   Z, the state after block b - 2 (zero for b < 2), and of positions 16 (b - 1) .. t the records
///   k, delta (both `dtype`), c (sum of g since its block began), r = rsqrt(|k|^2 + 1e-6);
/// with s = rsqrt(|q|^2 + 1e-6) / sqrt(128), E the last c of block b - 1 (zero for b = 0) and
/// D(t, i) = exp of the sum of g over (i, t]:
///
///   delta_t = round(beta_t (v_t - e^(E + c_t) r_t Z'k_t
///                           - sum_{i < t} D(t, i) r_t r_i (k_i.k_t) delta_i))
///   o_t = round(e^(E + c_t) s_t Z'q_t + sum_{i <= t} D(t, i) s_t r_i (k_i.q_t) delta_i)
///
/// A fold adds block b to the state, C being its last c:
///
///   Z = e^C Z + sum_{i in b} e^(C - c_i) r_i k_i delta_i'
///
/// Output: round(round(o / rms(o)) * norm_weight) * silu(z), rounded.
///
/// What a row reads is fixed by its position alone, so its bits are too: they depend on neither
/// chunks, rows in the step, drafts before it, nor when a block was folded into memory.
///
/// Row r of a span stands at position span_kv_len + r - span_begin, and leaves its record and its
/// convolution row there; a rejected draft's are read by nobody. A span of more rows than a ring
/// has places leaves those of its last rows.
///
/// Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, arXiv 2412.06464; norms, gates and
/// their order as `Qwen3_5GatedDeltaNet` of transformers 5.17.
struct DeltaNetParams {
  DeltaShape shape;
  int layer = 0;  // among those with a state
  RowBatch rows;

  const void* qkv = nullptr;  // [num_rows, conv_width] dtype
  const void* z = nullptr;    // [num_rows, v_width] dtype
  const void* b = nullptr;    // [num_rows, num_v_heads] dtype
  const void* a = nullptr;    // [num_rows, num_v_heads] dtype
  int64_t qkv_stride = 0;     // elements from row to row, as of z, b, a; CUDA: multiples of 8 for
  int64_t z_stride = 0;       // qkv and z, whose rows begin at multiples of 16 bytes
  int64_t b_stride = 0;
  int64_t a_stride = 0;
  void* out = nullptr;  // [num_rows, v_width] dtype; aliases nothing

  const float* conv_weight = nullptr;  // [kDeltaTaps, conv_width], tap 3 the row's own
  const float* a_log = nullptr;        // [num_v_heads]
  const float* dt_bias = nullptr;      // [num_v_heads]
  const float* norm_weight = nullptr;  // [kDeltaHeadDim]
  float eps = 1e-6f;                   // of the norm of the output

  // Records of all layers by slot; this layer's begins `record_offset` bytes within. The ring has
  // places for all positions from the first block that is not in the state that is read to the end
  // of a span of at most max_step_rows rows: 64 are enough. A multiple of 16.
  RecordView records;
  size_t record_offset = 0;
  // Rows before the convolution, likewise; at least max_step_rows + kDeltaTaps - 1 places.
  RecordView conv_rows;
  size_t conv_offset = 0;

  DeltaStates states;
  // [num_spans] Blocks that the state which is read holds: folded_blocks(span_kv_len) or one less.
  // Of 0 blocks the state is zero, and its memory is not read.
  const int32_t* folded_read = nullptr;
  // [num_spans] Blocks that the state which is written shall hold: folded_read, and nothing is
  // written; or more. A span of at most max_step_rows rows: one more at most, and
  // folded_blocks(span_kv_len) at most. A longer one: folded_blocks(its end) at most. What can
  // still be given up must not be folded into pages that are read then.
  const int32_t* folded_write = nullptr;

  // Longer spans run as prompts: with other kernels, and the same bits. 1 to kMaxDeltaStepRows.
  int max_step_rows = kMaxDeltaStepRows;
  bool may_have_prompts = true;  // false promises that no span is longer than max_step_rows

  void* workspace = nullptr;  // delta_net_workspace_bytes_{cpu,cuda}
  DType dtype = DType::kF32;
};

size_t delta_net_workspace_bytes_cpu(const DeltaShape& shape, int num_rows, int num_threads);
void delta_net_cpu(const ExecContext& exec, const DeltaNetParams& params);

size_t delta_net_workspace_bytes_cuda(const DeltaShape& shape, int num_rows);
/// bf16. Returns a cudaError_t.
int delta_net_cuda(const DeltaNetParams& params, void* stream);

}  // namespace openspec
