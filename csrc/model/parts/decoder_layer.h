#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/common/exec.h"
#include "kernels/common/row_terms.h"
#include "kernels/linear/packed_linear.h"
#include "model/parts/forward_limits.h"
#include "model/parts/layer_spec.h"
#include "model/weights/buffer.h"
#include "model/weights/weights.h"

namespace openspec {

class SumExchange;
struct LinearParams;

/// What a rank has of a layer. Ranks have a KV head in common where there are fewer than ranks.
struct LayerPart {
  Part q_heads, kv_heads, intermediate;
};

/// What a decoder layer of targets and heads is made of: pre-norm attention over paged KV,
/// then a SwiGLU MLP, both added to a residual stream.
struct LayerGeometry : AttentionSpec, DenseMlpSpec {
  int hidden_size = 0;
  int num_inputs = 1;  // states side by side that attention reads
  float rms_norm_eps = 1e-6f;
  bool norms_from_one = false;  // the checkpoint holds norms' weights less 1, see rounds_once
  TpRank rank;                  // whose part of the layers is here

  int attention_inputs() const { return num_inputs * hidden_size; }
  /// Throws ArgumentError with the reason where ranks cannot share a layer.
  LayerPart part() const;
  /// Of o_proj and down_proj.
  int max_splits() const;
  // Of the rank's part.
  int q_width() const { return part().q_heads.count * head_dim; }
  int kv_width() const { return part().kv_heads.count * head_dim; }
  /// With the gates of the heads.
  int qkv_width() const { return (has_gate ? 2 : 1) * q_width() + 2 * kv_width(); }
  /// Of a head, what turns.
  int rotary_dim() const { return 2 * static_cast<int>(inv_freq.size()); }
  /// Throws ArgumentError naming the field that cannot be.
  void validate(bool may_turn_partly = false) const;
};

/// The one geometry of all layers, whose windows may differ. Throws ArgumentError naming the first
/// layer that is not like the others.
LayerGeometry geometry_of(const std::vector<LayerSpec>& layers, int hidden_size,
                          float rms_norm_eps);

/// Throws ArgumentError unless it is a size of something.
void check_size(const char* name, int value);

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
/// One half of a layer with the norm before it, for layers whose other half is of another kind.
void add_attention(Weights& weights, const LayerGeometry& geometry, const std::string& prefix,
                   DecoderLayer& layer);
void add_mlp(Weights& weights, const LayerGeometry& geometry, const std::string& prefix,
             DecoderLayer& layer);

/// Throws ArgumentError if the device's kernels do not cover the geometry.
void check_geometry(const LayerGeometry& geometry, DType dtype, Device device);

/// What makes logits of hidden states: the whole matrix in shards.
struct LogitsHead {
  std::vector<PackedLinear> shards;
  SumExchange* exchange = nullptr;  // by which other ranks' columns come, whose shards are not here
};

/// What a part puts out on its way to the norm that adds it to a residual stream: [num_rows,
/// hidden_size], the sums of a linear's splits apart, or rows' terms.
struct Delta {
  const void* rows = nullptr;
  const float* partials = nullptr;
  int num_partials = 0;
  RowTerms terms = {};
  // Of a weight whose other inputs are other ranks': the product itself, which is put off until
  // the norm, so that each slice of many rows is normed before the sums of the next are sent.
  const PackedLinear* weight = nullptr;
  const void* x = nullptr;
};

/// Memory of passes through layers of one geometry, and of what a model does around them.
class DecoderScratch {
 public:
  /// `exchange`: of a rank among others.
  DecoderScratch(const LayerGeometry& geometry, DType dtype, Device device,
                 const ForwardLimits& limits, int num_threads, SumExchange* exchange = nullptr);
  static size_t bytes(const LayerGeometry& geometry, DType dtype, Device device,
                      const ForwardLimits& limits, int num_threads);

  /// [max_rows, hidden_size] for the residual stream and for a norm of it, until the next pass.
  void* residual() { return buffer_.at(at_.residual); }
  void* normed() { return buffer_.at(at_.normed); }
  /// [max_rows, attention_inputs]
  std::byte* attention_in() { return buffer_.at(at_.attention_in); }

  /// out [num_rows, outputs] = x W^T, or `partials` where they are given; outside of a pass too.
  void linear(const ExecContext& exec, const PackedLinear& weight, const void* x, void* out,
              int num_rows, float* partials = nullptr);
  /// out [num_rows, outputs of the whole] fp32 = x W^T; with an exchange it lies in an area of it,
  /// and a rank may ask only for the rows that it is dealt.
  void logits_of(const ExecContext& exec, const LogitsHead& head, const void* x, int num_rows,
                 float* out, bool deals_rows = false);
  /// Logits of rows of `normed`: out [count, outputs] fp32; row [count] lies on the device, of -1
  /// comes anything; null: the first rows. The residual stream is gone then.
  void logits(const ExecContext& exec, const LogitsHead& head, const int32_t* row, int count,
              float* out, bool deals_rows = false);

 private:
  friend class DecoderPass;
  struct Places {
    size_t residual, normed, end_of_shared, attention_in, qkv, q, attended, delta, activated,
        cos_sin, linear, attention, partials, taps, total;
  };
  static Places plan(const LayerGeometry& geometry, DType dtype, Device device,
                     const ForwardLimits& limits, int num_threads);

  LinearParams linear_params(const PackedLinear& weight, const void* x, int num_rows);
  /// out = x W^T for the next norm, hidden_size outputs wide; there until the next one.
  Delta delta(const ExecContext& exec, const PackedLinear& weight, const void* x, int num_rows);

  LayerGeometry geometry_;
  DType dtype_;
  int max_tokens_;
  SumExchange* exchange_;
  int round_rows_ = 0;  // of a round of the exchange, at most
  Places at_;
  Buffer buffer_;
};

}  // namespace openspec
