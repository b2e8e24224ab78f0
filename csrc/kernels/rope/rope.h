#pragma once

#include "kernels/common/exec.h"
#include "kernels/common/rows.h"

namespace openspec {

/// cos_sin[r] = [cos(a_0) .. cos(a_{d/2-1}), sin(a_0) ..] * scale with a_j = position[r] *
/// inv_freq[j], angles in fp32. Taken once per step and read by every layer.
struct RopeAnglesParams {
  const int32_t* position = nullptr;  // [num_rows]
  const float* inv_freq = nullptr;    // [head_dim / 2]
  float* cos_sin = nullptr;           // [num_rows, head_dim]
  int num_rows = 0;
  int head_dim = 0;
  float scale = 1.0f;  // YaRN's attention factor; 1 without scaling
  // CUDA: ops after this one start when all before it are complete, see
  // SpanAttentionParams::is_behind_fence.
  bool is_fence = false;
};

void rope_angles_cpu(const ExecContext& exec, const RopeAnglesParams& params);
int rope_angles_cuda(const RopeAnglesParams& params, void* stream);

/// Per row: RMS norm of every q and k head over head_dim (weights shared by the heads; null skips
/// the norm), half-rotation RoPE on q and k, then K and V are written to their KV slot.
///
/// Source: Qwen3 reference order: norm, then RoPE; v untouched.
struct RopeAppendParams {
  RowBatch rows;
  const void* qkv = nullptr;  // [num_rows, (num_q_heads + 2 * num_kv_heads) * head_dim] dtype
  int row_heads = 0;          // from a row of qkv to the next; 0: just those
  // Each head of q is followed by its gate (head_gate.h), which is left where it is.
  bool has_gates = false;
  // Of a head the first so many turn; 0: all of it. CUDA: a multiple of 8, half the head at most.
  int rotary_dim = 0;
  const float* cos_sin = nullptr;  // [num_rows, rotary_dim or head_dim]
  bool rounds_once = false;        // the norms, see RmsNormParams
  const float* q_norm = nullptr;   // [head_dim] or null
  const float* k_norm = nullptr;   // [head_dim] or null
  void* q = nullptr;               // out [num_rows, num_q_heads * head_dim] dtype
  KvLayerView kv;
  int num_q_heads = 0;
  float eps = 1e-6f;
  DType dtype = DType::kF32;
};

void rope_append_cpu(const ExecContext& exec, const RopeAppendParams& params);
int rope_append_cuda(const RopeAppendParams& params, void* stream);

inline constexpr int kMaxContextLayers = 16;

/// rope_append without queries, for several layers at once.
struct AppendContextParams {
  struct Layer {
    const float* k_norm = nullptr;  // [head_dim] or null
    KvLayerView kv;                 // of one shape in all layers
  };
  RowBatch rows;
  const void* kv = nullptr;        // [num_rows, num_layers, 2 * num_kv_heads, head_dim] dtype
  const float* cos_sin = nullptr;  // [num_rows, head_dim]
  Layer layers[kMaxContextLayers];
  int num_layers = 0;
  float eps = 1e-6f;
  DType dtype = DType::kF32;
};

void append_context_cpu(const ExecContext& exec, const AppendContextParams& params);
int append_context_cuda(const AppendContextParams& params, void* stream);

}  // namespace openspec
