#include "model/dflash.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "kernels/ops.h"

namespace openspec {

namespace {

/// Of K and V of all layers.
int context_width(const DFlashConfig& config) {
  return config.num_layers * 2 * config.layer().kv_width();
}

}  // namespace

void DFlashConfig::validate() const {
  DraftModelConfig::validate();
  check_size("num_layers", num_layers);
  OPENSPEC_CHECK_ARG(num_layers <= kMaxContextLayers, "at most ", kMaxContextLayers,
                     " draft layers are supported, got ", num_layers);
  OPENSPEC_CHECK_ARG(head_dim % 32 == 0, "head_dim must be a multiple of 32, got ", head_dim);
  OPENSPEC_CHECK_ARG(draft_vocab_size == vocab_size || has_head, "a head of ", draft_vocab_size,
                     " columns needs weights of its own, the target has ", vocab_size);
  OPENSPEC_CHECK_ARG(markov_rank >= 0 && markov_rank <= kMaxPairRank && markov_rank % 8 == 0,
                     "markov_rank must be a multiple of 8, at most ", kMaxPairRank, ", got ",
                     markov_rank);
  OPENSPEC_CHECK_ARG(markov_rank == 0 || draft_vocab_size == vocab_size,
                     "a Markov head needs the target's whole vocabulary");
  OPENSPEC_CHECK_ARG(!has_confidence || markov_rank > 0,
                     "a confidence head needs a Markov head beside it");
}

DFlash::DFlash(const DFlashConfig& config, DType dtype, Device device, const ForwardLimits& limits,
               int num_threads)
    : config_((config.validate(), check_geometry(config.layer(), dtype, device), config)),
      dtype_(dtype),
      weights_(device, weight_bytes(config, device)),
      at_(plan_scratch(config_, dtype_, limits)),
      pass_scratch_(config_.layer(), dtype_, device, config_.pass_limits(limits), num_threads) {
  const DFlashConfig& c = config_;
  const LayerGeometry layer = c.layer();
  fc_ = weights_.add_linear("", {"fc.weight"}, {c.hidden_size}, c.num_captures * c.hidden_size,
                            LinearEpilogue::kNone, /*may_split=*/true);
  hidden_norm_ = weights_.add_norm("hidden_norm.weight", c.hidden_size);
  std::vector<std::string> context;
  for (int i = 0; i < c.num_layers; ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".";
    layers_.push_back(add_decoder_layer(weights_, layer, prefix));
    for (const char* part : {"k", "v"}) {
      context.push_back(prefix + "self_attn." + part + "_proj.weight");
    }
  }
  context_ = weights_.add_linear("", context, std::vector<int>(context.size(), layer.kv_width()),
                                 c.hidden_size, LinearEpilogue::kNone);
  final_norm_ = weights_.add_norm("norm.weight", c.hidden_size);
  if (c.has_head) {
    head_ = weights_.add_linear("", {"lm_head.weight"}, {c.draft_vocab_size}, c.hidden_size,
                                LinearEpilogue::kNone);
  }
  if (c.has_embedding) {
    embedding_ = weights_.add_table("embed_tokens.weight", c.vocab_size, c.hidden_size);
  }
  if (c.has_token_map) token_map_ = weights_.add_token_map("d2t", c.draft_vocab_size, c.vocab_size);
  if (c.markov_rank > 0) {
    markov_in_ = weights_.add_table("markov_head.markov_w1.weight", c.vocab_size, c.markov_rank);
    markov_out_ = weights_.add_table("markov_head.markov_w2.weight", c.vocab_size, c.markov_rank);
  }
  if (c.has_confidence) {
    confidence_weight_ = weights_.add_row("confidence_head.proj.weight", c.confidence_inputs());
    confidence_bias_ = weights_.add_norm("confidence_head.proj.bias", 1);
  }

  inv_freq_ = c.inv_freq(device);
  scratch_ = Buffer(at_.total, memory_of(device));
}

size_t DFlash::weight_bytes(const DFlashConfig& c, Device device) {
  const auto linear = [&](int outputs, int inputs) {
    return Weights::linear_bytes(device, outputs, inputs, LinearEpilogue::kNone);
  };
  size_t bytes = linear(c.hidden_size, c.num_captures * c.hidden_size) +
                 static_cast<size_t>(c.num_layers) * decoder_layer_bytes(c.layer(), device) +
                 linear(context_width(c), c.hidden_size) + 2 * Weights::norm_bytes(c.hidden_size);
  if (c.has_head) bytes += linear(c.draft_vocab_size, c.hidden_size);
  if (c.has_embedding) bytes += Weights::table_bytes(c.vocab_size, c.hidden_size);
  if (c.has_token_map) bytes += Weights::token_map_bytes(c.draft_vocab_size, c.vocab_size);
  if (c.markov_rank > 0) bytes += 2 * Weights::table_bytes(c.vocab_size, c.markov_rank);
  if (c.has_confidence) {
    bytes += Weights::norm_bytes(c.confidence_inputs()) + Weights::norm_bytes(1);
  }
  return bytes;
}

DFlash::Scratch DFlash::plan_scratch(const DFlashConfig& c, DType dtype,
                                     const ForwardLimits& limits) {
  Scratch at{};
  const auto take = [&](int width, size_t bytes) {
    const size_t offset = at.total;
    at.total +=
        area_bytes(static_cast<size_t>(limits.max_rows) * static_cast<size_t>(width) * bytes);
    return offset;
  };
  at.residual = take(c.hidden_size, dtype_bytes(dtype));
  at.normed = take(c.hidden_size, dtype_bytes(dtype));
  at.kv = take(context_width(c), dtype_bytes(dtype));
  at.cos_sin = take(c.head_dim, sizeof(float));
  return at;
}

size_t DFlash::scratch_bytes(const DFlashConfig& config, DType dtype, Device device,
                             const ForwardLimits& limits, int num_threads) {
  return plan_scratch(config, dtype, limits).total +
         DecoderScratch::bytes(config.layer(), dtype, device, config.pass_limits(limits),
                               num_threads);
}

void DFlash::extend(const ExecContext& exec, const RowBatch& rows, const void* features,
                    std::span<const KvLayerView> kv) {
  const DFlashConfig& c = config_;
  void* context = scratch_.at(at_.normed);
  void* projected = scratch_.at(at_.kv);
  auto* cos_sin = reinterpret_cast<float*>(scratch_.at(at_.cos_sin));
  const Delta fused = pass_scratch_.delta(exec, fc_, features, rows.num_rows);
  ops::rms_norm(exec, {.residual = scratch_.at(at_.residual),
                       .delta = fused.rows,
                       .delta_partials = fused.partials,
                       .num_partials = fused.num_partials,
                       .starts_residual = true,
                       .weight = hidden_norm_,
                       .out = context,
                       .num_rows = rows.num_rows,
                       .width = c.hidden_size,
                       .eps = c.rms_norm_eps,
                       .dtype = dtype_});
  ops::rope_angles(exec, {.position = rows.row_position,
                          .inv_freq = inv_freq_.floats(),
                          .cos_sin = cos_sin,
                          .num_rows = rows.num_rows,
                          .head_dim = c.head_dim});
  pass_scratch_.linear(exec, context_, context, projected, rows.num_rows, dtype_);
  AppendContextParams append = {.rows = rows,
                                .kv = projected,
                                .cos_sin = cos_sin,
                                .layers = {},
                                .num_layers = c.num_layers,
                                .eps = c.rms_norm_eps,
                                .dtype = dtype_};
  for (size_t i = 0; i < layers_.size(); ++i) append.layers[i] = {layers_[i].k_norm, kv[i]};
  ops::append_context(exec, append);
}

void DFlash::forward(const ExecContext& exec, const RowBatch& rows, const PageTableView& page_table,
                     std::span<const KvLayerView> kv, const void* embedding, void* out) {
  const DFlashConfig& c = config_;
  void* residual = scratch_.at(at_.residual);
  void* normed = scratch_.at(at_.normed);
  ops::embedding(exec, {.token = rows.row_token,
                        .table = c.has_embedding ? embedding_ : embedding,
                        .out = residual,
                        .num_rows = rows.num_rows,
                        .width = c.hidden_size,
                        .dtype = dtype_});
  DecoderPass pass(exec, pass_scratch_, rows, page_table, kv.front(), inv_freq_.floats(), 1.0f,
                   /*first_token=*/0, c.is_causal);
  for (size_t i = 0; i < layers_.size(); ++i) {
    pass.norm(residual, layers_[i].input_norm, normed);
    pass.attend(layers_[i], normed, kv[i]);
    pass.norm(residual, layers_[i].post_norm, normed);
    pass.mlp(layers_[i], normed);
  }
  pass.norm(residual, final_norm_, out);
}

void DFlash::logits(const ExecContext& exec, const PackedLinear& head, const void* outputs,
                    int count, float* out) {
  pass_scratch_.linear(exec, config_.has_head ? head_ : head, outputs, out, count, DType::kF32);
}

}  // namespace openspec
