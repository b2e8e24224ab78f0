#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kernels/exec.h"
#include "kernels/linear.h"
#include "kernels/rows.h"
#include "model/buffer.h"

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

  int qkv_width() const { return (num_q_heads + 2 * num_kv_heads) * head_dim; }
  /// Throws ArgumentError naming the field that cannot be.
  void validate() const;
};

/// A tensor that a checkpoint must hold.
struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
};

/// Qwen3 decoder: weights and one forward pass over ragged rows.
class Qwen3 {
 public:
  /// Room for `max_rows` rows a pass and `max_logits_rows` rows of logits at a time.
  Qwen3(const TargetConfig& config, DType dtype, int max_rows, int max_logits_rows,
        int max_model_len, int num_threads);

  const TargetConfig& config() const { return config_; }

  /// Every tensor of the checkpoint, each to be given once to load_tensor.
  std::vector<TensorSpec> expected_tensors() const;
  /// Packs `data` (row-major, `dtype`, `bytes` long); the source may go away afterwards.
  void load_tensor(const std::string& name, const void* data, size_t bytes, DType dtype);
  /// Throws ArgumentError naming a tensor that was not given.
  void finish_loading() const;

  /// Runs all layers over `rows`, writing K and V to `kv[layer]`. Afterwards `logits` may be asked
  /// for any of the rows. `capture_layers` (rising) names layers whose output, the residual stream
  /// after the layer, is copied to `captured` [num_rows, num_captures * hidden_size] in the
  /// activation type.
  void forward(const ExecContext& exec, const RowBatch& rows, const PageTableView& page_table,
               const std::vector<KvLayerView>& kv, const std::vector<int>& capture_layers,
               void* captured);

  /// Logits of rows `row[0 .. count)` of the last forward pass: out [count, vocab_size] fp32.
  void logits(const ExecContext& exec, const int32_t* row, int count, float* out);

  /// Bytes of packed weights and of the forward pass's scratch, known before anything is allocated.
  static size_t weight_bytes(const TargetConfig& config, DType weights);
  static size_t scratch_bytes(const TargetConfig& config, DType dtype, int max_rows,
                              int max_logits_rows, int max_model_len, int num_threads);

 private:
  struct Layer {
    PackedLinear qkv, o, gate_up, down;
    const float *input_norm, *post_norm, *q_norm, *k_norm;
  };
  /// Where the rows of one checkpoint tensor go.
  struct Destination {
    std::vector<int64_t> shape;
    std::function<void(const void* data, DType dtype)> store;
    bool loaded = false;
  };
  struct Scratch {
    size_t residual, normed, qkv, q, attended, delta, activated, gathered, cos_sin, linear,
        attention, total;
  };

  static Scratch plan_scratch(const TargetConfig& config, DType dtype, int max_rows,
                              int max_logits_rows, int max_model_len, int num_threads);
  void plan_weights();
  PackedLinear add_linear(const std::string& prefix, const std::vector<std::string>& parts,
                          const std::vector<int>& outputs, int inputs, LinearEpilogue epilogue);
  void* take_weights(size_t bytes);
  const float* add_norm(const std::string& name, int width);
  void apply(const ExecContext& exec, const PackedLinear& weight, const void* x, void* out,
             int num_rows, DType out_dtype);

  TargetConfig config_;
  DType dtype_;
  int max_rows_, max_logits_rows_, max_model_len_;
  std::vector<Layer> layers_;
  PackedLinear head_;
  const float* final_norm_ = nullptr;
  Buffer weights_;  // all of them, in the order of use
  size_t num_weight_bytes_ = 0;
  void* embedding_ = nullptr;
  std::map<std::string, Destination> destinations_;
  Buffer inv_freq_;
  Scratch at_;
  Buffer scratch_;
};

}  // namespace openspec
