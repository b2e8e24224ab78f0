// Decoders in which layers of gated attention alternate with layers of Gated DeltaNet, which keep a
// running state: Qwen3.5 and its successors.

#include <algorithm>
#include <string>
#include <variant>

#include "core/check.h"
#include "kernels/ops.h"
#include "model/parts/decoder_model.h"
#include "model/parts/decoder_pass.h"
#include "model/parts/delta_net_layer.h"
#include "model/targets/outer_tensors.h"
#include "model/targets/target.h"

namespace openspec {

namespace {

// Records before its own that a row reads, with those that a step before it may have left to fold:
// two blocks, and its own up to it.
constexpr int kNumRead = 3 * kDeltaBlock - 1;

bool has_state(const LayerSpec& layer) { return std::holds_alternative<DeltaNetSpec>(layer.mixer); }

/// The geometry of the layers of attention, and the shape of the others.
struct HybridConfig : LayerGeometry {
  explicit HybridConfig(const TargetSetup& setup)
      : LayerGeometry(attention_of(setup.spec)),
        layers(setup.spec.layers),
        vocab_size(setup.spec.vocab_size),
        tie_word_embeddings(setup.spec.tie_word_embeddings),
        quantized(setup.spec.quantized) {
    norms_from_one = true;
    check_size("vocab_size", vocab_size);
    validate();
    for (const LayerSpec& layer : layers) {
      if (!has_state(layer)) continue;
      const DeltaShape own = delta_shape(std::get<DeltaNetSpec>(layer.mixer));
      OPENSPEC_CHECK_ARG(num_states == 0 || (own.num_k_heads == shape.num_k_heads &&
                                             own.num_v_heads == shape.num_v_heads),
                         "layers with a running state must be alike");
      shape = own;
      ++num_states;
    }
    OPENSPEC_CHECK_ARG(num_states > 0, "the model has no layer with a running state");
  }

  void validate() const { LayerGeometry::validate(/*may_turn_partly=*/true); }
  static LayerGeometry attention_of(const TargetSpec& spec) {
    std::vector<LayerSpec> attention;
    std::copy_if(spec.layers.begin(), spec.layers.end(), std::back_inserter(attention),
                 [](const LayerSpec& layer) { return !has_state(layer); });
    OPENSPEC_CHECK_ARG(!attention.empty(), "the model has no layer of attention");
    return geometry_of(attention, spec.hidden_size, spec.rms_norm_eps);
  }
  ForwardLimits pass_limits(ForwardLimits limits) const {
    limits.max_inputs = shape.v_width();
    return limits;
  }

  std::vector<LayerSpec> layers;
  DeltaShape shape;
  int num_states = 0;
  int vocab_size;
  bool tie_word_embeddings;
  QuantizedTensors quantized;
};

struct HybridTensors : OuterTensors {
  struct Layer {
    DecoderLayer decoder;  // of a layer with a state, its norms and MLP
    DeltaNetLayer delta_net;
  };

  HybridTensors(Weights& weights, const HybridConfig& c) {
    weights.expect_quantized(c.quantized);
    for (size_t i = 0; i < c.layers.size(); ++i) {
      const std::string prefix = "model.layers." + std::to_string(i) + ".";
      Layer& layer = layers.emplace_back();
      if (has_state(c.layers[i])) {
        layer.decoder.input_norm =
            weights.add_norm(prefix + "input_layernorm.weight", c.hidden_size, c.norms_from_one);
        layer.delta_net = add_delta_net(weights, c.shape, c.hidden_size, prefix);
      } else {
        add_attention(weights, c, prefix, layer.decoder);
      }
      add_mlp(weights, c, prefix, layer.decoder);
    }
    add_outer(weights, c, c.vocab_size);
  }

  std::vector<Layer> layers;
};

class HybridTarget final : public TargetModel, DecoderModel<HybridConfig, HybridTensors> {
 public:
  explicit HybridTarget(const TargetSetup& setup)
      : DecoderModel(HybridConfig(setup), setup.dtype, setup.device, setup.limits,
                     setup.num_threads),
        delta_net_(config_.shape, config_.rms_norm_eps, setup.dtype, setup.device, limits_,
                   setup.num_threads) {}

  static size_t weight_bytes_of(const TargetSetup& setup) {
    return weight_bytes(HybridConfig(setup), setup.device);
  }
  static size_t scratch_bytes_of(const TargetSetup& setup) {
    const HybridConfig c(setup);
    return scratch_bytes(c, setup.dtype, setup.device, setup.limits, setup.num_threads) +
           DeltaNetPart::bytes(c.shape, setup.dtype, setup.device, setup.limits, setup.num_threads);
  }
  static StateNeeds state_needs_of(const TargetSetup& setup) {
    const HybridConfig c(setup);
    const auto num_states = static_cast<size_t>(c.num_states);
    return {.kv_layers = {c.layers.size() - num_states, {c.num_kv_heads, c.head_dim}},
            .record_bytes = num_states * c.shape.record_bytes(setup.dtype),
            .num_read = kNumRead,
            .tail_bytes = num_states * c.shape.conv_row_bytes(setup.dtype),
            .num_tail_read = kDeltaTaps - 1,
            .num_base_tiles = c.num_states * c.shape.num_tiles(),
            .takes_trees = false,
            .max_drafts = kMaxDeltaStepRows - 1};
  }

  std::vector<Weights*> weights() override { return {&weights_}; }
  SharedTensors shared() const override { return tensors_.shared; }
  void forward(const ExecContext& exec, const RowBatch& rows, const TargetMemory& memory,
               const std::vector<int>& capture_layers, void* captured) override;
  void logits(const ExecContext& exec, const int32_t* row, int count, float* out) override;

 private:
  DeltaNetPart delta_net_;
};

void HybridTarget::forward(const ExecContext& exec, const RowBatch& rows,
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
  int num_states = 0;
  size_t num_attention = 0;
  for (size_t i = 0; i < config_.layers.size(); ++i) {
    const HybridTensors::Layer& layer = tensors_.layers[i];
    pass.norm_after(static_cast<int>(i) - 1, captures, residual, layer.decoder.input_norm, normed);
    if (has_state(config_.layers[i])) {
      delta_net_.run(exec, pass, scratch_, layer.delta_net, num_states++, rows, memory.states,
                     normed);
    } else {
      pass.attend(layer.decoder, normed, memory.kv[num_attention++]);
    }
    pass.norm(residual, layer.decoder.post_norm, normed);
    pass.mlp(layer.decoder, normed);
  }
  pass.norm_after(static_cast<int>(config_.layers.size()) - 1, captures, residual,
                  tensors_.shared.norm.weight, normed);
}

void HybridTarget::logits(const ExecContext& exec, const int32_t* row, int count, float* out) {
  OPENSPEC_CHECK(count <= limits_.max_logits_rows, count, " rows of logits, at most ",
                 limits_.max_logits_rows);
  scratch_.logits(exec, tensors_.shared.head, row, count, out);
}

const TargetRegistration registration(
    "hybrid", {.make = [](const TargetSetup& setup) -> std::unique_ptr<TargetModel> {
                 return std::make_unique<HybridTarget>(setup);
               },
               .weight_bytes = &HybridTarget::weight_bytes_of,
               .scratch_bytes = &HybridTarget::scratch_bytes_of,
               .state_needs = &HybridTarget::state_needs_of});

}  // namespace

}  // namespace openspec
