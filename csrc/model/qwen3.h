#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "kernels/linear/linear.h"
#include "model/buffer.h"
#include "model/decoder_layer.h"
#include "model/weights.h"

namespace openspec {

/// Geometry of a dense Qwen3 model. Source: its config.json.
struct TargetConfig {
  int hidden_size = 0;
  int num_layers = 0;
  int num_q_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int intermediate_size = 0;
  int vocab_size = 0;
  float rms_norm_eps = 1e-6f;
  bool tie_word_embeddings = false;
  std::vector<float> inv_freq;  // [head_dim / 2], RoPE scaling applied
  float rope_scale = 1.0f;      // multiplies cos and sin

  LayerGeometry layer() const;
  /// Throws ArgumentError naming the field that cannot be.
  void validate() const;
};

/// Qwen3 decoder: weights and one forward pass over ragged rows.
class Qwen3 {
 public:
  /// `num_threads`: of the CPU ops.
  Qwen3(const TargetConfig& config, DType dtype, Device device, const ForwardLimits& limits,
        int num_threads);

  Weights& weights() { return weights_; }

  /// Runs all layers over `rows`, writing K and V to `kv[layer]`. Afterwards `logits` may be asked
  /// for any of the rows. `capture_layers` (rising) names layers whose output, the residual stream
  /// after the layer, is copied to `captured` [num_rows, num_captures * hidden_size] in the
  /// activation type.
  void forward(const ExecContext& exec, const RowBatch& rows, const PageTableView& page_table,
               const std::vector<KvLayerView>& kv, const std::vector<int>& capture_layers,
               void* captured);

  /// [vocab_size, hidden_size] bf16.
  const void* embedding() const { return embedding_; }
  /// Hidden states, normed, to logits.
  const PackedLinear& head() const { return head_; }

  /// Logits of rows `row[0 .. count)` of the last forward pass: out [count, vocab_size] fp32. `row`
  /// lies on the device; what stands at a row of -1 is left undefined.
  void logits(const ExecContext& exec, const int32_t* row, int count, float* out);

  /// Bytes of packed weights and of the forward pass's scratch, known before anything is allocated.
  static size_t weight_bytes(const TargetConfig& config, Device device);
  static size_t scratch_bytes(const TargetConfig& config, DType dtype, Device device,
                              const ForwardLimits& limits, int num_threads);

 private:
  struct Scratch {
    size_t residual, normed, gathered, total;
  };

  static Scratch plan_scratch(const TargetConfig& config, DType dtype, const ForwardLimits& limits);
  void add_weights();

  TargetConfig config_;
  DType dtype_;
  ForwardLimits limits_;
  Weights weights_;
  std::vector<DecoderLayer> layers_;
  PackedLinear head_;
  const float* final_norm_ = nullptr;
  const void* embedding_ = nullptr;
  Buffer inv_freq_;
  Scratch at_;
  Buffer scratch_;
  DecoderScratch pass_scratch_;
};

}  // namespace openspec
