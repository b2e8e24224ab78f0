#include "model/targets/target.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "kernels/ops.h"
#include "model/parts/decoder_pass.h"

namespace openspec {

void TargetConfig::validate() const {
  LayerGeometry::validate();
  check_size("num_layers", num_layers);
  check_size("vocab_size", vocab_size);
}

TargetTensors::TargetTensors(Weights& weights, const TargetConfig& c) {
  for (int i = 0; i < c.num_layers; ++i) {
    layers.push_back(add_decoder_layer(weights, c, "model.layers." + std::to_string(i) + "."));
  }
  final_norm = weights.add_norm("model.norm.weight", c.hidden_size);
  head = weights.add_linear("", {"lm_head.weight"}, {c.vocab_size}, c.hidden_size,
                            LinearEpilogue::kNone);
  embedding = weights.add_table("model.embed_tokens.weight", c.vocab_size, c.hidden_size);
  if (c.tie_word_embeddings) weights.tie("lm_head.weight", "model.embed_tokens.weight");
}

void TargetModel::forward(const ExecContext& exec, const RowBatch& rows,
                          const PageTableView& page_table, const std::vector<KvLayerView>& kv,
                          const std::vector<int>& capture_layers, void* captured) {
  const TargetConfig& c = config_;
  OPENSPEC_CHECK(rows.num_rows >= 1 && rows.num_rows <= limits_.max_rows, "a step of ",
                 rows.num_rows, " rows, at most ", limits_.max_rows);
  void* residual = scratch_.residual();
  void* normed = scratch_.normed();
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

  DecoderPass pass(exec, scratch_, rows, page_table, kv.front(), inv_freq_.floats(),
                   /*first_token=*/0, /*is_causal=*/true, /*is_fenced=*/true);
  ops::embedding(exec, {.token = rows.row_token,
                        .table = tensors_.embedding,
                        .out = residual,
                        .num_rows = rows.num_rows,
                        .width = c.hidden_size,
                        .dtype = dtype_});
  for (int i = 0; i < c.num_layers; ++i) {
    const DecoderLayer& layer = tensors_.layers[static_cast<size_t>(i)];
    pass.norm(residual, layer.input_norm, normed);
    capture(i - 1);
    pass.attend(layer, normed, kv[static_cast<size_t>(i)]);
    pass.norm(residual, layer.post_norm, normed);
    pass.mlp(layer, normed);
  }
  pass.norm(residual, tensors_.final_norm, normed);
  capture(c.num_layers - 1);
}

void TargetModel::logits(const ExecContext& exec, const int32_t* row, int count, float* out) {
  OPENSPEC_CHECK(count <= limits_.max_logits_rows, count, " rows of logits, at most ",
                 limits_.max_logits_rows);
  scratch_.logits(exec, tensors_.head, row, count, out);
}

}  // namespace openspec
