#include "model/heads/eagle3.h"

#include <string>

#include "core/check.h"
#include "kernels/ops.h"

namespace openspec {

namespace {

const std::string kFirstLayer = "midlayer.";
constexpr int kMostLayers = 64;
// Entry 0 of a sequence would need the feature of position -1.
constexpr int kFirstToken = 1;

}  // namespace

void Eagle3Config::validate() const {
  DraftModelConfig::validate();
  OPENSPEC_CHECK_ARG(num_layers <= kMostLayers, "at most ", kMostLayers,
                     " draft layers are supported, got ", num_layers);
}

Eagle3Tensors::Eagle3Tensors(Weights& weights, const Eagle3Config& config)
    : DraftTensors(weights, config, kFirstLayer + "hidden_norm.weight") {
  layers.push_back(add_decoder_layer(weights, config, kFirstLayer));
  LayerGeometry inner = config;
  inner.num_inputs = 1;
  for (int i = 1; i < config.num_layers; ++i) {
    layers.push_back(add_decoder_layer(weights, inner, "layers." + std::to_string(i) + "."));
  }
  if (config.capture_norm == CaptureNorm::kWhole) {
    capture_norms.push_back(
        weights.add_norm("input_norm.weight", config.num_captures * config.hidden_size));
  } else if (config.capture_norm == CaptureNorm::kSlices) {
    for (int i = 0; i < config.num_captures; ++i) {
      const std::string name = "fc_norm." + std::to_string(i) + ".weight";
      capture_norms.push_back(weights.add_norm(name, config.hidden_size));
    }
  }
  if (config.has_mask_hidden) {
    mask_hidden = weights.add_table_row("mask_hidden", config.num_captures * config.hidden_size);
  }
}

void Eagle3::norm_captures(const ExecContext& exec, void* captured, int num_rows) {
  const int64_t stride = int64_t{config_.num_captures} * config_.hidden_size;
  const auto num_norms = static_cast<int64_t>(tensors_.capture_norms.size());
  for (int64_t i = 0; i < num_norms; ++i) {
    const int64_t width = stride / num_norms;
    void* slice =
        static_cast<std::byte*>(captured) + i * width * static_cast<int64_t>(dtype_bytes(dtype_));
    ops::rms_norm(exec, {.residual = slice,
                         .residual_stride = stride,
                         .weight = tensors_.capture_norms[static_cast<size_t>(i)],
                         .out = slice,
                         .out_stride = stride,
                         .num_rows = num_rows,
                         .width = static_cast<int>(width),
                         .eps = config_.rms_norm_eps,
                         .dtype = dtype_});
  }
}

DecoderPass Eagle3::begin_pass(const ExecContext& exec, const Sight& whole,
                               std::span<const KvLayerView> kv, const void* embedding,
                               void* captured, void* hidden) {
  const RowBatch& rows = whole.rows;
  void* embedded = scratch_.residual();
  std::byte* attention_in = scratch_.attention_in();
  const int64_t stride = config_.attention_inputs();
  ops::embedding(exec, {.token = rows.row_token,
                        .table = config_.has_embedding ? tensors_.embedding : embedding,
                        .out = embedded,
                        .num_rows = rows.num_rows,
                        .width = config_.hidden_size,
                        .dtype = dtype_});
  DecoderPass pass(exec, scratch_, rows, whole.pages, kv.front(), inv_freq_.floats(), kFirstToken);
  if (captured != nullptr) {
    norm_captures(exec, captured, rows.num_rows);
    pass.project(tensors_.fc, captured);
  }
  pass.norm(hidden, tensors_.hidden_norm, attention_in + row_bytes(), stride);
  pass.norm(embedded, tensors_.layers.front().input_norm, attention_in, stride);
  return pass;
}

void Eagle3::run_layers(DecoderPass& pass, const Sight& whole, const Sight& sliding,
                        std::span<const KvLayerView> kv, void* residual, bool is_append) {
  void* normed = scratch_.normed();
  void* in = scratch_.attention_in();
  for (size_t i = 0; i < kv.size(); ++i) {
    const DecoderLayer& layer = tensors_.layers[i];
    pass.see(config_.slides_at(i) ? sliding : whole);
    if (i > 0) {
      pass.norm(residual, layer.input_norm, normed);
      in = normed;
    }
    if (is_append && i + 1 == kv.size()) {
      pass.append(layer, in, kv[i]);
      return;
    }
    pass.attend(layer, in, kv[i]);
    pass.norm(residual, layer.post_norm, normed);
    pass.mlp(layer, normed);
  }
}

void Eagle3::append(const ExecContext& exec, const Sight& whole, const Sight& sliding,
                    std::span<const KvLayerView> kv, const void* embedding, void* captured,
                    void* hidden) {
  DecoderPass pass = begin_pass(exec, whole, kv, embedding, captured, hidden);
  void* residual = scratch_.residual();  // the features stay as they are
  if (kv.size() > 1 && config_.norm_before_residual) {
    pass.norm(hidden, tensors_.hidden_norm, residual);
  } else if (kv.size() > 1) {
    ops::copy_rows(exec, nullptr, hidden, residual, whole.rows.num_rows, row_bytes());
  }
  run_layers(pass, whole, sliding, kv, residual, /*is_append=*/true);
}

void Eagle3::forward(const ExecContext& exec, const Sight& whole, const Sight& sliding,
                     std::span<const KvLayerView> kv, const void* embedding, void* hidden) {
  DecoderPass pass = begin_pass(exec, whole, kv, embedding, /*captured=*/nullptr, hidden);
  void* residual = hidden;
  if (config_.norm_before_residual) {
    residual = scratch_.residual();
    pass.norm(hidden, tensors_.hidden_norm, residual);
  }
  run_layers(pass, whole, sliding, kv, residual, /*is_append=*/false);
  pass.norm(residual, tensors_.final_norm, scratch_.normed());
  const void* output = config_.norm_output ? scratch_.normed() : residual;
  if (output != hidden) {
    ops::copy_rows(exec, nullptr, output, hidden, whole.rows.num_rows, row_bytes());
  }
}

void Eagle3::mask_feature(const ExecContext& exec, const int32_t* zero, void* captured,
                          void* feature) {
  ops::embedding(exec, {.token = zero,
                        .table = tensors_.mask_hidden,
                        .out = captured,
                        .num_rows = 1,
                        .width = config_.num_captures * config_.hidden_size,
                        .dtype = dtype_});
  norm_captures(exec, captured, 1);
  scratch_.linear(exec, tensors_.fc, captured, feature, 1);
}

}  // namespace openspec
