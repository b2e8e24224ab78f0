#pragma once

#include <string>
#include <vector>

#include "model/parts/layer_spec.h"
#include "model/weights/tensor_scale.h"

namespace openspec {

/// A target model as its checkpoint describes it. Source: config.json, as python/openspec/specs
/// reads it.
struct TargetSpec {
  std::string kind = "dense";  // which implementation computes it
  int hidden_size = 0;
  int vocab_size = 0;
  float rms_norm_eps = 1e-6f;
  bool tie_word_embeddings = false;
  std::vector<LayerSpec> layers;
  QuantizedTensors quantized;

  int num_layers() const { return static_cast<int>(layers.size()); }
};

}  // namespace openspec
