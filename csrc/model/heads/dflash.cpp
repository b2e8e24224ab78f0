#include "model/heads/dflash.h"

#include <string>

#include "core/check.h"
#include "kernels/ops.h"

namespace openspec {

namespace {

/// Of K and V of all layers.
int context_width(const DFlashConfig& config) { return config.num_layers * 2 * config.kv_width(); }
/// Coefficients that a row brings to a convolution of what goes in and what comes out.
int num_taps(const DFlashConfig& config) {
  return config.conv_group == 0 ? 0 : 2 * kConvTaps * config.hidden_size / config.conv_group;
}

BlockConv add_conv(Weights& weights, const DFlashConfig& config, const std::string& prefix) {
  return {weights.add_linear(prefix, {"kernel_projection.weight"}, {num_taps(config)},
                             config.hidden_size, LinearEpilogue::kNone),
          weights.add_values(prefix + "base_kernel", {2, kConvTaps, config.hidden_size}),
          config.conv_group};
}

}  // namespace

void DFlashConfig::validate() const {
  DraftModelConfig::validate();
  OPENSPEC_CHECK_ARG(num_layers <= kMaxContextLayers, "at most ", kMaxContextLayers,
                     " draft layers are supported, got ", num_layers);
  OPENSPEC_CHECK_ARG(head_dim % 32 == 0, "head_dim must be a multiple of 32, got ", head_dim);
  OPENSPEC_CHECK_ARG(sliding_is_causal || !window_follows_rows,
                     "a window that follows the rows is for layers that are causal");
  OPENSPEC_CHECK_ARG(mask_token >= 0 && mask_token < vocab_size, "mask_token must be in [0, ",
                     vocab_size, "), got ", mask_token);
  OPENSPEC_CHECK_ARG(markov_rank >= 0 && markov_rank <= kMaxPairRank && markov_rank % 8 == 0,
                     "markov_rank must be a multiple of 8, at most ", kMaxPairRank, ", got ",
                     markov_rank);
  OPENSPEC_CHECK_ARG(selector_rank >= 0 && selector_rank <= kMaxPairRank && selector_rank % 8 == 0,
                     "selector_rank must be a multiple of 8, at most ", kMaxPairRank, ", got ",
                     selector_rank);
  OPENSPEC_CHECK_ARG(selector_rank == 0 || markov_rank == 0,
                     "a head has a selector or a Markov head, not both");
  OPENSPEC_CHECK_ARG(selector_rank == 0 || draft_vocab_size == vocab_size,
                     "a selector needs the target's whole vocabulary");
  OPENSPEC_CHECK_ARG(
      conv_group >= 0 && conv_group % 8 == 0 && (conv_group == 0 || hidden_size % conv_group == 0),
      "conv_group must be a multiple of 8 that divides ", hidden_size, ", got ", conv_group);
  OPENSPEC_CHECK_ARG(!has_confidence || markov_rank > 0,
                     "a confidence head needs a Markov head beside it");
}

ForwardLimits DFlashConfig::pass_limits(ForwardLimits limits) const {
  limits.max_outputs = context_width(*this);
  limits.max_taps = num_taps(*this);
  return DraftModelConfig::pass_limits(limits);
}

DFlashTensors::DFlashTensors(Weights& weights, const DFlashConfig& c)
    : DraftTensors(weights, c, "hidden_norm.weight") {
  std::vector<std::string> parts;
  for (int i = 0; i < c.num_layers; ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".";
    layers.push_back(add_decoder_layer(weights, c, prefix));
    if (c.conv_group > 0) {
      convs.push_back({add_conv(weights, c, prefix + "attention_conv."),
                       add_conv(weights, c, prefix + "mlp_conv.")});
    }
    for (const char* part : {"k", "v"}) {
      parts.push_back(prefix + "self_attn." + part + "_proj.weight");
    }
  }
  context = weights.add_linear("", parts, std::vector<Part>(parts.size(), c.kv_width()),
                               c.hidden_size, LinearEpilogue::kNone);
  if (c.markov_rank > 0) {
    markov_in = weights.add_table("markov_head.markov_w1.weight", c.vocab_size, c.markov_rank);
    markov_out =
        weights.add_table("markov_head.markov_w2.weight", c.draft_vocab_size, c.markov_rank);
  }
  if (c.selector_rank > 0) {
    const std::string name = "candidate_selector.";
    selector_in = weights.add_table(name + "predecessor_codebook", c.vocab_size, c.selector_rank);
    selector_out = weights.add_table(name + "successor_codebook", c.vocab_size, c.selector_rank);
    selector_hidden = weights.add_linear(name, {"hidden_projection.weight"}, {c.selector_rank},
                                         c.hidden_size, LinearEpilogue::kNone);
  }
  if (c.has_confidence) {
    confidence_weight =
        weights.add_values("confidence_head.proj.weight", {1, c.confidence_inputs()});
    confidence_bias = weights.add_norm("confidence_head.proj.bias", 1);
  }
}

void DFlash::extend(const ExecContext& exec, const RowBatch& rows, const void* features,
                    std::span<const KvLayerView> kv) {
  DecoderPass pass(exec, scratch_, rows, {}, kv.front(), inv_freq_.floats());
  pass.project(tensors_.fc, features);
  pass.norm(scratch_.residual(), tensors_.hidden_norm, scratch_.normed());
  pass.append_context(tensors_.context, tensors_.layers, scratch_.normed(), kv);
}

void DFlash::forward(const ExecContext& exec, Sight whole, Sight sliding,
                     std::span<const KvLayerView> kv, const void* embedding, void* out) {
  const RowBatch& rows = whole.rows;
  whole.is_causal = config_.is_causal;
  sliding.is_causal = config_.sliding_is_causal;
  sliding.window_follows_rows = config_.window_follows_rows;
  void* residual = scratch_.residual();
  void* normed = scratch_.normed();
  ops::embedding(exec, {.token = rows.row_token,
                        .table = config_.has_embedding ? tensors_.embedding : embedding,
                        .out = residual,
                        .num_rows = rows.num_rows,
                        .width = config_.hidden_size,
                        .dtype = dtype_});
  DecoderPass pass(exec, scratch_, rows, whole.pages, kv.front(), inv_freq_.floats());
  for (size_t i = 0; i < kv.size(); ++i) {
    pass.see(config_.slides_at(i) ? sliding : whole);
    const DecoderLayer& layer = tensors_.layers[i];
    const DFlashTensors::Convs* convs = tensors_.convs.empty() ? nullptr : &tensors_.convs[i];
    pass.norm(residual, layer.input_norm, normed);
    pass.attend(layer, convs ? pass.convolve(convs->attention, normed) : normed, kv[i]);
    if (convs) pass.convolve_due(convs->attention);
    pass.norm(residual, layer.post_norm, normed);
    pass.mlp(layer, convs ? pass.convolve(convs->mlp, normed) : normed);
    if (convs) pass.convolve_due(convs->mlp);
  }
  pass.norm(residual, tensors_.final_norm, out);
}

}  // namespace openspec
