#include "model/heads/mtp.h"

#include <string>

#include "core/check.h"
#include "kernels/ops.h"

namespace openspec {

namespace {

const std::string kPrefix = "mtp.";
// Entry 0 of a sequence would need the state of position -1.
constexpr int kFirstToken = 1;

}  // namespace

void MtpConfig::validate() const {
  LayerGeometry::validate(/*may_turn_partly=*/true);
  OPENSPEC_CHECK_ARG(num_layers == 1, "an MTP head has one layer, got ", num_layers);
  OPENSPEC_CHECK_ARG(num_captures == 1, "an MTP head reads one state of a row, got ", num_captures);
  check_size("draft_vocab_size", draft_vocab_size);
  OPENSPEC_CHECK_ARG(draft_vocab_size <= vocab_size, "draft_vocab_size (", draft_vocab_size,
                     ") exceeds the target's vocabulary of ", vocab_size);
}

MtpTensors::MtpTensors(Weights& weights, const MtpConfig& c) {
  weights.expect_quantized(c.quantized);
  fc = weights.add_linear("", {kPrefix + "fc.weight"}, {c.hidden_size}, c.attention_inputs(),
                          LinearEpilogue::kNone, /*may_split=*/true);
  const auto add_norm = [&](const char* name) {
    return weights.add_norm(kPrefix + name, c.hidden_size, c.norms_from_one);
  };
  embedding_norm = add_norm("pre_fc_norm_embedding.weight");
  state_norm = add_norm("pre_fc_norm_hidden.weight");
  LayerGeometry inner = c;
  inner.num_inputs = 1;
  layer = add_decoder_layer(weights, inner, kPrefix + "layers.0.");
  final_norm = add_norm("norm.weight");
}

DecoderPass Mtp::begin_pass(const ExecContext& exec, const Sight& whole, const KvLayerView& kv,
                            const void* embedding, void* state) {
  const RowBatch& rows = whole.rows;
  void* residual = scratch_.residual();
  std::byte* inputs = scratch_.attention_in();
  const int64_t stride = config_.attention_inputs();
  ops::embedding(exec, {.token = rows.row_token,
                        .table = embedding,
                        .out = residual,
                        .num_rows = rows.num_rows,
                        .width = config_.hidden_size,
                        .dtype = dtype_});
  DecoderPass pass(exec, scratch_, rows, whole.pages, kv, inv_freq_.floats(), kFirstToken);
  pass.norm(residual, tensors_.embedding_norm, inputs, stride);
  pass.norm(state, tensors_.state_norm, inputs + row_bytes(), stride);
  pass.project(tensors_.fc, inputs);
  pass.norm(residual, tensors_.layer.input_norm, scratch_.normed());
  return pass;
}

void Mtp::append(const ExecContext& exec, const Sight& whole, const Sight& /*sliding*/,
                 std::span<const KvLayerView> kv, const void* embedding, void* captured,
                 void* hidden) {
  ops::copy_rows(exec, nullptr, captured, hidden, whole.rows.num_rows, row_bytes());
  begin_pass(exec, whole, kv.front(), embedding, captured)
      .append(tensors_.layer, scratch_.normed(), kv.front());
}

void Mtp::forward(const ExecContext& exec, const Sight& whole, const Sight& /*sliding*/,
                  std::span<const KvLayerView> kv, const void* embedding, void* hidden) {
  void *residual = scratch_.residual(), *normed = scratch_.normed();
  DecoderPass pass = begin_pass(exec, whole, kv.front(), embedding, hidden);
  pass.attend(tensors_.layer, normed, kv.front());
  pass.norm(residual, tensors_.layer.post_norm, normed);
  pass.mlp(tensors_.layer, normed);
  pass.norm(residual, tensors_.final_norm, normed);
  ops::copy_rows(exec, nullptr, normed, hidden, whole.rows.num_rows, row_bytes());
}

}  // namespace openspec
