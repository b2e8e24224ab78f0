#include "model/qwen3.h"

#include <algorithm>

#include "core/check.h"
#include "kernels/ops.h"

namespace openspec {

void TargetConfig::validate() const {
  layer().validate();
  check_size("num_layers", num_layers);
  check_size("vocab_size", vocab_size);
  OPENSPEC_CHECK_ARG(static_cast<int>(inv_freq.size()) == head_dim / 2, "inv_freq has ",
                     inv_freq.size(), " entries, expected ", head_dim / 2);
}

LayerGeometry TargetConfig::layer() const {
  return {.hidden_size = hidden_size,
          .attention_inputs = hidden_size,
          .num_q_heads = num_q_heads,
          .num_kv_heads = num_kv_heads,
          .head_dim = head_dim,
          .intermediate_size = intermediate_size,
          .has_qk_norm = true,
          .rms_norm_eps = rms_norm_eps};
}

Qwen3::Qwen3(const TargetConfig& config, DType dtype, Device device, const ForwardLimits& limits,
             int num_threads)
    : config_((config.validate(), check_geometry(config.layer(), dtype, device), config)),
      dtype_(dtype),
      limits_(limits),
      weights_(device, weight_bytes(config, device)),
      at_(plan_scratch(config_, dtype_, limits_)),
      pass_scratch_(config_.layer(), dtype_, device, limits_, num_threads) {
  inv_freq_ = copy_for(device, config_.inv_freq);
  add_weights();
  scratch_ = Buffer(at_.total, memory_of(device));
}

void Qwen3::add_weights() {
  const TargetConfig& c = config_;
  for (int i = 0; i < c.num_layers; ++i) {
    layers_.push_back(
        add_decoder_layer(weights_, c.layer(), "model.layers." + std::to_string(i) + "."));
  }
  final_norm_ = weights_.add_norm("model.norm.weight", c.hidden_size);
  head_ = weights_.add_linear("", {"lm_head.weight"}, {c.vocab_size}, c.hidden_size,
                              LinearEpilogue::kNone);
  embedding_ = weights_.add_table("model.embed_tokens.weight", c.vocab_size, c.hidden_size);
  if (c.tie_word_embeddings) weights_.tie("lm_head.weight", "model.embed_tokens.weight");
}

size_t Qwen3::weight_bytes(const TargetConfig& c, Device device) {
  return decoder_layer_bytes(c.layer(), device) * static_cast<size_t>(c.num_layers) +
         Weights::norm_bytes(c.hidden_size) +
         Weights::linear_bytes(device, c.vocab_size, c.hidden_size, LinearEpilogue::kNone) +
         Weights::table_bytes(c.vocab_size, c.hidden_size);
}

Qwen3::Scratch Qwen3::plan_scratch(const TargetConfig& c, DType dtype,
                                   const ForwardLimits& limits) {
  Scratch at{};
  const auto take = [&](int num_rows) {
    const size_t offset = at.total;
    at.total += area_bytes(static_cast<size_t>(num_rows) * static_cast<size_t>(c.hidden_size) *
                           dtype_bytes(dtype));
    return offset;
  };
  at.residual = take(limits.max_rows);
  at.normed = take(limits.max_rows);
  at.gathered = take(limits.max_logits_rows);
  return at;
}

size_t Qwen3::scratch_bytes(const TargetConfig& config, DType dtype, Device device,
                            const ForwardLimits& limits, int num_threads) {
  return plan_scratch(config, dtype, limits).total +
         DecoderScratch::bytes(config.layer(), dtype, device, limits, num_threads);
}

void Qwen3::forward(const ExecContext& exec, const RowBatch& rows, const PageTableView& page_table,
                    const std::vector<KvLayerView>& kv, const std::vector<int>& capture_layers,
                    void* captured) {
  const TargetConfig& c = config_;
  OPENSPEC_CHECK(rows.num_rows >= 1 && rows.num_rows <= limits_.max_rows, "a step of ",
                 rows.num_rows, " rows, at most ", limits_.max_rows);
  void* residual = scratch_.at(at_.residual);
  void* normed = scratch_.at(at_.normed);
  const size_t row_bytes = static_cast<size_t>(c.hidden_size) * dtype_bytes(dtype_);

  // Layer i's output is complete once the next norm has added what is due.
  const auto capture = [&](int layer) {
    const auto found = std::find(capture_layers.begin(), capture_layers.end(), layer);
    if (found == capture_layers.end()) return;
    ops::gather_rows(exec, {.in = residual,
                            .out = static_cast<std::byte*>(captured) +
                                   row_bytes * static_cast<size_t>(found - capture_layers.begin()),
                            .num_rows = rows.num_rows,
                            .width_bytes = static_cast<int64_t>(row_bytes),
                            .out_stride = static_cast<int64_t>(row_bytes * capture_layers.size())});
  };

  DecoderPass pass(exec, pass_scratch_, rows, page_table, kv.front(), inv_freq_.floats(),
                   c.rope_scale, /*first_token=*/0, /*is_causal=*/true, /*is_fenced=*/true);
  ops::embedding(exec, {.token = rows.row_token,
                        .table = embedding_,
                        .out = residual,
                        .num_rows = rows.num_rows,
                        .width = c.hidden_size,
                        .dtype = dtype_});
  for (int i = 0; i < c.num_layers; ++i) {
    const DecoderLayer& layer = layers_[static_cast<size_t>(i)];
    pass.norm(residual, layer.input_norm, normed);
    capture(i - 1);
    pass.attend(layer, normed, kv[static_cast<size_t>(i)]);
    pass.norm(residual, layer.post_norm, normed);
    pass.mlp(layer, normed);
  }
  pass.norm(residual, final_norm_, normed);
  capture(c.num_layers - 1);
}

void Qwen3::logits(const ExecContext& exec, const int32_t* row, int count, float* out) {
  OPENSPEC_CHECK(count <= limits_.max_logits_rows, count, " rows of logits, at most ",
                 limits_.max_logits_rows);
  const int64_t width =
      static_cast<int64_t>(config_.hidden_size) * static_cast<int64_t>(dtype_bytes(dtype_));
  ops::gather_rows(exec, {.row = row,
                          .in = scratch_.at(at_.normed),
                          .out = scratch_.at(at_.gathered),
                          .num_rows = count,
                          .width_bytes = width,
                          .out_stride = width});
  pass_scratch_.linear(exec, head_, scratch_.at(at_.gathered), out, count, DType::kF32);
}

}  // namespace openspec
