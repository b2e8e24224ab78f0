#pragma once

#include <span>
#include <vector>

#include "model/parts/decoder_pass.h"
#include "model/parts/forward_limits.h"
#include "model/targets/outer_tensors.h"
#include "model/targets/target_spec.h"

namespace openspec {

/// Geometry of a decoder of attention and one MLP a layer whose layers are alike and see all of the
/// context.
struct DenseConfig : LayerGeometry {
  /// Throws ArgumentError for layers that differ or slide.
  explicit DenseConfig(const TargetSpec& spec, TpRank whose = {});

  /// The rank's columns of the logits.
  Part vocabulary() const { return unit_part("tokens", vocab_size, rank); }
  ForwardLimits pass_limits(const ForwardLimits& limits) const { return limits; }

  int num_layers;
  int vocab_size;
  bool tie_word_embeddings;
  QuantizedTensors quantized;
};

struct DenseTensors : OuterTensors {
  DenseTensors(Weights& weights, const DenseConfig& config)
      : DenseTensors(weights, config, config.vocabulary()) {}
  /// The head has these rows of the vocabulary, the embedding `more` than the checkpoint.
  DenseTensors(Weights& weights, const DenseConfig& config, const Part& vocabulary,
               Weights::MoreRows more = {});

  std::vector<DecoderLayer> layers;
};

/// All layers, from a residual stream that holds the rows' embeddings; `normed` becomes what the
/// head reads.
void run_dense_layers(DecoderPass& pass, const DenseTensors& tensors,
                      std::span<const KvLayerView> kv, const Captures& captures, void* residual,
                      void* normed);

}  // namespace openspec
