#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "kernels/attention/span_attention.h"
#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "kernels/linear/linear.h"
#include "model/parts/layer_spec.h"
#include "model/weights/buffer.h"
#include "model/weights/weights.h"

namespace openspec {

/// What a decoder layer of targets and heads is made of: pre-norm attention over paged KV,
/// then a SwiGLU MLP, both added to a residual stream.
struct LayerGeometry : AttentionSpec, DenseMlpSpec {
  int hidden_size = 0;
  int num_inputs = 1;  // states side by side that attention reads
  float rms_norm_eps = 1e-6f;

  int attention_inputs() const { return num_inputs * hidden_size; }
  int q_width() const { return num_q_heads * head_dim; }
  int kv_width() const { return num_kv_heads * head_dim; }
  int qkv_width() const { return q_width() + 2 * kv_width(); }
  /// Throws ArgumentError naming the field that cannot be.
  void validate() const;
};

/// The one geometry of all layers, whose windows may differ. Throws ArgumentError naming the first
/// layer that is not like the others.
LayerGeometry geometry_of(const std::vector<LayerSpec>& layers, int hidden_size,
                          float rms_norm_eps);

/// Throws ArgumentError unless it is a size of something.
void check_size(const char* name, int value);

/// The most that one forward pass has to hold.
struct ForwardLimits {
  int max_rows = 1;
  int max_spans = 1;
  int max_logits_rows = 1;  // at a time
  int max_tokens = 1;       // of one sequence, drafts included
  int max_inputs = 0;       // of a linear to hidden_size beside those of the layers
  int max_outputs = 0;      // of another linear beside them
  int max_taps = 0;         // of a BlockConv
};

struct DecoderLayer {
  PackedLinear qkv, o, gate_up, down;
  const float *input_norm = nullptr, *post_norm = nullptr, *q_norm = nullptr, *k_norm = nullptr;
};

/// A convolution of what goes into an attention or MLP and of what comes out of it, along the rows
/// of a block (block_conv.h); the coefficients of both come from what goes in.
struct BlockConv {
  PackedLinear taps;            // hidden_size -> [2 (in, out), kConvTaps, hidden_size / group]
  const float* base = nullptr;  // [2, kConvTaps, hidden_size]
  int group = 0;
};

/// Takes a layer's place among the weights; names as in Hugging Face checkpoints below `prefix`.
DecoderLayer add_decoder_layer(Weights& weights, const LayerGeometry& geometry,
                               const std::string& prefix);

/// Throws ArgumentError if the device's kernels do not cover the geometry.
void check_geometry(const LayerGeometry& geometry, DType dtype, Device device);

/// A linear's output on its way to the norm that adds it to a residual stream: [num_rows,
/// hidden_size], or the sums of the weight's splits apart.
struct Delta {
  const void* rows = nullptr;
  const float* partials = nullptr;
  int num_partials = 0;
};

/// Memory of passes through layers of one geometry, and of what a model does around them.
class DecoderScratch {
 public:
  DecoderScratch(const LayerGeometry& geometry, DType dtype, Device device,
                 const ForwardLimits& limits, int num_threads);
  static size_t bytes(const LayerGeometry& geometry, DType dtype, Device device,
                      const ForwardLimits& limits, int num_threads);

  /// [max_rows, hidden_size] for the residual stream and for a norm of it, until the next pass.
  void* residual() { return buffer_.at(at_.residual); }
  void* normed() { return buffer_.at(at_.normed); }
  /// [max_rows, attention_inputs]
  std::byte* attention_in() { return buffer_.at(at_.attention_in); }

  /// out [num_rows, outputs] = x W^T, or `partials` where they are given; outside of a pass too.
  void linear(const ExecContext& exec, const PackedLinear& weight, const void* x, void* out,
              int num_rows, DType out_dtype, float* partials = nullptr);
  /// Logits of rows of `normed`: out [count, outputs] fp32; row [count] lies on the device, of -1
  /// comes anything; null: the first rows. The residual stream is gone then.
  void logits(const ExecContext& exec, const PackedLinear& head, const int32_t* row, int count,
              float* out);

 private:
  friend class DecoderPass;
  struct Places {
    size_t residual, normed, attention_in, qkv, q, attended, delta, activated, cos_sin, linear,
        attention, partials, taps, total;
  };
  static Places plan(const LayerGeometry& geometry, DType dtype, Device device,
                     const ForwardLimits& limits, int num_threads);

  /// out = x W^T for the next norm, hidden_size outputs wide; there until the next one.
  Delta delta(const ExecContext& exec, const PackedLinear& weight, const void* x, int num_rows);

  LayerGeometry geometry_;
  DType dtype_;
  int max_tokens_;
  Places at_;
  Buffer buffer_;
};

/// What the attention of a layer sees: the rows' spans, whose prefixes may begin behind a
/// sequence's first tokens, and how much of them (SpanAttentionParams).
struct Sight {
  RowBatch rows;
  PageTableView pages;
  int window = 0;
  bool is_causal = true;
  bool window_follows_rows = false;
};

/// One pass of a batch of rows through decoder layers: what an attention or an MLP puts out is
/// added to the residual stream by the next `norm`.
class DecoderPass {
 public:
  /// `inv_freq`, the geometry's, lies on the device; `kv` is any of the layers'. Attention does not
  /// see tokens before `first_token`; where it is not causal, a row sees its whole span. With
  /// `is_fenced` the pass begins when all before it is complete, and its attention reads the
  /// prefixes early: that pays where many layers follow.
  DecoderPass(const ExecContext& exec, DecoderScratch& scratch, const RowBatch& rows,
              const PageTableView& page_table, const KvLayerView& kv, const float* inv_freq,
              int first_token = 0, bool is_causal = true, bool is_fenced = false);

  /// Layers from here on see this. What the rows are, and where their KV goes, stays.
  void see(const Sight& sight);
  /// residual += what is due; out = its norm, in rows of `out_stride` elements (0: the width).
  void norm(void* residual, const float* weight, void* out, int64_t out_stride = 0);
  /// The residual stream of the next `norm` begins as x W^T, whatever it was.
  void project(const PackedLinear& weight, const void* x);
  /// K and V of x [num_rows, attention_inputs] go to `kv`; nothing is attended to.
  void append(const DecoderLayer& layer, const void* x, const KvLayerView& kv);
  /// K and V of x [num_rows, hidden_size] for all `layers` at once, of which `context` holds the
  /// k_proj and v_proj, one layer's below the other's.
  void append_context(const PackedLinear& context, std::span<const DecoderLayer> layers,
                      const void* x, std::span<const KvLayerView> kv);
  /// The same as `append`, then attention.
  void attend(const DecoderLayer& layer, const void* x, const KvLayerView& kv);
  /// x [num_rows, hidden_size].
  void mlp(const DecoderLayer& layer, const void* x);
  /// x [num_rows, hidden_size] convolved, for `attend` or `mlp`. What is due behind them is
  /// convolved with the other coefficients; it lies in `normed` then, until the next `norm`.
  const void* convolve(const BlockConv& conv, const void* x);
  void convolve_due(const BlockConv& conv);

 private:
  void plan();
  template <typename T = std::byte>
  T* at(size_t offset) {
    return reinterpret_cast<T*>(scratch_.buffer_.at(offset));
  }

  const ExecContext& exec_;
  DecoderScratch& scratch_;
  SpanAttentionParams attention_;
  bool is_planned_ = false;
  Delta due_;            // waits for `norm`
  bool starts_ = false;  // what is due is the stream itself
};

}  // namespace openspec
