#pragma once

#include "kernels/choose.h"
#include "kernels/embedding.h"
#include "kernels/linear.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/span_attention.h"

/// The ops of a forward pass by name, so that a model is written without naming a device; here is
/// the one place to choose between implementations. Today there is the CPU's.
namespace openspec::ops {

inline void embedding(const ExecContext& exec, const EmbeddingParams& params) {
  embedding_cpu(exec, params);
}
inline void rms_norm(const ExecContext& exec, const RmsNormParams& params) {
  rms_norm_cpu(exec, params);
}
inline void linear(const ExecContext& exec, const LinearParams& params) {
  linear_cpu(exec, params);
}
inline void rope_angles(const ExecContext& exec, const RopeAnglesParams& params) {
  rope_angles_cpu(exec, params);
}
inline void rope_append(const ExecContext& exec, const RopeAppendParams& params) {
  rope_append_cpu(exec, params);
}
inline void span_attention(const ExecContext& exec, const SpanAttentionParams& params) {
  span_attention_cpu(exec, params);
}
inline void choose(const ExecContext& exec, const ChooseParams& params) {
  choose_cpu(exec, params);
}

}  // namespace openspec::ops
