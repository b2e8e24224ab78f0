#include "model/targets/dense_layers.h"

#include <string>

#include "core/check.h"

namespace openspec {

DenseConfig::DenseConfig(const TargetSpec& spec, TpRank whose)
    : LayerGeometry(geometry_of(spec.layers, spec.hidden_size, spec.rms_norm_eps)),
      num_layers(spec.num_layers()),
      vocab_size(spec.vocab_size),
      tie_word_embeddings(spec.tie_word_embeddings),
      quantized(spec.quantized) {
  for (const LayerSpec& layer : spec.layers) {
    OPENSPEC_CHECK_ARG(std::get<AttentionSpec>(layer.mixer).window == 0,
                       "models whose layers slide are not supported");
  }
  check_size("vocab_size", vocab_size);
  rank = whose;
  validate();
  vocabulary();
}

DenseTensors::DenseTensors(Weights& weights, const DenseConfig& c, const Part& vocabulary,
                           Weights::MoreRows more) {
  weights.expect_quantized(c.quantized);
  for (int i = 0; i < c.num_layers; ++i) {
    layers.push_back(add_decoder_layer(weights, c, "model.layers." + std::to_string(i) + "."));
  }
  add_outer(weights, c, vocabulary, more);
}

void run_dense_layers(DecoderPass& pass, const DenseTensors& tensors,
                      std::span<const KvLayerView> kv, const Captures& captures, void* residual,
                      void* normed) {
  const auto num_layers = static_cast<int>(tensors.layers.size());
  for (int i = 0; i < num_layers; ++i) {
    const DecoderLayer& layer = tensors.layers[static_cast<size_t>(i)];
    pass.norm_after(i - 1, captures, residual, layer.input_norm, normed);
    pass.attend(layer, normed, kv[static_cast<size_t>(i)]);
    pass.norm(residual, layer.post_norm, normed);
    pass.mlp(layer, normed);
  }
  pass.norm_after(num_layers - 1, captures, residual, tensors.shared.norm.weight, normed);
}

}  // namespace openspec
