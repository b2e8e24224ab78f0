// Decoders of attention over paged KV, whose layers have a mixture of experts as their MLP, all or
// some: Qwen3-30B-A3B and its kin.

#include <string>
#include <variant>

#include "core/check.h"
#include "kernels/ops.h"
#include "model/parts/decoder_model.h"
#include "model/parts/decoder_pass.h"
#include "model/parts/experts.h"
#include "model/targets/outer_tensors.h"
#include "model/targets/target.h"

namespace openspec {

namespace {

const ExpertsSpec* experts_of(const LayerSpec& layer) {
  return std::get_if<ExpertsSpec>(&layer.mlp);
}

/// The geometry of the layers, and the shape of their experts.
struct MixtureConfig : LayerGeometry {
  explicit MixtureConfig(const TargetSetup& setup)
      : LayerGeometry(geometry_without_experts(setup.spec)),
        layers(setup.spec.layers),
        vocab_size(setup.spec.vocab_size),
        tie_word_embeddings(setup.spec.tie_word_embeddings),
        quantized(setup.spec.quantized) {
    check_size("vocab_size", vocab_size);
    validate();
    for (const LayerSpec& layer : layers) {
      OPENSPEC_CHECK_ARG(std::get<AttentionSpec>(layer.mixer).window == 0,
                         "targets whose layers slide are not supported");
      const ExpertsSpec* own = experts_of(layer);
      if (own == nullptr) continue;
      OPENSPEC_CHECK_ARG(experts.num_experts == 0 || experts == *own,
                         "the mixtures of a model must be alike");
      experts = *own;
    }
  }

  /// Of what the layers have besides. `intermediate_size` is that of the MLP of layers without
  /// experts; if there are none, an expert's.
  static LayerGeometry geometry_without_experts(const TargetSpec& spec) {
    DenseMlpSpec mlp;
    for (const LayerSpec& layer : spec.layers) {
      const ExpertsSpec* own = experts_of(layer);
      if (own == nullptr) {
        mlp = std::get<DenseMlpSpec>(layer.mlp);
      } else if (mlp.intermediate_size == 0) {
        mlp.intermediate_size = own->intermediate_size;
      }
    }
    std::vector<LayerSpec> layers = spec.layers;
    for (LayerSpec& layer : layers) {
      if (experts_of(layer) != nullptr) layer.mlp = mlp;
    }
    return geometry_of(layers, spec.hidden_size, spec.rms_norm_eps);
  }
  ForwardLimits pass_limits(const ForwardLimits& limits) const { return limits; }

  std::vector<LayerSpec> layers;
  ExpertsSpec experts;
  int vocab_size;
  bool tie_word_embeddings;
  QuantizedTensors quantized;
};

struct MixtureTensors : OuterTensors {
  struct Layer {
    DecoderLayer decoder;  // of a layer of experts, its attention and norms
    ExpertsLayer experts;
  };

  MixtureTensors(Weights& weights, const MixtureConfig& c) {
    weights.expect_quantized(c.quantized);
    for (size_t i = 0; i < c.layers.size(); ++i) {
      const std::string prefix = "model.layers." + std::to_string(i) + ".";
      Layer& layer = layers.emplace_back();
      add_attention(weights, c, prefix, layer.decoder);
      if (experts_of(c.layers[i]) == nullptr) {
        add_mlp(weights, c, prefix, layer.decoder);
        continue;
      }
      layer.experts = add_experts(weights, c.experts, c.hidden_size, prefix);
      layer.decoder.post_norm =
          weights.add_norm(prefix + "post_attention_layernorm.weight", c.hidden_size);
    }
    add_outer(weights, c, c.vocab_size);
  }

  std::vector<Layer> layers;
};

class MixtureTarget final : public TargetModel, DecoderModel<MixtureConfig, MixtureTensors> {
 public:
  explicit MixtureTarget(const TargetSetup& setup)
      : DecoderModel(MixtureConfig(setup), setup.dtype, setup.device, setup.limits,
                     setup.num_threads),
        experts_(config_.experts, config_.hidden_size, setup.dtype, setup.device, limits_) {}

  static size_t weight_bytes_of(const TargetSetup& setup) {
    return weight_bytes(MixtureConfig(setup), setup.device);
  }
  static size_t scratch_bytes_of(const TargetSetup& setup) {
    const MixtureConfig c(setup);
    return scratch_bytes(c, setup.dtype, setup.device, setup.limits, setup.num_threads) +
           ExpertsPart::bytes(c.experts, c.hidden_size, setup.dtype, setup.device, setup.limits);
  }
  static StateNeeds state_needs_of(const TargetSetup& setup) {
    const MixtureConfig c(setup);
    return {.kv_layers = {c.layers.size(), {c.num_kv_heads, c.head_dim}}};
  }

  std::vector<Weights*> weights() override { return {&weights_}; }
  SharedTensors shared() const override { return tensors_.shared; }
  const ExpertCounts* expert_counts() const override { return experts_.counts(); }
  void forward(const ExecContext& exec, const RowBatch& rows, const TargetMemory& memory,
               const std::vector<int>& capture_layers, void* captured) override;
  void logits(const ExecContext& exec, const int32_t* row, int count, float* out) override;

 private:
  ExpertsPart experts_;
};

void MixtureTarget::forward(const ExecContext& exec, const RowBatch& rows,
                            const TargetMemory& memory, const std::vector<int>& capture_layers,
                            void* captured) {
  OPENSPEC_CHECK(rows.num_rows >= 1 && rows.num_rows <= limits_.max_rows, "a step of ",
                 rows.num_rows, " rows, at most ", limits_.max_rows);
  void *residual = scratch_.residual(), *normed = scratch_.normed();
  DecoderPass pass(exec, scratch_, rows, memory.page_table, memory.kv.front(), inv_freq_.floats(),
                   /*first_token=*/0, /*is_fenced=*/true);
  const Captures captures{capture_layers, captured};
  ops::embedding(exec, {.token = rows.row_token,
                        .table = tensors_.shared.embedding,
                        .out = residual,
                        .num_rows = rows.num_rows,
                        .width = config_.hidden_size,
                        .dtype = dtype_});
  for (size_t i = 0; i < config_.layers.size(); ++i) {
    const MixtureTensors::Layer& layer = tensors_.layers[i];
    pass.norm_after(static_cast<int>(i) - 1, captures, residual, layer.decoder.input_norm, normed);
    pass.attend(layer.decoder, normed, memory.kv[i]);
    pass.norm(residual, layer.decoder.post_norm, normed);
    if (experts_of(config_.layers[i]) != nullptr) {
      experts_.run(exec, pass, layer.experts, normed, rows);
    } else {
      pass.mlp(layer.decoder, normed);
    }
  }
  pass.norm_after(static_cast<int>(config_.layers.size()) - 1, captures, residual,
                  tensors_.shared.norm.weight, normed);
}

void MixtureTarget::logits(const ExecContext& exec, const int32_t* row, int count, float* out) {
  OPENSPEC_CHECK(count <= limits_.max_logits_rows, count, " rows of logits, at most ",
                 limits_.max_logits_rows);
  scratch_.logits(exec, tensors_.shared.head, row, count, out);
}

const TargetRegistration registration(
    "mixture", {.make = [](const TargetSetup& setup) -> std::unique_ptr<TargetModel> {
                  return std::make_unique<MixtureTarget>(setup);
                },
                .weight_bytes = &MixtureTarget::weight_bytes_of,
                .scratch_bytes = &MixtureTarget::scratch_bytes_of,
                .state_needs = &MixtureTarget::state_needs_of});

}  // namespace

}  // namespace openspec
