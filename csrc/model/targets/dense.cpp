// Decoders of attention over paged KV and one MLP a layer, all layers alike.

#include <string>

#include "core/check.h"
#include "kernels/exchange/exchange.h"
#include "kernels/ops.h"
#include "model/parts/decoder_model.h"
#include "model/parts/decoder_pass.h"
#include "model/parts/sum_exchange.h"
#include "model/targets/outer_tensors.h"
#include "model/targets/target.h"

namespace openspec {

namespace {

/// Geometry of a target whose layers are alike and see all of the context.
struct DenseConfig : LayerGeometry {
  explicit DenseConfig(const TargetSpec& spec, TpRank whose = {})
      : LayerGeometry(geometry_of(spec.layers, spec.hidden_size, spec.rms_norm_eps)),
        num_layers(spec.num_layers()),
        vocab_size(spec.vocab_size),
        tie_word_embeddings(spec.tie_word_embeddings),
        quantized(spec.quantized) {
    for (const LayerSpec& layer : spec.layers) {
      OPENSPEC_CHECK_ARG(std::get<AttentionSpec>(layer.mixer).window == 0,
                         "targets whose layers slide are not supported");
    }
    check_size("vocab_size", vocab_size);
    rank = whose;
    validate();
    vocabulary();
  }
  /// The rank's columns of the logits.
  Part vocabulary() const { return unit_part("tokens", vocab_size, rank); }
  ForwardLimits pass_limits(const ForwardLimits& limits) const { return limits; }

  int num_layers;
  int vocab_size;
  bool tie_word_embeddings;
  QuantizedTensors quantized;
};

struct DenseTensors : OuterTensors {
  DenseTensors(Weights& weights, const DenseConfig& c) {
    weights.expect_quantized(c.quantized);
    for (int i = 0; i < c.num_layers; ++i) {
      layers.push_back(add_decoder_layer(weights, c, "model.layers." + std::to_string(i) + "."));
    }
    add_outer(weights, c, c.vocabulary());
  }

  std::vector<DecoderLayer> layers;
};

class DenseTarget final : public TargetModel, DecoderModel<DenseConfig, DenseTensors> {
 public:
  explicit DenseTarget(const TargetSetup& setup)
      : DecoderModel(DenseConfig(setup.spec, setup.rank), setup.dtype, setup.device, setup.limits,
                     setup.num_threads, setup.exchange) {
    tensors_.shared.head.exchange = setup.exchange;
  }

  static size_t weight_bytes_of(const TargetSetup& setup) {
    return weight_bytes(DenseConfig(setup.spec, setup.rank), setup.device);
  }
  static size_t scratch_bytes_of(const TargetSetup& setup) {
    return scratch_bytes(DenseConfig(setup.spec, setup.rank), setup.dtype, setup.device,
                         setup.limits, setup.num_threads);
  }
  static InboxFloats inbox_floats_of(const TargetSetup& setup) {
    const DenseConfig c(setup.spec, setup.rank);
    return inbox_floats(setup.device, setup.rank.size, c.max_splits(), setup.limits.max_rows,
                        c.hidden_size);
  }

  std::vector<Weights*> weights() override { return {&weights_}; }
  SharedTensors shared() const override { return tensors_.shared; }
  void forward(const ExecContext& exec, const RowBatch& rows, const TargetMemory& memory,
               const std::vector<int>& capture_layers, void* captured) override;
  void logits(const ExecContext& exec, const int32_t* row, int count, float* out) override;
};

void DenseTarget::forward(const ExecContext& exec, const RowBatch& rows, const TargetMemory& memory,
                          const std::vector<int>& capture_layers, void* captured) {
  const DenseConfig& c = config_;
  OPENSPEC_CHECK(rows.num_rows >= 1 && rows.num_rows <= limits_.max_rows, "a step of ",
                 rows.num_rows, " rows, at most ", limits_.max_rows);
  void* residual = scratch_.residual();
  void* normed = scratch_.normed();
  DecoderPass pass(exec, scratch_, rows, memory.page_table, memory.kv.front(), inv_freq_.floats(),
                   /*first_token=*/0, /*is_fenced=*/true);
  const Captures captures{capture_layers, captured};
  ops::embedding(exec, {.token = rows.row_token,
                        .table = tensors_.shared.embedding,
                        .out = residual,
                        .num_rows = rows.num_rows,
                        .width = c.hidden_size,
                        .dtype = dtype_});
  for (int i = 0; i < c.num_layers; ++i) {
    const DecoderLayer& layer = tensors_.layers[static_cast<size_t>(i)];
    pass.norm_after(i - 1, captures, residual, layer.input_norm, normed);
    pass.attend(layer, normed, memory.kv[static_cast<size_t>(i)]);
    pass.norm(residual, layer.post_norm, normed);
    pass.mlp(layer, normed);
  }
  pass.final_norm(c.num_layers, captures, residual, tensors_.final_norm, normed);
}

void DenseTarget::logits(const ExecContext& exec, const int32_t* row, int count, float* out) {
  OPENSPEC_CHECK(count <= limits_.max_logits_rows, count, " rows of logits, at most ",
                 limits_.max_logits_rows);
  scratch_.logits(exec, tensors_.shared.head, row, count, out, are_dealt(count));
}

const TargetRegistration registration(
    "dense",
    {.make = [](const TargetSetup& setup) -> std::unique_ptr<TargetModel> {
       return std::make_unique<DenseTarget>(setup);
     },
     .weight_bytes = &DenseTarget::weight_bytes_of,
     .scratch_bytes = &DenseTarget::scratch_bytes_of,
     .state_needs =
         [](const TargetSetup& setup) {
           const DenseConfig config(setup.spec, setup.rank);
           return StateNeeds{.kv_layers = {setup.spec.layers.size(),
                                           {config.part().kv_heads.count, config.head_dim}}};
         },
     .inbox_floats = &DenseTarget::inbox_floats_of});

}  // namespace

}  // namespace openspec
