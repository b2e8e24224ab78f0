#pragma once

#include <cstdint>
#include <vector>

#include "kernels/common/exec.h"
#include "kernels/common/rows.h"
#include "model/parts/decoder_model.h"

namespace openspec {

/// Geometry of a target model. Source: its config.json.
struct TargetConfig : LayerGeometry {
  int num_layers = 0;
  int vocab_size = 0;
  bool tie_word_embeddings = false;

  /// Throws ArgumentError naming the field that cannot be.
  void validate() const;
  ForwardLimits pass_limits(const ForwardLimits& limits) const { return limits; }
};

struct TargetTensors {
  TargetTensors(Weights& weights, const TargetConfig& config);

  std::vector<DecoderLayer> layers;
  PackedLinear head;  // hidden states, normed, to logits
  const float* final_norm = nullptr;
  const void* embedding = nullptr;  // [vocab_size, hidden_size] bf16
};

/// The decoder of all targets: weights and one forward pass over ragged rows.
class TargetModel : public DecoderModel<TargetConfig, TargetTensors> {
 public:
  using DecoderModel::DecoderModel;

  /// Runs all layers over `rows`, writing K and V to `kv[layer]`. Afterwards `logits` may be asked
  /// for any of the rows. `capture_layers` (rising) names layers whose output, the residual stream
  /// after the layer, is copied to `captured` [num_rows, num_captures * hidden_size] in the
  /// activation type.
  void forward(const ExecContext& exec, const RowBatch& rows, const PageTableView& page_table,
               const std::vector<KvLayerView>& kv, const std::vector<int>& capture_layers,
               void* captured);

  /// Logits of rows `row[0 .. count)` of the last forward pass: out [count, vocab_size] fp32. `row`
  /// lies on the device; what stands at a row of -1 is left undefined.
  void logits(const ExecContext& exec, const int32_t* row, int count, float* out);
};

}  // namespace openspec
